"""One rank's encoded chunks of one version, side by side in few objects."""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from c2.weights import codec
from c2.weights.manifest import BrokenLinkError, Chunk, MismatchError, Tensor, Tensors
from c2.weights.shards import Part, Want
from c2.weights.store import Store

WRITE = 1 << 30  # bytes of a state that go to one object, at most; a larger chunk has its own
READ = 64 << 20  # bytes that are read at once where chunks lie side by side


class Held(NamedTuple):
    """Consecutive elements of one flat tensor: patterns [n] from element ``start`` on."""

    start: int
    bits: np.ndarray


State = Mapping[str, Held]


class Cost(NamedTuple):
    """What a reader spent; seconds are summed over its threads.

    Attributes:
      read: bytes.
      read_s: waiting for the store.
      decode_s: decoding and checking.
    """

    read: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0

    def plus(self, other: "Cost") -> "Cost":
        """The sum of two."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


def held(parts: Mapping[str, Part]) -> dict[str, Held]:
    """A writer's rows as bit patterns."""
    state = {}
    for name, part in parts.items():
        values = np.asarray(part.values)
        row = int(np.prod(values.shape[1:], dtype=np.int64))
        state[name] = Held(part.start * row, codec.bits(values))
    return state


def write(
    store: Store,
    name: str,
    state: State,
    base: State | None,
    forms: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    chunk: int,
    workers: int,
) -> dict[str, Tensor]:
    """Encodes a rank's state and stores it.

    Args:
      store: where to.
      name: of the objects; they get a number.
      state: what to store.
      base: the same elements one version before; None stores the state in full.
      forms: dtype and shape of the whole tensors.
      chunk: elements that are encoded at once, at most.
      workers: threads that encode.

    Returns:
      The tensors with the chunks of this rank.
    """
    pieces = [
        (tensor, start, min(start + chunk, whole.bits.size))
        for tensor, whole in sorted(state.items())
        for start in range(0, whole.bits.size, chunk)
    ]

    def encode(piece: tuple[str, int, int]) -> tuple[codec.Packed, str]:
        tensor, start, stop = piece
        new = state[tensor].bits[start:stop]
        old = None if base is None else base[tensor].bits[start:stop]
        return codec.encode(new, old), hashlib.sha256(new).hexdigest()

    chunks: dict[str, list[Chunk]] = {tensor: [] for tensor in state}
    with ThreadPoolExecutor(workers, "encode weights") as pool:
        for number, group in enumerate(_groups(pieces, state)):
            data, offset = [], 0
            for (tensor, start, stop), (packed, digest) in zip(
                group, pool.map(encode, group), strict=True
            ):
                first = state[tensor].start
                chunks[tensor].append(
                    Chunk(
                        start=first + start,
                        stop=first + stop,
                        sha256=digest,
                        codec=packed.codec,
                        changes=packed.changes,
                        blob=f"{name}-{number}",
                        offset=offset,
                        length=len(packed.data),
                    )
                )
                data.append(packed.data)
                offset += len(packed.data)
            store.write(f"{name}-{number}", b"".join(data))
    return {
        tensor: Tensor(dtype=forms[tensor][0], shape=forms[tensor][1], chunks=tuple(chunks[tensor]))
        for tensor in state
    }


def _groups(pieces: list[tuple[str, int, int]], state: State) -> Iterator[list]:
    """Pieces that share an object."""
    group, size = [], 0
    for tensor, start, stop in pieces:
        more = (stop - start) * state[tensor].bits.itemsize
        if group and size + more > WRITE:
            yield group
            group, size = [], 0
        group.append((tensor, start, stop))
        size += more
    if group:
        yield group


def stage(
    store: Store, tensors: Tensors, want: Mapping[str, Want], base: State | None, *, workers: int
) -> tuple[dict[str, Held], Cost]:
    """Builds and checks the wanted elements of a version beside those of its base.

    Args:
      store: where from.
      tensors: of the version's manifest.
      want: what this reader holds of each of them.
      base: what it holds of the version before; None if every chunk is full.
      workers: threads that read and decode.

    Raises:
      MismatchError: if these are not the tensors that the reader expects.
      BrokenLinkError: if something is missing or damaged, or the base is not that of the chunks.
    """
    _check_forms(tensors, want)
    state, targets = {}, {}
    for name, tensor in tensors.items():
        first, last = want[name].flat
        needed = [c for c in tensor.chunks if max(c.start, first) < min(c.stop, last)]
        start, stop = (needed[0].start, needed[-1].stop) if needed else (first, first)
        if base is None:
            bits = np.empty(stop - start, f"u{np.dtype(tensor.dtype).itemsize}")
        elif (base[name].start, base[name].bits.size) == (start, stop - start):
            bits = base[name].bits.copy()
        else:
            raise BrokenLinkError(f"{name}: chunks are not those of the base")
        state[name] = Held(start, bits)
        for chunk in needed:
            if base is None and chunk.codec != "full":
                raise BrokenLinkError(f"{name}: a delta without a base")
            place = chunk.blob, chunk.offset
            targets[place] = name, chunk, bits[chunk.start - start : chunk.stop - start]

    def build(run: list[tuple[str, Chunk, np.ndarray]]) -> Cost:
        first, last = run[0][1], run[-1][1]
        began = time.perf_counter()
        data = _read(store, first.blob, first.offset, last.offset + last.length)
        here = time.perf_counter()
        for name, chunk, out in run:
            at = chunk.offset - first.offset
            _decode(name, chunk, data[at : at + chunk.length], out)
        return Cost(len(data), here - began, time.perf_counter() - here)

    total = Cost()
    with ThreadPoolExecutor(workers, "decode weights") as pool:
        for cost in pool.map(build, _runs(targets[place] for place in sorted(targets))):
            total = total.plus(cost)
    return state, total


def _check_forms(tensors: Tensors, want: Mapping[str, Want]) -> None:
    for names, problem in (
        (want.keys() - tensors.keys(), "missing in this version"),
        (tensors.keys() - want.keys(), "unknown to this reader"),
    ):
        if names:
            raise MismatchError(f"{problem}: {', '.join(sorted(names)[:5])} ({len(names)} tensors)")
    for name, tensor in tensors.items():
        published, expected = (tensor.dtype, tensor.shape), (want[name].dtype, want[name].shape)
        if published != expected:
            raise MismatchError(f"{name}: {published} is published, {expected} expected")


def _runs(targets: Iterable[tuple[str, Chunk, np.ndarray]]) -> list[list]:
    """Groups of chunks that follow each other in a blob."""
    runs: list[list] = []
    for target in targets:
        chunk, last = target[1], runs[-1][-1][1] if runs else None
        follows = last and (last.blob, last.offset + last.length) == (chunk.blob, chunk.offset)
        if follows and chunk.offset + chunk.length - runs[-1][0][1].offset <= READ:
            runs[-1].append(target)
        else:
            runs.append([target])
    return runs


def _read(store: Store, name: str, start: int, stop: int) -> memoryview:
    try:
        data = store.read(name, start, stop)
    except FileNotFoundError:
        raise BrokenLinkError(f"{name} is missing") from None
    if len(data) != stop - start:
        raise BrokenLinkError(f"{name} ends before byte {stop}")
    return memoryview(data)


def _decode(name: str, chunk: Chunk, data: memoryview, out: np.ndarray) -> None:
    where = f"{name} [{chunk.start}:{chunk.stop}] in {chunk.blob}"
    try:
        codec.decode(codec.Packed(chunk.codec, data, chunk.changes), out)
    except codec.CodecError as error:
        raise BrokenLinkError(f"{where}: {error}") from error
    if hashlib.sha256(out).hexdigest() != chunk.sha256:
        raise BrokenLinkError(f"{where}: checksum differs")
