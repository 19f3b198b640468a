"""What a server lets in."""

from dataclasses import dataclass

from c2.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the world sees.

    Attributes:
      model: name of the model.
      max_waiting: sequences that may wait for a slot; more are refused.
      max_body: bytes of a request.
    """

    model: str = "policy"
    max_waiting: int = 256
    max_body: int = 16 * 2**20

    def __post_init__(self):
        if not self.model:
            raise ConfigError("model: it is empty; legal: a name")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting: {self.max_waiting}; legal: at least 0")
        if self.max_body < 1:
            raise ConfigError(f"max_body: {self.max_body}; legal: at least 1")
