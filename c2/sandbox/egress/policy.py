"""What a sandbox may reach. Nothing else is possible: an empty policy allows nothing."""

import json
import re
from dataclasses import dataclass, field
from string import Formatter
from typing import Literal
from urllib.parse import unquote

from c2.config import ConfigError, to_dict

MAX_JSON = 1 << 16
MAX_PORTS = 64
NAMES_PORT = 53
PORTS = {"https": 443, "http": 80}
LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
HOST = re.compile(rf"(?=.{{1,253}}\Z)(\*\.{LABEL}\.)?({LABEL}\.)*(?![0-9]+\Z){LABEL}")
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# Headers that say where a request goes and where it ends.
FRAMING = ("host", "connection", "content-length", "transfer-encoding")
# What servers have been known to read in more than one way: encoded separators, parameters of a
# segment, empty segments, and an encoding inside an encoding.
AMBIGUOUS = re.compile(r"%2f|%5c|%25|%00|[\\;]|//", re.IGNORECASE)


class Denied(Exception):
    """A request that the policy does not allow.

    Attributes:
      reason: one line, without anything that the sandbox has chosen freely.
      status: that of the HTTP answer.
      decision: what the log calls it.
    """

    decision = "deny"

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


class Failed(Denied):
    """A request that is allowed, but cannot be answered."""

    decision = "fail"

    def __init__(self, reason: str) -> None:
        super().__init__(reason, 502)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Requests that are allowed.

    Attributes:
      host: a name such as "example.org", or "*.example.org" for all names below it, but not itself.
      scheme: of the URL.
      port: of the server; None is that of the scheme.
      methods: of HTTP.
      paths: one that ends in "/" stands for all below it, another one for itself.
      max_upload: bytes of a request's body.
      max_download: bytes of an answer's body.
      private: whether the name may lead to addresses that are not public, such as 127.0.0.1.
      secrets: headers that the gate adds; "{token}" in a value stands for that secret of the gate,
        which the sandbox never sees.
    """

    host: str
    scheme: Literal["https", "http"] = "https"
    port: int | None = None
    methods: tuple[str, ...] = ("GET", "HEAD")
    paths: tuple[str, ...] = ("/",)
    max_upload: int = 1 << 16
    max_download: int = 1 << 28
    private: bool = False
    secrets: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not HOST.fullmatch(self.host):
            raise ConfigError(
                f"host: {self.host!r}; legal are names in lower case, with two labels after a '*.'"
            )
        if self.scheme not in PORTS:
            raise ConfigError(f"scheme: {self.scheme!r}; legal are https and http")
        if not 0 < self.at < 65536 or self.at == NAMES_PORT:
            raise ConfigError(f"port: {self.port}; legal are 1 to 65535 without {NAMES_PORT}")
        for method in self.methods:
            if not TOKEN.fullmatch(method) or method in ("CONNECT", "TRACE"):
                raise ConfigError(f"methods: {method!r}; legal are methods but CONNECT and TRACE")
        for path in self.paths:
            if not path.startswith("/") or ambiguous(path):
                raise ConfigError(f"paths: {path!r}; legal are plain paths from '/' on")
        for name in ("max_upload", "max_download"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal are 0 and more")
        if self.secrets and (self.scheme != "https" or "*" in self.host):
            raise ConfigError("secrets: legal only with https and a host without '*'")
        for name, value in self.secrets.items():
            if not TOKEN.fullmatch(name) or name.lower() in FRAMING or not value.isprintable():
                raise ConfigError(f"secrets: {name!r}; legal are a header and one line of text")
        try:
            plain = all(name.isidentifier() for name in self.needs())
        except ValueError:
            plain = False
        if not plain:
            raise ConfigError(
                "secrets: a value has odd braces; legal is, for example, 'Bearer {x}'"
            )

    @property
    def at(self) -> int:
        """The port of the server."""
        return PORTS[self.scheme] if self.port is None else self.port

    def needs(self) -> set[str]:
        """The names of the secrets in it."""
        parsed = (part for value in self.secrets.values() for part in Formatter().parse(value))
        return {name for _, name, _, _ in parsed if name is not None}

    def covers(self, other: "Rule") -> bool:
        """Whether a request that the other rule has allowed may go on under this one."""
        sizes = self.max_upload >= other.max_upload and self.max_download >= other.max_download
        return sizes and self.private >= other.private and self.secrets == other.secrets

    def names(self, host: str) -> bool:
        """Whether it is about this host."""
        below = self.host.startswith("*.") and host.endswith(self.host[1:])
        return host == self.host or (below and HOST.fullmatch(host) is not None)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """All that a sandbox may reach; the first rule that allows a request counts.

    Attributes:
      rules: what is allowed.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        schemes: dict[int, str] = {}
        for rule in self.rules:
            if schemes.setdefault(rule.at, rule.scheme) != rule.scheme:
                raise ConfigError(f"rules: port {rule.at} has http and https; legal is one of them")
        if len(schemes) > MAX_PORTS:
            raise ConfigError(f"rules: {len(schemes)} ports; at most {MAX_PORTS} are legal")
        if (size := len(json.dumps(to_dict(self)))) > MAX_JSON:
            raise ConfigError(f"rules: {size} bytes of JSON; at most {MAX_JSON} are legal")

    def ports(self) -> dict[int, str]:
        """The ports that are served, and the scheme of each."""
        return {rule.at: rule.scheme for rule in self.rules}

    def needs(self) -> set[str]:
        """The names of all secrets in it."""
        return {name for rule in self.rules for name in rule.needs()}

    def resolves(self, host: str) -> bool:
        """Whether the name service knows this host."""
        return any(rule.names(host) for rule in self.rules)


@dataclass(frozen=True)
class Request:
    """What decides about a request: where it goes, and the beginning of its first line.

    Attributes:
      port: which the sandbox has connected to.
      host: in lower case, without a port.
      method: of HTTP.
      path: without the query.
    """

    port: int
    host: str
    method: str
    path: str


def decide(policy: Policy, request: Request) -> Rule:
    """The rule that allows a request; raises `Denied` if there is none."""
    rules = at_host(policy, request.port, request.host)
    rules = [rule for rule in rules if request.method in rule.methods]
    if not rules:
        raise Denied("the policy does not allow this method there", 405)
    for rule in rules:
        if _below(request.path, rule.paths):
            return rule
    raise Denied("the policy does not allow this path there")


def at_host(policy: Policy, port: int, host: str) -> list[Rule]:
    """The rules about a host and port; raises `Denied` if there are none."""
    rules = [rule for rule in policy.rules if rule.at == port and rule.names(host)]
    if not rules:
        raise Denied("the policy does not allow this host and port")
    return rules


def ambiguous(path: str) -> bool:
    """Whether servers might disagree about where a path leads."""
    dots = any(part in (".", "..") for part in unquote(path).split("/"))
    return dots or AMBIGUOUS.search(path) is not None


def _below(path: str, patterns: tuple[str, ...]) -> bool:
    if "/" in patterns:
        return True
    plain = not ambiguous(path)
    path = unquote(path)
    return plain and any(
        path == pattern or (pattern.endswith("/") and path.startswith(pattern))
        for pattern in patterns
    )
