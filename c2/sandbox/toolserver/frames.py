"""Messages on a stream socket: four bytes of length, big-endian, then one JSON object in UTF-8."""

import binascii
import json

MAX_FRAME = 1 << 20  # bytes of JSON; what is longer is refused unread
MAX_DATA = 1 << 19  # bytes that one message carries; their base64 fits into a frame with room
HEADER = 4


class FrameError(ValueError):
    """The other side sent what is no frame; nothing after it can be understood."""


def encode(message):
    """The frame of a dict.

    Raises:
      FrameError: if it is longer than `MAX_FRAME` or not JSON (NaN and infinities are not).
    """
    try:
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"not a JSON message: {error}") from error
    if len(body) > MAX_FRAME:
        raise FrameError(f"a frame of {len(body)} bytes; at most {MAX_FRAME} are legal")
    return len(body).to_bytes(HEADER, "big") + body


class Decoder:
    """Cuts a stream of bytes into messages, holding at most one frame and one chunk."""

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data):
        """The messages, dicts, that `data` completes.

        Raises:
          FrameError: for a frame that is too long or is not one JSON object.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= HEADER:
            size = int.from_bytes(self._buffer[:HEADER], "big")
            if size > MAX_FRAME:
                raise FrameError(f"a frame of {size} bytes; at most {MAX_FRAME} are legal")
            if len(self._buffer) < HEADER + size:
                break
            messages.append(_parse(bytes(self._buffer[HEADER : HEADER + size])))
            del self._buffer[: HEADER + size]
        return messages


def pack(data):
    """Bytes as text."""
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def unpack(text):
    """The bytes of `pack`.

    Raises:
      FrameError: if it is something else.
    """
    try:
        data = binascii.a2b_base64(text)
    except (TypeError, ValueError) as error:
        raise FrameError(f"not base64: {error}") from error
    if pack(data) != text:
        raise FrameError("not base64 as `pack` writes it")
    return data


def _parse(body):
    try:
        message = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a JSON {type(message).__name__}; only objects are legal")
    return message


def _no_constant(name):
    raise ValueError(f"{name} is not JSON")
