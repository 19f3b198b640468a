"""Where the sandboxes of a cluster are."""

import re
from dataclasses import dataclass

from c2.config import ConfigError

NAME = r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?"


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """A warm pool, and who takes sandboxes from it.

    Attributes:
      owner: names one process, such as a run. When it starts again after its death, it first
        deletes all sandboxes that it had; two processes of one name would delete each other's.
      pool: the SandboxWarmPool.
      namespace: of the pool.
      context: of the kubeconfig file; None takes the current one, or that of the pod we are in.
      runtime_classes: of which kernels the sandboxes may run on.
      start_s: seconds that a sandbox may take to be ready.
    """

    owner: str
    pool: str = "c2"
    namespace: str = "c2-sandboxes"
    context: str | None = None
    runtime_classes: tuple[str, ...] = ("gvisor", "kata", "kata-qemu", "kata-clh", "kata-fc")
    start_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("owner", "pool", "namespace"):
            if not re.fullmatch(NAME, value := getattr(self, name)):
                raise ConfigError(f"{name}: {value!r}; legal are a-z, 0-9 and -, at most 40")
        if not self.runtime_classes:
            raise ConfigError("runtime_classes: there is none; legal are names of RuntimeClasses")
        if not 0 < self.start_s < float("inf"):
            raise ConfigError(f"start_s: {self.start_s}; legal are finite numbers > 0")
