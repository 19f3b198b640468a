"""The config of a pool."""

from dataclasses import dataclass, field
from typing import Literal

from c2.config import ConfigError
from c2.sandbox.pool.core import Limits


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """A pool on this machine.

    Attributes:
      nodes: node processes.
      backend: what they run: "bwrap", or "zygote", several times as fast behind the same walls, or
        "gvisor", with a kernel of its own for each.
      limits: when a sandbox may start.
      wait_s: seconds that a create waits to be admitted.
      log: file of events, or None; a pool that goes on with it first ends what is open there.
    """

    nodes: int = 1
    backend: Literal["bwrap", "zygote", "gvisor"] = "bwrap"
    limits: Limits = field(default_factory=Limits)
    wait_s: float = 60.0
    log: str | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"nodes: {self.nodes}; legal are 1 and more")
        if not 0 <= self.wait_s < float("inf"):
            raise ConfigError(f"wait_s: {self.wait_s}; legal are finite numbers >= 0")
