"""The config of a pool."""

from dataclasses import dataclass, field
from typing import Literal

from c2.config import ConfigError
from c2.sandbox.egress.config import GateConfig
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
      egress: settings of the gate of each node, through which sandboxes reach what their policy
        allows; None for no gate and no network. Not with "gvisor"; needs the extra `egress`.
      log: file of events, or None; a pool that goes on with it first ends what is open there.
    """

    nodes: int = 1
    backend: Literal["bwrap", "zygote", "gvisor"] = "bwrap"
    limits: Limits = field(default_factory=Limits)
    wait_s: float = 60.0
    egress: GateConfig | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"nodes: {self.nodes}; legal are 1 and more")
        if self.egress is not None and self.backend == "gvisor":
            raise ConfigError("egress: backend 'gvisor' can have no gate; legal with it is None")
        if not 0 <= self.wait_s < float("inf"):
            raise ConfigError(f"wait_s: {self.wait_s}; legal are finite numbers >= 0")
