"""What becomes of a request: the one that a server gets, or the reason why none does."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h11

from c2.sandbox.egress import headers
from c2.sandbox.egress.policy import PORTS, Denied, Policy, Request, Rule, decide

HOST = re.compile(r"([a-z0-9._-]+)(?::([0-9]{1,5}))?")
# Of requests with secrets: a server may show them, and must do so in plain and in one piece.
SPLITTING = (b"accept-encoding", b"range", b"if-range")


@dataclass(frozen=True)
class Call:
    """A request that may be made.

    Attributes:
      request: what was judged.
      rule: that allows it.
      head: what is sent.
      hidden: secrets that must not come back.
    """

    request: Request
    rule: Rule
    head: h11.Request
    hidden: tuple[bytes, ...]


def judge(
    head: h11.Request,
    port: int,
    host: str | None,
    policy: Policy,
    secrets: Mapping[str, str],
    about: dict[str, Any],
) -> Call:
    """Judges a request.

    Args:
      head: as it came.
      port: that was connected to.
      host: that was named for encryption; None without.
      policy: in force.
      secrets: of the gate.
      about: takes, for the log, what is known of the request, whatever the outcome.

    Raises:
      Denied: if it is not allowed.
    """
    method, target = head.method.decode("latin-1"), head.target.decode("latin-1")
    given = headers.values(head.headers, b"host")
    about |= {"method": method, "host": b", ".join(given).decode("latin-1"), "target": target}
    if head.http_version not in (b"1.0", b"1.1"):
        raise Denied("only HTTP/1.1 is spoken here", 505)
    host = about["host"] = _host(given, port, host)
    if not target.startswith("/") or target.startswith("//") or "#" in target:
        raise Denied("a target must be a path", 400)
    request = Request(port, host, method, target.partition("?")[0])
    rule = decide(policy, request)
    about["scheme"] = rule.scheme
    framing = _framing(head)
    for name, value in framing:
        if name == b"content-length":
            check_size("request", int(value), rule.max_upload, 413)
    kept, deleted = headers.request(head.headers)
    added = {name.lower().encode(): value for name, value in rule.secrets.items()}
    unwanted = (*added, *SPLITTING) if added else ()
    kept = [(name, value) for name, value in kept if name not in unwanted]
    kept += [(name, value.format_map(secrets).encode()) for name, value in added.items()]
    if deleted:
        about["deleted"] = deleted
    if added:
        about["added"] = sorted(rule.secrets)
    authority = host if port in PORTS.values() else f"{host}:{port}"
    first, last = (b"host", authority.encode()), (b"connection", b"close")
    sent = h11.Request(
        method=head.method, target=head.target, headers=[first, *kept, *framing, last]
    )
    hidden = tuple(secrets[name].encode() for name in sorted(rule.needs()))
    return Call(request, rule, sent, hidden)


def check_size(what: str, size: int, most: int, status: int) -> None:
    """Raises `Denied` if something is too large."""
    if size > most:
        raise Denied(f"the {what} is larger than the policy's {most} bytes", status)


def _host(given: list[bytes], port: int, encrypted: str | None) -> str:
    if len(given) != 1:
        raise Denied("a request must name one host", 400)
    found = HOST.fullmatch(given[0].decode("latin-1").lower())
    if found is None:
        raise Denied("the host is not a name")
    host = found[1]
    if int(found[2] or PORTS["http" if encrypted is None else "https"]) != port:
        raise Denied("the port of the host is not that of the connection", 421)
    if encrypted is not None and host != encrypted:
        raise Denied("the host is not that of the encrypted connection", 421)
    return host


def _framing(head: h11.Request) -> headers.Headers:
    """The header that says how long the body is, if there is one."""
    found = [
        (name, value)
        for name, value in head.headers
        if name in (b"content-length", b"transfer-encoding")
    ]
    if len(found) > 1:
        raise Denied("a request must have one length", 400)
    return found
