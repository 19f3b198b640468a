"""How loaded this machine is, as its kernel sees it."""

from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Pressure:
    """What admission looks at.

    Attributes:
      cpu: percent of the last ten seconds in which something waited for a core.
      memory: percent of them in which something waited for memory.
      available_mb: MiB that programs can still take.
    """

    cpu: float
    memory: float
    available_mb: float


def read(proc: Path = Path("/proc")) -> Pressure:
    """Reads it; a kernel without pressure information counts as one without pressure."""
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024 / MIB
    return Pressure(
        cpu=_stalled(proc / "pressure/cpu"),
        memory=_stalled(proc / "pressure/memory"),
        available_mb=available,
    )


def _stalled(file: Path) -> float:
    """The 10-second average of the line "some avg10=0.00 avg60=..."."""
    try:
        fields = file.read_text().split()
    except OSError:
        return 0.0
    return float(fields[1].removeprefix("avg10="))
