import base64
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.sandbox.toolserver.capture import MIN_CAP, Capture
from c2.sandbox.toolserver.frames import (
    HEADER,
    MAX_FRAME,
    Decoder,
    FrameError,
    encode,
    pack,
    unpack,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
MESSAGES = st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=4)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@settings(max_examples=30, deadline=None)
@given(MESSAGES, st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(messages, data):
    stream = b"".join(encode(message) for message in messages)
    decoder, found = Decoder(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert found == messages


def test_bytes_on_the_wire():
    assert encode({"a": "\u00e9"}) == b'\x00\x00\x00\x0e{"a":"\\u00e9"}'
    assert Decoder().feed(frame('{"a":"\u00e9"}'.encode())) == [{"a": "\u00e9"}]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_garbage_is_refused_or_is_json(body):
    try:
        (found,) = Decoder().feed(frame(body))
    except FrameError:
        return
    assert json.loads(body) == found


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[1]", b'"x"', b"1", b'{"a":', b'{"a":NaN}', b'{"a":Infinity}', b"\xff",
        b'{"a":1} {}', b'{"a":' * 100_000, b"[" * 100_000, b'{"a":' + b"9" * 10_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_not_one_object_is_refused(body):
    with pytest.raises(FrameError, match="JSON"):
        Decoder().feed(frame(body))


def test_length_is_checked_before_the_body_comes():
    with pytest.raises(FrameError, match="1048577 bytes; at most 1048576"):
        Decoder().feed((MAX_FRAME + 1).to_bytes(4, "big"))
    largest = {"a": "x" * (MAX_FRAME - len('{"a":""}'))}
    assert len(encode(largest)) == MAX_FRAME + HEADER
    with pytest.raises(FrameError):
        encode({"a": largest["a"] + "x"})


@pytest.mark.parametrize("value", [math.nan, math.inf, b"x", object()])
def test_only_json_is_encoded(value):
    with pytest.raises(FrameError):
        encode({"a": value})


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=100))
def test_bytes_in_text(data):
    assert pack(data) == base64.b64encode(data).decode()
    assert unpack(pack(data)) == data


@pytest.mark.parametrize("text", ["a", "a===", "!!!!", "YQ==\n", None, 1, ["YQ=="], "\u00e9"])
def test_what_is_not_base64_is_refused(text):
    with pytest.raises(FrameError):
        unpack(text)


WIDTHS = "a\u00e9\u20ac\U0001f600"  # characters of one to four bytes


def check_capture(text: str, cap: int, step: int) -> None:
    data, capture = text.encode(), Capture(cap)
    for start in range(0, len(data), step):
        capture.feed(data[start : start + step])
    kept = capture.value()
    assert capture.total == len(data)
    assert capture.truncated == (len(data) > cap)
    if not capture.truncated:
        assert kept == data
        return
    assert len(kept) <= cap
    head, tail = kept.decode().split("\n[... ")  # strict: no character is cut
    missing, _, tail = tail.partition(" bytes left out ...]\n")
    assert text.startswith(head) and text.endswith(tail)
    assert int(missing) == len(data) - len(head.encode()) - len(tail.encode())
    assert int(missing) <= len(data) - cap + 64 + 2 * 3 + 1


@pytest.mark.parametrize("character", WIDTHS)
@pytest.mark.parametrize("offset", range(4))
def test_capture_at_every_place_in_a_character(character, offset):
    for cap in range(MIN_CAP, MIN_CAP + 16):
        check_capture("a" * offset + character * 300 + "a" * (offset // 2), cap, 97)


@settings(max_examples=40, deadline=None)
@given(
    st.text(st.sampled_from(WIDTHS + "\n"), min_size=50, max_size=400),
    st.integers(MIN_CAP, 400),
    st.integers(1, 300),
)
def test_capture_keeps_whole_characters_of_both_ends(text, cap, step):
    check_capture(text, cap, step)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=2000), st.integers(MIN_CAP, 400))
def test_capture_of_any_bytes(data, cap):
    capture = Capture(cap)
    capture.feed(data)
    assert len(capture.value()) <= cap
    assert capture.value()[:90] == data[:90]


def test_capture_of_a_flood_is_flat():
    capture = Capture(1000)
    for _ in range(2000):
        capture.feed(b"x" * 4096)
    assert capture.total == 2000 * 4096
    assert len(capture._head) + len(capture._tail) <= 3000
