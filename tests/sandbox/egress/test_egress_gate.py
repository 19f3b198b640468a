"""What gets through the gate, and what becomes of it on the way."""

import json
import urllib.parse

import pytest

from c2.sandbox.egress.policy import Policy
from c2.sandbox.protocol import Spec, Unsupported

PYTHON = """python3 -c "
import urllib.request
print(urllib.request.urlopen('{url}').read().decode())
" 2>&1 | tail -1"""


def test_ordinary_programs_get_through(gated):
    box = gated.box(gated.rule(), gated.plain_rule())
    url = f"https://origin.test:{gated.https.port}/index?a=b"
    assert gated.sh(box, PYTHON.format(url=url)) == "ok\n"
    assert gated.curl(box, "", "/index?a=b") == "ok"
    assert gated.sh(box, f"curl -sS http://origin.test:{gated.http.port}/plain") == "ok"
    assert [seen["path"] for seen in gated.https.seen] == ["/index?a=b"] * 2
    for seen in gated.https.seen:
        assert dict(seen["headers"])["host"] == f"origin.test:{gated.https.port}"
    asked, *_ = gated.lines(box, "request")
    assert asked == asked | {
        "decision": "allow", "scheme": "https", "host": "origin.test", "port": gated.https.port,
        "method": "GET", "target": "/index?a=b", "address": "127.0.0.1",
    }  # fmt: skip
    answered = [
        one for one in gated.lines(box, "response", 3) if one["request"] == asked["request"]
    ]
    assert len(answered) == 1 and answered[0]["status"] == 200 and answered[0]["downloaded"] == 2
    names = {one["name"] for one in gated.lines(box, "name")}
    assert names == {"origin.test"}


def test_no_variable_names_a_proxy(gated):
    box = gated.box(gated.rule())
    assert "proxy" not in gated.sh(box, "env").lower()


def test_git_clones_what_the_policy_allows(gated):
    box = gated.box(gated.rule())
    url = f"https://origin.test:{gated.https.port}/repo.git"
    assert "Cloning into" in gated.sh(box, f"git clone {url}")
    assert gated.https.seen[0]["path"] == "/repo.git/info/refs?service=git-upload-pack"


def test_several_requests_share_a_connection(gated):
    box = gated.box(gated.rule())
    url = f"https://origin.test:{gated.https.port}"
    answer = gated.sh(box, f"curl -sS -w '%{{num_connects}} ' {url}/1 {url}/2 {url}/3")
    assert answer == "ok1 ok0 ok0 "


def test_methods_and_paths(gated):
    rule = gated.rule(methods=("GET", "POST"), paths=("/simple/", "/file"))
    box = gated.box(rule)
    allowed = ["/simple/", "/simple/x/y", "/file", "/file?q=/x", "/simpl%65/x"]
    refused = [
        "/", "/simple", "/files", "/file/x", "/simple/../secret", "/simple/%2e%2e/secret",
        "/simple/..%2fsecret", "/simple/..;/secret", "/simple//secret", "/simple/%252e%252e/x",
        "/simple/..\\\\secret", "/SIMPLE/x",
    ]  # fmt: skip
    for paths, status in ((allowed, "200"), (refused, "403")):
        url = f"'https://origin.test:{gated.https.port}"
        urls = " ".join(f"-o /dev/null {url}{path}'" for path in paths)
        out = gated.sh(box, f"curl -sS --path-as-is -w '%{{http_code}} ' {urls}")
        assert out.split() == [status] * len(paths), paths
    assert len(gated.https.seen) == len(allowed)
    assert gated.curl(box, "-d x", "/file") == "ok"
    assert "does not allow this method" in gated.curl(box, "-X DELETE", "/file")
    assert gated.https.seen[-1]["method"] == "POST"


def test_rules_are_tried_in_order(gated):
    box = gated.box(
        gated.rule(paths=("/a/",)),
        gated.rule(methods=("PUT",), paths=("/b/",)),
        gated.rule(host="*.b.test", paths=("/c",)),
    )
    assert gated.curl(box, "", "/a/x") == gated.curl(box, "-X PUT", "/b/x") == "ok"
    assert gated.curl(box, "", "/c", host="a.b.test") == "ok"
    assert "403" in gated.curl(box, "-i", "/b/x") and "403" in gated.curl(box, "-i", "/d")
    assert "405" in gated.curl(box, "-i -X PUT", host="a.b.test")


def test_sizes(gated):
    box = gated.box(gated.rule(methods=("GET", "POST"), max_upload=1000, max_download=1000))
    assert gated.curl(box, "-d " + "x" * 1000) == "ok"
    assert len(gated.curl(box, "", "/large?1000")) == 1000
    gated.https.seen.clear()
    assert "413" in gated.curl(box, "-i -d " + "x" * 1001)
    assert not gated.https.seen
    assert "larger than the policy's 1000 bytes" in gated.curl(box, "", "/large?1001")
    # Of unknown length: what was sent on is no complete request, and no complete answer.
    chunked = "-i -H 'Transfer-Encoding: chunked' -d " + "x" * 1001
    gated.https.seen.clear()
    assert "413" in gated.curl(box, chunked)
    assert not any(seen["complete"] for seen in gated.https.seen)
    assert "curl: (18)" in gated.curl(box, "-o /dev/null", "/drip")
    lines = gated.lines(box, "request") + gated.lines(box, "response", 5)
    reasons = [one["reason"] for one in lines if one.get("decision") == "deny"]
    assert len(reasons) == 4 and all("larger than the policy's 1000" in one for one in reasons)


def test_headers_that_might_tell_who_asks_are_deleted(gated):
    box = gated.box(gated.rule())
    secret = (
        "Authorization: Basic x", "Cookie: a=b", "X-Api-Key: x", "PRIVATE-TOKEN: x",
        "X-Amz-Security-Token: x", "Proxy-Authorization: x", "X-Session-Id: x",
        "X-Http-Method-Override: DELETE", "X-Original-URL: /admin", "X-Forwarded-For: 1.2.3.4",
        "Forwarded: for=1.2.3.4", "Via: 1.0 me", "X-Named: x", "Connection: x-named, close",
        "TE: trailers", "Upgrade: h2c",
    )  # fmt: skip
    gated.send(box, gated.call(gated.get("/", *secret, "X-Fine: yes", "Accept: a, b")))
    headers = dict(gated.https.seen[0]["headers"])
    assert {name.lower() for name in headers} == {"host", "x-fine", "accept", "connection"}
    assert headers["x-fine"] == "yes" and headers["accept"] == "a, b"
    line = gated.lines(box, "request")[0]
    assert {"authorization", "cookie", "x-original-url", "upgrade"} <= set(line["deleted"])
    assert "1.2.3.4" not in gated.log.read_text()


def test_answers_keep_no_state(gated):
    box = gated.box(gated.rule())
    answer = gated.curl(box, "-i", "/cookie").lower()
    assert "x-fine: yes" in answer and "set-cookie" not in answer and "alt-svc" not in answer


def test_secrets_are_added_outside_and_never_come_in(gated, secret):
    rule = gated.rule(secrets={"Authorization": "Bearer {token}"})
    box = gated.box(rule)
    assert gated.curl(box, "-H 'Authorization: mine' -H 'Range: bytes=0-9' --compressed") == "ok"
    headers = dict(gated.https.seen[0]["headers"])
    assert headers["authorization"] == f"Bearer {secret}"
    assert not {"range", "accept-encoding"} & headers.keys()
    line = gated.lines(box, "request")[0]
    assert line["added"] == ["Authorization"] and line["deleted"] == ["authorization"]
    assert "contains a secret of the gate" in gated.curl(box, "", "/mirror-header")
    assert gated.curl(box, "", "/mirror").startswith("curl: (18)")  # it has begun to answer
    assert gated.denied(box, "response")[-1]["reason"] == "the answer contains a secret of the gate"
    assert "the answer is encoded" in gated.curl(box, "", "/encoded")
    everything = gated.sh(box, "env; cat /proc/*/environ /proc/*/cmdline; cat /etc/*.conf")
    assert secret not in everything + gated.log.read_text()
    with pytest.raises(ValueError, match="network: the gate has no secret 'other'; it has: token"):
        gated.box(gated.rule(secrets={"X": "{other}"}))


def test_sandboxes_are_told_apart(gated):
    first, second = gated.box(gated.rule(paths=("/a",))), gated.box(gated.rule(paths=("/b",)))
    assert gated.curl(first, "", "/a") == gated.curl(second, "", "/b") == "ok"
    assert "not allow" in gated.curl(first, "", "/b") and "not allow" in gated.curl(
        second, "", "/a"
    )
    assert gated.denied(first)[0]["target"] == "/b" and gated.denied(second)[0]["target"] == "/a"


def test_labels_and_policies_are_on_record(gated):
    spec = Spec(network=Policy(rules=(gated.rule(),)), labels={"run": "7"})
    box = gated.backend.create(spec)
    gated.backend.close(box)
    (opened,) = gated.lines(box, "open")
    assert (
        opened["labels"] == {"run": "7"} and opened["policy"]["rules"][0]["host"] == "origin.test"
    )
    assert opened["node"].startswith("c2-sandbox-")


def test_forks_have_the_policy_of_their_origin(gated):
    box = gated.box(gated.rule(paths=("/a",)))
    gated.backend.set_network_policy(box, Policy(rules=(gated.rule(paths=("/b",)),)))
    gated.made += gated.backend.fork(box, 2)
    for fork in gated.made[1:]:
        assert gated.curl(fork, "", "/b") == "ok" and "not allow" in gated.curl(fork, "", "/a")


def test_a_new_policy_counts_at_once(gated):
    box = gated.box(gated.rule())
    backend = gated.backend
    assert gated.curl(box, "") == "ok"
    backend.set_network_policy(box, Policy(rules=(gated.plain_rule(),)))
    assert "resolve" not in gated.curl(box, "") and len(gated.https.seen) == 1
    assert gated.sh(box, f"curl -sS http://origin.test:{gated.http.port}/") == "ok"
    backend.set_network_policy(box, "none")
    assert "Could not resolve host" in gated.curl(box, "")
    backend.set_network_policy(box, Policy(rules=(gated.rule(),)))
    assert gated.curl(box, "") == "ok"
    assert len(gated.lines(box, "policy", 3)) == 3


def test_a_new_policy_ends_what_it_forbids(gated):
    box = gated.box(gated.rule())
    backend = gated.backend
    gated.https.broken.clear()
    script = f"curl -sSN https://origin.test:{gated.https.port}/drip > /tmp/out 2> /tmp/error"
    job = backend.start(box, ["sh", "-c", script])
    gated.sh(box, "until [ -s /tmp/out ]; do sleep .01; done")
    backend.set_network_policy(box, Policy(rules=(gated.rule(paths=("/drip",)),)))
    assert backend.job(box, job) is None and not gated.https.broken.is_set()
    backend.set_network_policy(box, Policy(rules=(gated.rule(paths=("/other",)),)))
    assert gated.https.broken.wait(10)
    assert "closed" in gated.sh(box, "until [ -s /tmp/error ]; do sleep .01; done; cat /tmp/error")
    (cut,) = [one for one in gated.lines(box, "connection")]
    assert cut["reason"] == "the policy has changed" and cut["host"] == "origin.test"
    assert gated.denied(box, "response")[0]["reason"] == "it was cut off"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_new_policy_ends_connections_that_wait(gated, scheme):
    box = gated.box(gated.rule(), gated.plain_rule())
    port = {"http": gated.http, "https": gated.https}[scheme].port
    script = f"""
import http.client
connection = http.client.{scheme.upper()}Connection("origin.test", {port})
connection.request("GET", "/")
print(connection.getresponse().read(), flush=True)
print(connection.sock.recv(1))
"""
    job = gated.backend.start(box, ["sh", "-c", 'exec python3 -c "$0" > /tmp/out 2>&1', script])
    gated.sh(box, "until [ -s /tmp/out ]; do sleep .01; done")
    gated.backend.set_network_policy(box, Policy(rules=(gated.rule(host="other.test"),)))
    gated.sh(box, "until grep -q 'b..$\\|Error' /tmp/out; do sleep .01; done")
    assert gated.sh(box, "cat /tmp/out").startswith("b'ok'")
    assert len(gated.lines(box, "connection")) == 1
    gated.backend.kill(box, job)


def test_a_sandbox_without_network_gets_none_later(gated):
    box = gated.backend.create(Spec())
    gated.made.append(box)
    assert "Could not resolve" in gated.curl(box, "")
    with pytest.raises(Unsupported, match="was made without network and cannot get one"):
        gated.backend.set_network_policy(box, Policy())


def test_what_cannot_be_reached_is_said(gated):
    unknown = gated.rule(host="no.invalid")
    box = gated.box(unknown, gated.rule(host="imposter.test"), gated.rule())
    assert "502" in gated.curl(box, "-i", host="no.invalid")
    assert "the server cannot be trusted" in gated.curl(box, "", host="imposter.test")
    decisions = [one["decision"] for one in gated.lines(box, "request")]
    assert decisions == ["fail", "deny"] and not gated.https.seen
    free = gated.rule(port=1)
    gated.backend.set_network_policy(box, Policy(rules=(free,)))
    assert "the server cannot be reached" in gated.sh(box, "curl -sS https://origin.test:1/")


def test_every_line_of_the_log_is_json(gated):
    box = gated.box(gated.rule())
    odd = urllib.parse.quote("/\n{'\"\\\x00ü")
    gated.curl(box, "", odd)
    gated.send(box, gated.call(gated.get('/"{}\\\\')), gated.call("\n\x1b[31m{\x00\xff\r\n\r\n"))
    for line in gated.log.read_text().splitlines():
        record = json.loads(line)
        assert {"time", "node", "event"} <= record.keys()
