"""Bounded memory of an output: its beginning and its end."""

MARK = "\n[... %d bytes left out ...]\n"
ROOM = 64  # bytes kept free for the mark
MIN_CAP = 256


class Capture:
    """Takes any amount of output in chunks and keeps at most `cap` bytes of it."""

    def __init__(self, cap):
        self.total = 0
        self._cap = cap
        self._head = bytearray()
        self._tail = bytearray()

    def feed(self, data):
        """Takes the next chunk."""
        self.total += len(data)
        self._head += data[: self._cap - len(self._head)]
        self._tail += data[-self._cap :]
        if len(self._tail) > 2 * self._cap:
            del self._tail[: -self._cap]

    @property
    def truncated(self):
        """Whether `value` lacks something."""
        return self.total > self._cap

    def value(self):
        """All of the output, or its two ends around a line that says how much is missing.

        Never longer than `cap`, and never cut inside a UTF-8 character.
        """
        if not self.truncated:
            return bytes(self._head)
        half = (self._cap - ROOM) // 2
        head, tail = whole_end(bytes(self._head[:half])), whole_start(bytes(self._tail[-half:]))
        return head + (MARK % (self.total - len(head) - len(tail))).encode("ascii") + tail


def whole_end(data):
    """Without the first bytes of a character whose last bytes are missing."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the first byte of a character, which says its length
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if back < length else data
        if byte < 0x80:
            break
    return data


def whole_start(data):
    """Without the last bytes of a character whose first bytes are missing."""
    for skip in range(min(4, len(data))):
        if not 0x80 <= data[skip] < 0xC0:
            return data[skip:]
    return data[min(3, len(data)) :]
