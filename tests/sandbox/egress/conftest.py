"""A server on the loopback device of this machine, and a backend whose gate knows it."""

import contextlib
import datetime
import http.server
import json
import ssl
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from c2.sandbox.bwrap import Bwrap
from c2.sandbox.egress.config import PACKAGES, GateConfig
from c2.sandbox.egress.policy import Policy, Rule
from c2.sandbox.protocol import Handle, Spec
from c2.sandbox.zygote import Zygote

SECRET = "s3cr3t-of-the-gate"

# Runs inside: connects, sends what it is given, and prints what comes back, for each of a list.
CLIENT = """
import json, socket, ssl, sys
def answer(to, tls, name, alpn, text):
    try:
        sock = socket.create_connection(to, timeout=10)
        if tls:
            context = ssl.create_default_context()
            context.check_hostname = name is not None
            if alpn:
                context.set_alpn_protocols(alpn)
            sock = context.wrap_socket(sock, server_hostname=name)
        sock.sendall(text.encode("latin-1"))
        data = b""
        while more := sock.recv(65536):
            data += more
        return data.decode("latin-1")
    except OSError as error:
        return f"ERROR {error}"
print(json.dumps([answer(*given) for given in json.load(sys.stdin)]))
"""


class Origin:
    """A web server that remembers what it was asked."""

    def __init__(self, folder: Path, *, tls: bool) -> None:
        self.seen: list[dict] = []
        self.broken = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.pem")
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(origin: Origin) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            seen = {
                "method": self.command, "path": self.path, "headers": self.headers.items(),
                "complete": False,
            }  # fmt: skip
            origin.seen.append(seen)
            seen["body"] = self.body()
            seen["complete"] = True
            path, _, argument = self.path.partition("?")
            if path == "/drip":
                self.drip()
                return
            headers, body, status = {}, b"ok", 200
            if path == "/redirect":
                status, headers = 302, {"Location": argument}
            elif path == "/large":
                body = b"x" * int(argument)
            elif path == "/cookie":
                headers = {"Set-Cookie": "a=b", "Alt-Svc": 'h3=":443"', "X-Fine": "yes"}
            elif path == "/mirror":
                body = json.dumps(self.headers.items()).encode()
            elif path == "/encoded":
                headers = {"Content-Encoding": "x-rot13"}
            elif path == "/mirror-header":
                headers = {"X-Mirror": self.headers.get("Authorization", "")}
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                data = b""
                while size := int(self.rfile.readline(), 16):
                    data += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return data
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def drip(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"4\r\ndrip\r\n")
                    time.sleep(0.002)
            except OSError:
                origin.broken.set()
                self.close_connection = True

        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError):  # cut off in the middle of something
                super().handle()

    return Handler


@dataclass
class Gated:
    """A backend with a gate, its log, two servers, and the sandboxes of a test."""

    backend: Bwrap
    log: Path
    https: Origin
    http: Origin
    made: list[Handle]

    def rule(self, **fields) -> Rule:
        """About the server with encryption."""
        return Rule(**{"host": "origin.test", "port": self.https.port, "private": True} | fields)

    def plain_rule(self, **fields) -> Rule:
        """About the one without."""
        return self.rule(**{"scheme": "http", "port": self.http.port} | fields)

    def box(self, *rules: Rule) -> Handle:
        self.made.append(self.backend.create(Spec(network=Policy(rules=rules))))
        return self.made[-1]

    def sh(self, box: Handle, script: str) -> str:
        """What a shell script writes, its complaints too."""
        run = self.backend.exec(box, ["sh", "-c", script], timeout_s=30)
        return (run.stdout + run.stderr).decode()

    def curl(self, box: Handle, options: str, path: str = "/", host: str = "origin.test") -> str:
        url = f"https://{host}:{self.https.port}{path}"
        return self.sh(box, f"curl -sS -m 20 {options} '{url}'")

    def call(
        self,
        text: str,
        *,
        address: str = "198.18.0.1",
        port: int | None = None,
        tls: bool = True,
        name: str | None = "origin.test",
        alpn: tuple[str, ...] = (),
    ) -> tuple:
        """A connection on which these bytes are sent, for `send`."""
        port = port or (self.https.port if tls else self.http.port)
        return (address, port), tls, name, alpn, text

    def send(self, box: Handle, *calls: tuple) -> list[str]:
        """The answers to calls."""
        stdin = json.dumps(calls).encode()
        run = self.backend.exec(
            box, ["python3", "-c", CLIENT], stdin=stdin, timeout_s=60, max_output=1 << 18
        )
        assert run.ok, run
        return json.loads(run.stdout)

    def get(self, path: str = "/", *lines: str, host: str | None = None) -> str:
        """A request as bytes."""
        host = host or f"origin.test:{self.https.port}"
        if not any(line.startswith("Connection:") for line in lines):
            lines += ("Connection: close",)
        return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *lines, "", ""])

    def lines(self, box: Handle, event: str, least: int = 1) -> list[dict]:
        """What the log says about a sandbox; waits until there are some lines of a kind."""
        end = time.monotonic() + 10
        while True:
            found = map(json.loads, self.log.read_text().splitlines())
            found = [one for one in found if (one.get("sandbox"), one["event"]) == (box.id, event)]
            if len(found) >= least or time.monotonic() > end:
                return found
            time.sleep(0.01)

    def denied(self, box: Handle, event: str = "request") -> list[dict]:
        """The refusals of a sandbox."""
        return [one for one in self.lines(box, event) if one.get("decision") == "deny"]


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    for package in PACKAGES:
        pytest.importorskip(package, reason="needs the extra `egress`")
    folder = tmp_path_factory.mktemp("origin")
    make_certificates(folder, ["origin.test", "other.test", "a.b.test"])
    servers = [Origin(folder, tls=True), Origin(folder, tls=False)]
    yield folder, *servers
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def settings(servers):
    """Of a gate that knows the servers."""
    folder = servers[0]
    secret = folder / "secret"
    secret.write_text(f"{SECRET}\n")
    names = ("origin.test", "other.test", "imposter.test", "a.b.test")
    return GateConfig(
        log=str(folder / "egress.jsonl"), secrets={"token": str(secret)},
        authorities=str(folder / "ca.pem"), connections=8, idle_s=5.0,
        addresses=dict.fromkeys(names, "127.0.0.1") | {"meta.test": "169.254.169.254"},
    )  # fmt: skip


@pytest.fixture(scope="session")
def backend(settings, walls):
    with Zygote(egress=settings) as made:
        yield made


@pytest.fixture
def gated(backend, servers):
    folder, https, plain = servers
    https.seen.clear()
    plain.seen.clear()
    gated = Gated(backend, folder / "egress.jsonl", https, plain, [])
    yield gated
    for box in gated.made:
        backend.close(box)


def make_certificates(folder: Path, names: list[str]) -> None:
    """An authority, ca.pem, and a server with these names, server.pem with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def certificate(name, key, *extensions):
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ca")]),
            x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
            key.public_key(), x509.random_serial_number(), now - datetime.timedelta(1),
            now + datetime.timedelta(1),
        )  # fmt: skip
        for extension in extensions:
            builder = builder.add_extension(extension, critical=True)
        return builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    ca = certificate("ca", keys[0], x509.BasicConstraints(True, None))
    (folder / "ca.pem").write_bytes(ca)
    dns = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
    key = keys[1].private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.pem").write_bytes(key + certificate("server", keys[1], dns))


@pytest.fixture
def gate_of():
    """Finds the folder in /proc of the gate of a backend."""

    def find(backend: Bwrap) -> Path:
        children = Path(f"/proc/{backend.pid}/task/{backend.pid}/children").read_text().split()
        folders = [Path("/proc", pid) for pid in children]
        (gate,) = [one for one in folders if "egress.gate" in (one / "cmdline").read_text()]
        return gate

    return find


@pytest.fixture
def secret():
    """What the gate adds and nobody inside may learn."""
    return SECRET
