"""Settings of the gate, and whether it can run here."""

import importlib.util
import ipaddress
from dataclasses import dataclass, field

from c2.config import ConfigError

PACKAGES = ("cryptography", "dns", "h11")


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """What the gate of a node knows; policies come with the sandboxes.

    Attributes:
      log: file that gets a line of JSON for every decision, at its end.
      secrets: name -> file with the value, of which white space at the ends does not count.
      authorities: PEM file of authorities that servers may have their certificates from, beside
        those that this machine trusts.
      addresses: name -> IP address, for names that are not to be looked up.
      connections: how many a sandbox may have open at a time.
      idle_s: seconds without progress after which one is closed.
    """

    log: str
    secrets: dict[str, str] = field(default_factory=dict)
    authorities: str | None = None
    addresses: dict[str, str] = field(default_factory=dict)
    connections: int = 64
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.log:
            raise ConfigError("log: it is empty; legal is the path of a file")
        for name, address in self.addresses.items():
            try:
                ipaddress.ip_address(address)
            except ValueError:
                raise ConfigError(
                    f"addresses.{name}: {address!r}; legal are IP addresses"
                ) from None
        if self.connections < 1:
            raise ConfigError(f"connections: {self.connections}; legal are 1 and more")
        if not 0 < self.idle_s < float("inf"):
            raise ConfigError(f"idle_s: {self.idle_s}; legal are finite numbers > 0")


def check_packages() -> None:
    """Raises ConfigError if what the gate is made of is not installed."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"egress: the package {name!r} is missing, so sandboxes can have no network; "
                "install the extra: pip install 'c2[egress]'"
            )
