"""How the ranks of one writer agree on a version, with nothing but the store between them."""

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from c2.weights import manifest
from c2.weights.manifest import Manifest, MismatchError, Tensors
from c2.weights.store import Store

T = TypeVar("T")

_SHORTEST, _LONGEST = 0.01, 1.0  # seconds between two looks


class Share(NamedTuple):
    """One rank's part of a version.

    Attributes:
      step: the trainer's name for the state, the same on all ranks.
      base: the version and chain hash that chunks are deltas of; None if they are full.
      tensors: with this rank's chunks.
    """

    step: int
    base: tuple[int, str] | None
    tensors: Tensors


def hand_in(store: Store, name: str, share: Share) -> None:
    """Leaves a share for the leader."""
    tensors = {key: dataclasses.asdict(tensor) for key, tensor in share.tensors.items()}
    store.write(name, manifest.dump(share._replace(tensors=tensors)._asdict()))


def collect(store: Store, name: str, step: int, patience: float) -> Share:
    """Waits for a share of this step; what an earlier attempt at the version left is not it.

    Raises:
      TimeoutError: if it does not come within ``patience`` seconds.
    """

    def look() -> Share | None:
        try:
            found = manifest.load(store.read(name))
        except FileNotFoundError:
            return None
        base, tensors = found["base"], manifest.tensors_from(found["tensors"])
        share = Share(found["step"], base and tuple(base), tensors)
        return share if share.step == step else None

    return _awaited(look, f"{name} of step {step}", patience)


def join(shares: list[Share], *, version: int, epoch: int) -> Manifest:
    """The manifest that all shares make.

    Raises:
      MismatchError: if they do not cover every tensor once, or have different bases.
    """
    bases = {share.base for share in shares if share.base is not None}
    if len(bases) > 1:
        raise MismatchError(f"version {version}: ranks took deltas against {sorted(bases)}")
    base, base_chain = bases.pop() if bases else (None, None)
    step, tensors = shares[0].step, manifest.joined(share.tensors for share in shares)
    return Manifest(
        version=version,
        step=step,
        epoch=epoch,
        base=base,
        base_chain=base_chain,
        chain=manifest.chain_hash(base_chain, version, step, tensors),
        tensors=tensors,
    )


def await_commit(store: Store, name: str, epoch: int, step: int, patience: float) -> Manifest:
    """Waits until the leader has committed a version.

    Raises:
      TimeoutError: if it does not within ``patience`` seconds.
      MismatchError: if the version is another one.
    """

    def look() -> Manifest | None:
        try:
            return manifest.load_manifest(store.read(name))
        except FileNotFoundError:
            return None

    found = _awaited(look, name, patience)
    if (found.epoch, found.step) != (epoch, step):
        raise MismatchError(
            f"{name} is step {found.step} of epoch {found.epoch}, not {step} of {epoch}"
        )
    return found


def _awaited(look: Callable[[], T | None], what: str, patience: float) -> T:
    end, pause = time.monotonic() + patience, _SHORTEST
    while (found := look()) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"{what} has not come within {patience:g} seconds")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
    return found
