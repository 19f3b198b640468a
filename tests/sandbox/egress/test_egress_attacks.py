"""What a sandbox may try in order to get past the gate; the table in the README names these."""

import json
import os
import socket
import struct

import pytest

from c2.sandbox.protocol import Spec

# Runs inside: asks a name server and prints the code and the addresses of its answer.
ASK = """
import json, socket, struct, sys
for name, kind, server, tcp in json.loads(sys.stdin.read()):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    query = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack("!B2H", 0, kind, 1)
    try:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
        sock.settimeout(5)
        sock.connect((server, 53))
        sock.sendall(struct.pack("!H", len(query)) + query if tcp else query)
        answer = sock.recv(4096)[2 if tcp else 0:]
        end = answer[-4:] if struct.unpack("!6H", answer[:12])[3] else b""
        print(answer[3] & 15, ".".join(map(str, end)))
    except OSError as error:
        print(error)
"""
# Runs inside: what becomes of a connection or a datagram to somewhere.
REACH = """
import json, socket, sys
for family, kind, address, port in json.loads(sys.stdin.read()):
    try:
        with socket.socket(family, kind) as sock:
            sock.settimeout(5)
            sock.connect((address, port))
            sock.send(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
            print(sock.recv(1000).decode("latin-1").split("\\r\\n")[0])
    except OSError as error:
        print(error)
"""
STREAM, DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM
INET, INET6 = socket.AF_INET, socket.AF_INET6
REFUSED = "[Errno 111] Connection refused"


def run(gated, box, script, given) -> list[str]:
    stdin = json.dumps(given).encode()
    done = gated.backend.exec(box, ["python3", "-c", script], stdin=stdin, timeout_s=60)
    assert done.ok, done
    return done.stdout.decode().splitlines()


def test_addresses_without_a_name_lead_nowhere(gated):
    box = gated.box(gated.rule(), gated.plain_rule())
    hosts = (f"203.0.113.7:{gated.http.port}", f"[::1]:{gated.http.port}", "203.0.113.7", "")
    unnamed, *answers = gated.send(
        box,
        gated.call(gated.get(), address="127.0.0.1", name=None),
        *(gated.call(gated.get(host=host or " "), tls=False) for host in hosts),
    )
    assert unnamed.startswith("ERROR")
    assert [answer.split()[1] for answer in answers] == ["403", "403", "421", "403"]
    # As a client does it that has been given an address: it names no host.
    assert gated.sh(box, f"curl -sS https://203.0.113.7:{gated.https.port}/").startswith("curl:")
    assert [one["reason"] for one in gated.denied(box, "tls")] == ["the client names no host"] * 2
    assert not gated.https.seen + gated.http.seen


def test_the_name_decides_and_not_the_address(gated):
    box = gated.box(gated.rule())
    addresses = ("203.0.113.7", "169.254.169.254", "127.0.0.1")
    answers = gated.send(box, *(gated.call(gated.get(), address=each) for each in addresses))
    assert all(answer.endswith("ok") for answer in answers)
    assert len(gated.https.seen) == 3
    assert {one["address"] for one in gated.lines(box, "request")} == {"127.0.0.1"}


def test_other_ports_and_protocols_are_refused_and_seen(gated):
    box = gated.box(gated.rule())
    tried = [
        (INET, STREAM, "203.0.113.7", 22), (INET, STREAM, "198.18.0.1", 8080),
        (INET, DATAGRAM, "203.0.113.7", 443), (INET, DATAGRAM, "203.0.113.7", 123),
        (INET6, STREAM, "2001:db8::7", 22), (INET6, STREAM, "2001:db8::7", gated.https.port),
        (INET6, DATAGRAM, "2001:db8::7", 53), (INET6, DATAGRAM, "2001:db8::7", 443),
    ]  # fmt: skip
    assert run(gated, box, REACH, tried) == [REFUSED] * len(tried)
    seen = gated.lines(box, "packet", len(tried))
    kinds = {STREAM: "tcp", DATAGRAM: "udp"}
    assert [(one["protocol"], one["address"], one["port"]) for one in seen] == [
        (kinds[kind], address, port) for _, kind, address, port in tried
    ]
    assert all(one["decision"] == "deny" for one in seen)


def test_traffic_of_a_sandbox_with_itself_is_its_own_affair(gated):
    box = gated.box(gated.rule())
    script = """
import socket
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    with socket.socket(family) as server, socket.socket(family) as client:
        server.bind((host, 8000))
        server.listen()
        client.connect((host, 8000))
        server.accept()[0].sendall(b"hello")
        print(client.recv(10).decode())
"""
    run(gated, box, REACH, [(INET, STREAM, "203.0.113.7", 1)])
    assert run(gated, box, script, []) == ["hello", "hello"]
    run(gated, box, REACH, [(INET, STREAM, "203.0.113.7", 2)])
    assert [one["port"] for one in gated.lines(box, "packet", 2)] == [1, 2]


def test_services_of_the_machine_are_out_of_reach(gated):
    box = gated.box(gated.rule())
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        own = socket.gethostbyname(socket.gethostname())
        tried = [(INET, STREAM, address, port) for address in ("127.0.0.1", own, "0.0.0.0")]
        assert run(gated, box, REACH, tried) == [REFUSED] * 3
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_cloud_metadata_is_out_of_reach(gated):
    box = gated.box(gated.rule(host="meta.test", scheme="http", port=80, private=False))
    assert "403" in gated.sh(box, "curl -sSi http://169.254.169.254/latest/meta-data/")
    (line,) = gated.denied(box)
    assert (line["host"], line["target"]) == ("169.254.169.254", "/latest/meta-data/")
    assert "not public" in gated.sh(box, "curl -sS http://meta.test/latest/meta-data/")


def test_names_that_lead_to_private_addresses(gated):
    box = gated.box(gated.rule(private=False))
    assert gated.curl(box, "") == "egress gate: the name leads to an address that is not public\n"
    assert gated.denied(box)[0]["address"] == "127.0.0.1" and not gated.https.seen


def test_only_names_of_the_policy_resolve(gated):
    box = gated.box(gated.rule(), gated.rule(host="*.b.test"))
    a, aaaa, txt, any_kind = 1, 28, 16, 255
    own, public = "198.18.0.1", "8.8.8.8"
    asked = {
        ("origin.test", a, own, False): "0 198.18.0.1",
        ("ORIGIN.test", a, public, False): "0 198.18.0.1",
        ("origin.test", a, public, True): "0 198.18.0.1",
        ("x.b.test", a, own, False): "0 198.18.0.1",
        ("b.test", a, own, False): "3 ",
        ("origin.test", aaaa, own, False): "0 ",
        ("origin.test", txt, own, False): "0 ",
        ("origin.test", any_kind, own, False): "0 ",
        ("x.origin.test", a, own, False): "3 ",
        ("test", a, own, True): "3 ",
    }
    assert run(gated, box, ASK, list(asked)) == list(asked.values())
    found = [(one["name"], one["decision"]) for one in gated.lines(box, "name", len(asked))]
    assert ("x.origin.test", "deny") in found and ("x.b.test", "allow") in found


def test_nothing_leaves_through_names(gated):
    box = gated.box(gated.rule(host="*.b.test"))
    labels = [f"{number:x}-data" for number in range(100)]
    asked = [(f"{label}.evil.test", 1, "8.8.8.8", False) for label in labels]
    assert run(gated, box, ASK, asked) == ["3 "] * 100
    lines = gated.lines(box, "name", 100)
    assert [one["name"] for one in lines] == [name for name, *_ in asked]
    # Even an allowed name that no name server knows is answered, so no one has been asked.
    assert run(gated, box, ASK, [("data.b.test", 1, "8.8.8.8", False)]) == ["0 198.18.0.1"]


def test_odd_packets_to_the_name_service(gated):
    box = gated.box(gated.rule())
    head = struct.pack("!6H", 7, 0x100, 1, 0, 0, 0)
    response = struct.pack("!6H", 7, 0x8180, 0, 0, 0, 0)
    odd = [b"", b"x", head, response, head[:4] + b"\xff" * 8, head + b"\xc0\x0c\0\1\0\1", b"\0" * 9]
    script = f"""
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect(("198.18.0.1", 53))
for packet in {odd!r}:
    sock.send(packet)
"""
    run(gated, box, script, [])
    assert run(gated, box, ASK, [("origin.test", 1, "198.18.0.1", False)]) == ["0 198.18.0.1"]
    assert len(gated.lines(box, "name", len(odd) + 1)) == len(odd) + 1


def test_domain_fronting(gated):
    box = gated.box(gated.rule(), gated.rule(host="other.test"))
    other = f"other.test:{gated.https.port}"
    answers = gated.send(
        box,
        gated.call(gated.get(host=other)),
        gated.call(gated.get(host="origin.test")),  # of another port
        gated.call(gated.get(host=other), name="other.test"),
    )
    assert [answer.split()[1] for answer in answers] == ["421", "421", "200"]
    assert gated.denied(box)[0]["host"] == other and len(gated.https.seen) == 1


def test_names_in_the_handshake_that_are_not_allowed(gated):
    box = gated.box(gated.rule())
    names = ("evil.test", "origin.test.evil.test", "xorigin.test", "localhost", "\u00fc.test")
    answers = gated.send(box, *(gated.call(gated.get(), name=name) for name in names))
    assert all(answer.startswith("ERROR") for answer in answers)
    hosts = [one["host"] for one in gated.denied(box, "tls")]
    assert hosts == [*names[:-1], "xn--tda.test"] and not gated.https.seen


def test_clear_text_and_encryption_at_each_others_port(gated):
    box = gated.box(gated.rule(), gated.plain_rule())
    gated.send(box, gated.call(gated.get(), tls=False, port=gated.https.port))
    assert gated.lines(box, "tls")[0]["reason"].startswith("no encryption: ")
    assert gated.sh(box, f"curl -sS https://origin.test:{gated.http.port}/").startswith("curl:")
    assert not gated.https.seen + gated.http.seen


def test_http2(gated):
    box = gated.box(gated.rule(), gated.plain_rule())
    preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
    (answer,) = gated.send(box, gated.call(preface, alpn=("h2",)))
    assert answer.startswith("HTTP/1.1 505")
    assert gated.denied(box)[0]["reason"] == "only HTTP/1.1 is spoken here"
    assert gated.curl(box, "--http2") == "ok"
    url = f"http://origin.test:{gated.http.port}/"
    assert gated.sh(box, f"curl -sS --http2 {url}") == "ok"
    assert "upgrade" not in dict(gated.http.seen[0]["headers"])
    gated.sh(box, f"curl -sS --http2-prior-knowledge {url}")
    assert len(gated.http.seen) == 1


def test_odd_first_lines(gated):
    box = gated.box(gated.rule(methods=("GET", "OPTIONS")), gated.plain_rule())
    lines = (
        "GET http://evil.test/ HTTP/1.1", "GET https://origin.test/ HTTP/1.1",
        "CONNECT evil.test:443 HTTP/1.1", "GET //evil.test/ HTTP/1.1", "GET evil.test HTTP/1.1",
        "OPTIONS * HTTP/1.1", "GET /#x HTTP/1.1", "GET /\0 HTTP/1.1", "GET / HTTP/1.1\r\nx",
        "GET  / HTTP/1.1", "TRACE / HTTP/1.1", "GET /", "\x16\x03\x01\0\5", "get / HTTP/1.1",
        "GET / HTTP/0.9", "GET / HTTP/2.0", "GET / HTTP/1.1 HTTP/1.1", "GET /\x85 HTTP/1.1",
    )  # fmt: skip
    rest = f"\r\nHost: origin.test:{gated.https.port}\r\nConnection: close\r\n\r\n"
    answers = gated.send(box, *(gated.call(line + rest) for line in lines))
    assert {answer.split()[1][0] for answer in answers} == {"4", "5"}
    assert len(gated.denied(box)) == len(lines) and not gated.https.seen


def test_requests_within_requests(gated):
    box = gated.box(gated.rule(methods=("GET", "POST"), paths=("/",)))
    headers = (
        ("Content-Length: 3", "Transfer-Encoding: chunked"),
        ("Content-Length: 3", "Content-Length: 4"),
        ("Content-Length: 3, 4",),
        ("Content-Length: +3",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("X: y\0z",),
        (" Folded: x", "X: y\rTransfer-Encoding: chunked"),
        ("Host: origin.test",),
        ("X-Large: " + "x" * 200_000,),
    )
    inner = f"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: origin.test:{gated.https.port}\r\n\r\n"
    texts = [gated.get("/", *lines).replace("GET", "POST", 1) + inner for lines in headers]
    answers = gated.send(box, *map(gated.call, texts))
    assert all(answer.startswith(("HTTP/1.1 4", "HTTP/1.1 5", "ERROR")) for answer in answers)
    assert len(gated.denied(box)) == len(headers)
    assert not gated.https.seen


def test_requests_in_a_row_are_judged_one_by_one(gated):
    box = gated.box(gated.rule(paths=("/a", "/b")))
    keep = "Connection: keep-alive"
    requests = [gated.get(path, keep) for path in ("/a", "/b", "/secret", "/a")]
    (answer,) = gated.send(box, gated.call("".join(requests)))
    assert answer.count("HTTP/1.1 200") == 2 and answer.count("HTTP/1.1 403") == 1
    assert [seen["path"] for seen in gated.https.seen] == ["/a", "/b"]


def test_lengths_are_made_anew(gated):
    box = gated.box(gated.rule(methods=("POST",)))
    body = "5;ext=1\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n"
    text = gated.get("/", "Transfer-Encoding: chunked", "Trailer: Trailer")
    (answer,) = gated.send(box, gated.call(text.replace("GET", "POST", 1) + body))
    assert answer.endswith("ok")
    assert gated.https.seen[0]["body"] == b"hello!"
    assert "trailer" not in dict(gated.https.seen[0]["headers"])


def test_redirects_are_judged_like_everything(gated):
    box = gated.box(gated.rule(paths=("/redirect", "/fine")))
    port = gated.https.port
    targets = {
        "https://evil.test/": "Could not resolve host: evil.test",
        f"https://origin.test:{port}/secret": "does not allow this path",
        f"http://origin.test:{gated.http.port}/": "Failed to connect",
        "http://169.254.169.254/": "Failed to connect",
        f"https://origin.test:{port}/fine": "ok",
    }
    for target, outcome in targets.items():
        assert outcome in gated.curl(box, "-L", f"/redirect?{target}")
    assert [seen["path"] for seen in gated.https.seen if "redirect" not in seen["path"]] == [
        "/fine"
    ]


def test_websockets(gated):
    box = gated.box(gated.rule())
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
               "Sec-WebSocket-Key: eHh4eHh4eHh4eHh4eHh4eA==")  # fmt: skip
    frame = "\x81\x89\0\0\0\0hello\r\n\r\n"
    (answer,) = gated.send(box, gated.call(gated.get("/", *upgrade) + frame))
    assert "HTTP/1.1 200" in answer and "HTTP/1.1 400" in answer
    names = dict(gated.https.seen[0]["headers"]).keys()
    assert len(gated.https.seen) == 1 and not {"upgrade", "sec-websocket-key"} & names


def test_too_many_connections(gated):
    box = gated.box(gated.rule())
    script = f"""
import socket
open = [socket.create_connection(("198.18.0.1", {gated.https.port})) for _ in range(12)]
for sock in open[8:]:
    sock.settimeout(5)
    print(sock.recv(1))
"""
    assert run(gated, box, script, []) == ["b''"] * 4
    assert len(gated.lines(box, "connection", 4)) == 4
    assert gated.curl(box, "") == "ok"  # those of the program have ended with it
    assert gated.curl(gated.box(gated.rule()), "") == "ok"


def test_floods_are_counted(gated):
    box = gated.box(gated.rule())
    script = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(5000):
    try:
        sock.sendto(b"x", ("203.0.113.7", 9))
    except OSError:
        pass
"""
    run(gated, box, script, [])
    assert gated.curl(gated.box(gated.rule()), "") == "ok"
    gated.backend.close(box)
    gated.lines(box, "close")
    listed, hidden = gated.lines(box, "packet"), gated.lines(box, "flood", 0)
    assert len(listed) < 1000 and sum(one["count"] for one in hidden) > 0


def test_the_gate_is_no_one(gated, gate_of):
    text = (gate_of(gated.backend) / "status").read_text()
    status = dict(line.split(":\t", 1) for line in text.splitlines())
    if os.getuid() != 0:
        pytest.skip("only root can give the gate a user of its own")
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {"61001"}
    assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0


def test_a_sandbox_cannot_change_where_things_go(gated):
    box = gated.box(gated.rule())
    out = gated.sh(box, "ip route del local default dev lo table local; nft flush ruleset; "
                        "cat /proc/sys/net/ipv4/ip_unprivileged_port_start; "
                        "echo 0 > /proc/sys/net/ipv4/ip_unprivileged_port_start")  # fmt: skip
    assert "1024" in out and out.count("\n") == 4
    assert gated.curl(box, "") == "ok"
    assert gated.backend.create(Spec())  # others are not concerned
