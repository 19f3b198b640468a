"""Policies against a second reading of the same words."""

import dataclasses
import importlib.resources
import itertools
import json
import posixpath
import re
import struct
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from c2.config import ConfigError, from_dict, to_dict
from c2.sandbox.egress import headers, packets
from c2.sandbox.egress.config import GateConfig
from c2.sandbox.egress.log import MAX_TEXT, Log, SandboxLog
from c2.sandbox.egress.policy import Denied, Policy, Request, Rule, ambiguous, decide

PIECES = ["a", "b", "secret", "/", "/", "/", "..", ".", "%2e", "%2E%2e", "%2f", "\\", "%5C", ";x",
          "%25", "%252f", "%00", "A", "%61"]  # fmt: skip
paths = st.lists(st.sampled_from(PIECES), max_size=8).map(lambda pieces: "/" + "".join(pieces))
hosts = st.lists(st.sampled_from(["a", "b", "xa", "test", ""]), min_size=1, max_size=4)
hosts = hosts.map(".".join)


def allowed(policy: Policy, request: Request) -> Rule | None:
    try:
        return decide(policy, request)
    except Denied:
        return None


def readings(path: str) -> set[str]:
    """Whatever a server might take a path for."""
    found = {path.replace("%61", "a")}  # no server takes these two for different
    for _ in range(2):
        found |= {unquote(one) for one in found}
        found |= {one.replace("\\", "/") for one in found}
        found |= {"/".join(part.split(";")[0] for part in one.split("/")) for one in found}
    normal = {posixpath.normpath(one) for one in found}
    return found | {one + "/" for one in normal if one != "/"} | normal


@given(paths)
@example("/a/..%2fsecret")
@settings(max_examples=150)
def test_no_reading_of_an_allowed_path_is_elsewhere(path):
    policy = Policy(rules=(Rule(host="a.test", paths=("/a/", "/b")),))
    if allowed(policy, Request(443, "a.test", "GET", path)):
        for reading in readings(path):
            assert reading.startswith("/a/") or reading in ("/a", "/b", "/b/"), reading


@given(paths.filter(lambda path: not ambiguous(path)))
@settings(max_examples=100)
def test_plain_paths_below_a_folder_are_allowed(path):
    policy = Policy(rules=(Rule(host="a.test", paths=("/x/",)),))
    assert allowed(policy, Request(443, "a.test", "GET", "/x" + path))


@given(hosts, hosts.filter(lambda host: host.count(".") > 0 and "" not in host.split(".")))
@settings(max_examples=100)
def test_wildcards_stand_for_whole_labels(host, base):
    policy = Policy(rules=(Rule(host=f"*.{base}"), Rule(host="only.test")))
    labels, of_base = host.split("."), base.split(".")
    below = len(labels) > len(of_base) and labels[-len(of_base) :] == of_base and "" not in labels
    assert (allowed(policy, Request(443, host, "GET", "/")) is not None) == below
    assert policy.resolves(host) == below


def test_all_of_a_rule_must_fit():
    rule = Rule(host="a.test", port=8443, methods=("PUT",), paths=("/p",))
    policy = Policy(rules=(rule,))
    fits = Request(8443, "a.test", "PUT", "/p")
    assert allowed(policy, fits) is rule
    for change in ({"port": 443}, {"host": "b.test"}, {"method": "put"}, {"path": "/P"}):
        assert allowed(policy, Request(**vars(fits) | change)) is None
    assert allowed(Policy(), fits) is None


@pytest.mark.parametrize(
    "fields, covers",
    [
        ({"paths": ("/x",)}, True), ({"max_upload": 11}, True), ({"max_upload": 9}, False),
        ({"max_download": 9}, False), ({"private": False}, False), ({"secrets": {}}, False),
        ({"secrets": {"X": "{b}"}}, False), ({"methods": ("PUT",)}, True),
    ],
)  # fmt: skip
def test_what_goes_on_under_another_rule(fields, covers):
    old = Rule(host="a.test", max_upload=10, max_download=10, private=True, secrets={"X": "{a}"})
    assert old.covers(old) and dataclasses.replace(old, **fields).covers(old) == covers


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"host": ""}, "host: ''; legal are names in lower case"),
        ({"host": "A.test"}, "host"),
        ({"host": "1.2.3.4"}, "host"),
        ({"host": "[::1]"}, "host"),
        ({"host": "*.test"}, "host"),
        ({"host": "a.*.test"}, "host"),
        ({"host": "*"}, "host"),
        ({"host": "a.test."}, "host"),
        ({"host": "a..test"}, "host"),
        ({"host": "-a.test"}, "host"),
        ({"host": "a.test\n"}, "host"),
        ({"host": "a" * 64 + ".test"}, "host"),
        ({"host": "a." * 130 + "test"}, "host"),
        ({"scheme": "ftp"}, "scheme: 'ftp'; legal are https and http"),
        ({"port": 0}, "port: 0; legal are 1 to 65535 without 53"),
        ({"port": 53}, "port"),
        ({"port": 65536}, "port"),
        ({"methods": ("CONNECT",)}, "methods: 'CONNECT'"),
        ({"methods": ("G T",)}, "methods"),
        ({"paths": ("a",)}, "paths: 'a'; legal are plain paths"),
        ({"paths": ("/a/../b",)}, "paths"),
        ({"max_upload": -1}, "max_upload: -1; legal are 0 and more"),
        ({"max_download": -1}, "max_download"),
        ({"secrets": {"X": "{a}"}, "scheme": "http"}, "secrets: legal only with https"),
        ({"secrets": {"X": "{a}"}, "host": "*.a.test"}, "secrets"),
        ({"secrets": {"X:": "{a}"}}, "secrets"),
        ({"secrets": {"X": "a\nb"}}, "secrets"),
        ({"secrets": {"X": "{a"}}, "secrets: a value has odd braces"),
        ({"secrets": {"X": "{a.b}"}}, "secrets"),
        ({"secrets": {"Host": "{a}"}}, "secrets"),
    ],
)
def test_rules_that_are_none(fields, message):
    with pytest.raises(ConfigError, match="^" + message.replace("*", "\\*")):
        Rule(**{"host": "a.test"} | fields)


def test_policies_that_are_none():
    with pytest.raises(ConfigError, match="rules: port 80 has http and https"):
        Policy(rules=(Rule(host="a.test", scheme="http"), Rule(host="a.test", port=80)))
    with pytest.raises(ConfigError, match="rules: 65 ports; at most 64"):
        Policy(rules=tuple(Rule(host="a.test", port=1000 + number) for number in range(65)))
    with pytest.raises(ConfigError, match=r"rules: \d+ bytes of JSON"):
        Policy(rules=tuple(Rule(host=f"a{number}.test") for number in range(1000)))


def test_policies_travel_as_json():
    rule = Rule(host="*.a.test", methods=("GET",), paths=("/x/",), max_upload=1, private=True)
    policy = Policy(rules=(rule, Rule(host="b.test", secrets={"X": "{a} {b}"})))
    assert from_dict(Policy, json.loads(json.dumps(to_dict(policy)))) == policy
    assert policy.needs() == {"a", "b"} and policy.ports() == {443: "https"}


@pytest.mark.parametrize(
    "fields, key",
    [
        ({"log": ""}, "log"), ({"connections": 0}, "connections"),
        ({"idle_s": float("inf")}, "idle_s"), ({"addresses": {"a.test": "b"}}, "addresses"),
    ],
)  # fmt: skip
def test_settings_that_are_none(fields, key):
    with pytest.raises(ConfigError, match=f"^{key}.*legal"):
        GateConfig(**{"log": "/tmp/x"} | fields)


PUBLIC = ("1.1.1.1", "151.101.0.223", "2606:4700::1111", "2a04:4e42::223")
OTHERS = (
    "127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1", "192.0.2.1", "224.0.0.1",
    "240.0.0.1", "255.255.255.255", "168.63.129.16", "::", "::1", "fe80::1", "fc00::1",
    "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:1.1.1.1", "::127.0.0.1",
    "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "2001:db8::1",
)  # fmt: skip


def test_addresses_that_are_public():
    origin = pytest.importorskip("c2.sandbox.egress.origin")
    assert [address for address in PUBLIC if not origin.is_public(address)] == []
    assert [address for address in OTHERS if origin.is_public(address)] == []


@given(st.binary(max_size=100))
@settings(max_examples=100)
def test_any_packet_can_be_parsed(packet):
    assert packets.parse(packet) is None or packets.parse(packet).address


def test_packets():
    four = struct.pack("!BBHHHBBH4s4s", 0x46, 0, 0, 0, 0, 64, 6, 0, b"\1" * 4, b"\2" * 4)
    tcp = struct.pack("!HH", 4000, 22)
    assert packets.parse(four + b"opts" + tcp) == packets.Stray("tcp", "2.2.2.2", 22)
    six = struct.pack("!IHBB16s16s", 6 << 28, 0, 17, 64, b"\1" * 16, bytes(15) + b"\5")
    assert packets.parse(six + tcp) == packets.Stray("udp", "::5", 22)
    ping, unreachable = four.replace(b"\x40\6", b"\x40\1"), b"\3" + bytes(7)
    assert packets.parse(ping + b"opts" + b"\x08") == packets.Stray("icmp", "2.2.2.2", None)
    assert packets.parse(ping + b"opts" + unreachable) is None


@given(st.binary(max_size=80))
@settings(max_examples=100, deadline=None)
def test_any_query_gets_an_answer_or_none(query):
    names = pytest.importorskip("c2.sandbox.egress.names")
    policy, told = Policy(rules=(Rule(host="a.test"),)), _Told()
    reply = names.answer(query, policy, told)
    assert len(told) == 1
    if reply is not None:
        assert reply[:2] == query[:2] and reply[2] & 0x80
        assert told[0] == "allow" or reply[6:8] == b"\0\0"  # no answers


class _Told(list):
    """A log that remembers decisions."""

    def allow(self, *_: object, **__: object) -> None:
        self.append("allow")

    def deny(self, *_: object, **__: object) -> None:
        self.append("deny")


def test_the_table_of_threats_names_tests():
    folder = Path(__file__).parent
    readme = importlib.resources.files("c2.sandbox.egress").joinpath("README.md").read_text()
    cells = [line.split("|")[-2] for line in readme.splitlines() if line.startswith("|")]
    named = [re.findall(r"(\w+): ((?:`\w+`(?:, )?)+)", cell) for cell in cells]
    assert sum(map(bool, named)) >= 25
    for file, names in itertools.chain(*named):
        code = (folder / f"test_egress_{file}.py").read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^def test_\w*{name}\w*\(", code, re.MULTILINE), name


def test_headers_that_pass():
    given = [(b"accept", b"x"), (b"authorization", b"x"), (b"connection", b"keep-alive, X-Hop"),
             (b"x-hop", b"1"), (b"user-agent", b"me"), (b"x-forwarded-host", b"evil")]  # fmt: skip
    assert headers.request(given) == (
        [(b"accept", b"x"), (b"user-agent", b"me")],
        ["authorization", "x-forwarded-host"],
    )


def test_the_log_keeps_lines_whole_and_counts_what_it_hides(tmp_path):
    log = Log(str(tmp_path / "folder/log"), "node")
    lines = SandboxLog(log, "7")
    lines.allow("request", target="a\nb\x1b" + "x" * 5000, host=None)
    for _ in range(1000):
        lines.deny("packet", "no")
    lines.skip(5)
    lines.flush()
    log.close()
    first, *rest = map(json.loads, (tmp_path / "folder/log").read_text().splitlines())
    assert first["target"].startswith("a\nb\x1bx") and len(first["target"]) < MAX_TEXT + 30
    assert "host" not in first and first["sandbox"] == "7" and first["node"] == "node"
    listed = [one for one in rest if one["event"] == "packet"]
    hidden = sum(one["count"] for one in rest if one["event"] == "flood")
    assert 200 <= len(listed) < 400 and len(listed) + hidden == 1005
