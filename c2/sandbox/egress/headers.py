"""Which headers pass the gate."""

import re
from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

# Of one connection only, or made anew at the gate.
HOP = {
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"http2-settings", b"content-length", b"host", b"expect",
}  # fmt: skip
# Whatever a sandbox has to show who it is, it has from somewhere it should not have it from.
SENSITIVE = re.compile(rb"auth|token|cookie|secret|session|credential|passw|signature|key\Z")
# With these some servers answer another request than the one that was checked, or leave HTTP.
MISLEADING = re.compile(
    rb"x-http-method|x-method-override|x-original-|x-rewrite-|x-forwarded|forwarded\Z|x-host\Z"
    rb"|upgrade\Z|x-real-ip\Z|true-client-ip\Z|via\Z|x-envoy-|x-accel-|proxy"
)
# Answers may not keep state in the sandbox, send it elsewhere, or ask it to leave HTTP/1.1.
UNWANTED = re.compile(rb"set-cookie|alt-svc\Z|www-authenticate\Z|proxy-|strict-transport-|x-accel-")


def request(headers: Iterable[tuple[bytes, bytes]]) -> tuple[Headers, list[str]]:
    """Headers of a request that go on, and the names of those deleted that might matter."""
    headers = list(headers)
    hop = (HOP | _named(headers)) - {b"upgrade"}
    rest = [(name, value) for name, value in headers if name not in hop]
    kept = [
        (name, value)
        for name, value in rest
        if not SENSITIVE.search(name) and not MISLEADING.match(name)
    ]
    names = {name for name, _ in kept}
    return kept, sorted({name.decode("latin-1") for name, _ in rest if name not in names})


def response(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers of an answer that go on."""
    headers = list(headers)
    hop = HOP | _named(headers)
    return [
        (name, value) for name, value in headers if name not in hop and not UNWANTED.match(name)
    ]


def values(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """All values of a header; names are in lower case."""
    return [value for key, value in headers if key == name]


def _named(headers: Headers) -> set[bytes]:
    """Headers that `Connection` declares to be of one connection."""
    lists = values(headers, b"connection")
    return {name.strip().lower() for one in lists for name in one.split(b",")}
