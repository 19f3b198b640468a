"""Runs every kernel that is made for this machine's chip, against an oracle, and times it.

    python -m launch.device_check                  # writes device_check.json
    python -m launch.device_check --json=b200.json

Codes must be equal byte for byte to those of the formula in numpy; products and attention are held
against the XLA backend on the CPU. Throughput is that of the best of a few rounds. A kernel that
fails hides no other; exit status 1 says that one did. Without an accelerator there is nothing to
do. On a machine with a GPU install jax with CUDA: `pip install --constraint constraints.txt
--editable . "jax[cuda13]"`.
"""

import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

from launch import jax_setup, kernel_cases

_JSON = flags.DEFINE_string("json", "device_check.json", "Where the results go.")

ROUNDS, ROUND_SECONDS = 5, 0.1


class Peak(NamedTuple):
    """What a device could do: FLOP/s without sparsity by precision, and bytes/s."""

    chip: str
    flops: dict[str, float]
    bandwidth: float


# By the start of jax's name for a device. From the makers' data sheets: H100 SXM, H200 SXM, HGX
# B200 (an eighth of its board), and Google's pages on v5p, v6e and TPU7x, which is two devices.
PEAKS = {
    "NVIDIA H100": Peak("h100", {"bf16": 989e12, "fp8": 1979e12}, 3.35e12),
    "NVIDIA H200": Peak("h100", {"bf16": 989e12, "fp8": 1979e12}, 4.8e12),
    "NVIDIA B200": Peak("b200", {"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9e15}, 8e12),
    "TPU v5": Peak("v5p:2x2x1", {"bf16": 459e12}, 2.765e12),
    "TPU v6 lite": Peak("v6e:2x2", {"bf16": 918e12}, 1.64e12),
    "TPU7x": Peak("tpu7x:2x2x1", {"bf16": 1153.5e12, "fp8": 2307e12}, 3.69e12),
}


class Check(NamedTuple):
    """A program of arrays, and the case whose arrays, oracle, tolerance and work it has."""

    name: str
    program: Callable[..., Any]
    case: kernel_cases.Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a check.

    Attributes:
      name: of the check.
      failure: what is wrong, or None.
      seconds: of one execution, or None if it was not timed.
      rate: FLOP/s or bytes/s.
      unit: "FLOP" or "B".
      share: of the device's peak, or None if that is not known.
    """

    name: str
    failure: str | None
    seconds: float | None = None
    rate: float | None = None
    unit: str | None = None
    share: float | None = None


def main(argv: list[str]) -> None:
    """Checks the first device."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        print("jax sees no accelerator: nothing to check")
        return
    peak = peak_of(device)
    if peak is None:
        print(f"{device.device_kind}: no kernel is made for it; known are {', '.join(PEAKS)}")
        return
    checks = [
        Check(name, partial(case.run, impl), case)
        for name, (case, impl) in kernel_cases.jobs().items()
        if peak.chip in kernel_cases.chips(case, impl)
        and case.arrays
        and impl != kernel_cases.APPROXIMATE
    ]
    outcomes = []
    for outcome in run(checks, device, peak):
        outcomes.append(outcome)
        print(f"[{len(outcomes)}/{len(checks)}] {describe(outcome)}", flush=True)
    report = {
        "device": device.device_kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    Path(_JSON.value).write_text(json.dumps(report, indent=1) + "\n")
    failures = sum(outcome.failure is not None for outcome in outcomes)
    print(f"{device.device_kind}: {len(outcomes)} programs, {failures} wrong; see {_JSON.value}")
    sys.exit(1 if failures else 0)


def peak_of(device: jax.Device) -> Peak | None:
    """The entry of `PEAKS` for a device."""
    if device.device_kind == "TPU v5 lite":
        return None
    names = [name for name in PEAKS if device.device_kind.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None


def run(checks: list[Check], device: jax.Device, peak: Peak | None = None) -> Iterator[Outcome]:
    """Outcomes of checks on a device, as they come; no exception of a check gets out."""
    for case, group in itertools.groupby(checks, lambda check: check.case):
        arrays = case.arrays()
        with jax.default_device(jax.devices("cpu")[0]):
            expected = jax.device_get(case.oracle(*arrays))
        for check in group:
            try:
                yield _outcome(check, arrays, expected, device, peak)
            except Exception as error:  # of whatever kind: the others must run still
                yield Outcome(name=check.name, failure=f"{type(error).__name__}: {error}"[:400])


def _outcome(check, arrays, expected, device, peak) -> Outcome:
    case = check.case
    with jax.default_device(device):
        args = jax.device_put(arrays, device)
        compiled = jax.jit(check.program).lower(*args).compile()
        failure = difference(jax.device_get(compiled(*args)), expected, case.tolerance)
        seconds = best_seconds(lambda: compiled(*args))
    rate = case.work / seconds
    best = peak and (peak.bandwidth if case.unit == "B" else peak.flops.get(case.precision))
    return Outcome(
        name=check.name,
        failure=failure,
        seconds=seconds,
        rate=rate,
        unit=case.unit,
        share=rate / best if best else None,
    )


def best_seconds(step: Callable[[], Any]) -> float:
    """Seconds of one step in the best of a few rounds, each long enough to hide its start."""

    def round_of(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            out = step()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / steps

    steps = max(1, int(ROUND_SECONDS / round_of(1)))
    return min(round_of(steps) for _ in range(ROUNDS))


def difference(got: Any, expected: Any, tolerance: tuple[float, float] | None) -> str | None:
    """How two trees of arrays differ, or None.

    Args:
      got: arrays.
      expected: as many, of the same shapes.
      tolerance: relative to an element, and relative to the root mean square of the array; None
        if bits must be equal.
    """
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for i, (a, b) in enumerate(np.atleast_1d(*pair) for pair in pairs):
        if a.shape != b.shape:
            return f"result {i} has shape {a.shape}, not {b.shape}"
        if tolerance is None:
            wrong = a.view(np.uint8) != b.view(np.uint8)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            bound = tolerance[0] * np.abs(b) + tolerance[1] * np.sqrt(np.mean(b * b))
            wrong = ~(np.abs(a - b) <= bound)  # NaN is wrong too
        if count := int(wrong.sum()):
            return f"result {i} is wrong in {count} of {wrong.size} places"
    return None


def describe(outcome: Outcome) -> str:
    """One line for people."""
    text = f"{outcome.name}: "
    if outcome.seconds is not None:
        text += f"{outcome.seconds * 1e3:.3f} ms, {outcome.rate / 1e12:.3g} T{outcome.unit}/s"
        text += f" ({outcome.share:.0%} of the peak)" if outcome.share is not None else ""
        text += ", "
    return text + (f"FAILED: {outcome.failure}" if outcome.failure else "ok")


def versions() -> dict[str, str]:
    """Of Python and of the packages that compile and run the kernels, where installed."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    jax_setup.quiet_logs()
    app.run(main)
