"""Bit-exact deltas between two states of the same numbers.

Both states are flat arrays of unsigned integers, the bit patterns of the storage type, so nothing
is ever computed in floating point: -0.0 and the payloads of NaNs survive. Three codes, all byte
streams compressed by zstd:

``gaps``
    One byte per change, ``2 * gap + sign``: the unchanged numbers in front of it, and whether the
    pattern went up. What it moved by beyond 1, almost always 0, follows in byte planes. The byte
    254 skips 127 unchanged numbers. A training step moves few bf16 numbers, mostly to a neighbour:
    at a changed fraction p the step bytes cost about the entropy H(p) + p bits per number.
``xor``
    The exclusive or of the states in byte planes: for states that differ nearly everywhere.
``full``
    The state itself in byte planes; needs no base.
"""

from typing import Literal, NamedTuple

import numpy as np
import zstandard

Codec = Literal["full", "xor", "gaps"]

SKIP = 254  # a step byte without a change
REACH = 127  # numbers that it skips
DENSE = 1 / 8  # changed fraction up to which `gaps` is smaller without trying `xor`
LEVEL = 1  # of zstd; 3 takes longer and finds nothing more in such streams


class CodecError(ValueError):
    """Data that are not those of a state of this size."""


class Packed(NamedTuple):
    """An encoded state.

    Attributes:
      codec: how.
      data: what to store.
      changes: numbers that differ from the base; all of them without one.
    """

    codec: Codec
    data: bytes
    changes: int


def bits(values: np.ndarray) -> np.ndarray:
    """The bit patterns of any array, flat; a view if it is contiguous."""
    return np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")


def encode(new: np.ndarray, old: np.ndarray | None) -> Packed:
    """Encodes a state against its base by the code that takes the fewest bytes.

    Args:
      new: unsigned integers [n].
      old: the base, of the same type and length; None encodes ``new`` by itself.

    Raises:
      ValueError: if the two states differ in type or length.
    """
    if old is None:
        return Packed("full", _compress(_planes(new)), new.size)
    if (new.dtype, new.shape) != (old.dtype, old.shape):
        raise ValueError(f"states {new.dtype}{new.shape} and {old.dtype}{old.shape} differ in form")
    at = np.flatnonzero(new != old)
    gaps = Packed("gaps", _compress(_steps(new, old, at)), at.size)
    if at.size <= DENSE * new.size:
        return gaps
    xor = Packed("xor", _compress(_planes(new ^ old)), at.size)
    return min(gaps, xor, key=lambda packed: len(packed.data))


def decode(packed: Packed, out: np.ndarray) -> None:
    """Turns the base into the new state.

    Args:
      packed: from `encode`.
      out: unsigned integers [n] that hold the base; overwritten, and undefined after an error.

    Raises:
      CodecError: if the data are damaged in a way that shows. A checksum of the result has to
        find the others.
    """
    match packed.codec:
        case "full":
            _join(_decompress(packed.data, out.nbytes), out)
        case "xor":
            difference = np.empty_like(out)
            _join(_decompress(packed.data, out.nbytes), difference)
            np.bitwise_xor(out, difference, out=out)
        case "gaps":
            _take_steps(packed, out)
        case _:
            raise CodecError(f"codec {packed.codec!r}; legal are full, xor, gaps")


def _steps(new: np.ndarray, old: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Step bytes, then the planes of what goes beyond a step of 1."""
    skips, gaps = np.divmod(np.diff(at, prepend=-1) - 1, REACH)
    steps = np.full(at.size + int(skips.sum()), SKIP, np.uint8)
    move = new[at] - old[at]  # modulo the range of patterns
    up = move <= np.iinfo(move.dtype).max // 2
    steps[np.arange(at.size) + np.cumsum(skips)] = 2 * gaps + up
    beyond = np.where(up, move, -move) - move.dtype.type(1)
    return np.concatenate([steps, _planes(beyond)])


def _take_steps(packed: Packed, out: np.ndarray) -> None:
    rest = packed.changes * out.itemsize
    stream = _decompress(packed.data, out.size // REACH + packed.changes + rest)
    steps, beyond = stream[: stream.size - rest], np.empty(packed.changes, out.dtype)
    change = steps != SKIP
    at = np.cumsum(np.where(change, (steps >> 1) + 1, REACH), dtype=np.int64)[change] - 1
    if stream.size < rest or at.size != packed.changes or (at.size and at[-1] >= out.size):
        raise CodecError(f"steps do not make {packed.changes} changes among {out.size} numbers")
    _join(stream[stream.size - rest :], beyond)
    beyond += beyond.dtype.type(1)
    up = (steps[change] & 1).astype(bool)
    out[at] += np.where(up, beyond, -beyond)


def _planes(values: np.ndarray) -> np.ndarray:
    """First bytes of all numbers, then second bytes, and so on."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).reshape(-1)


def _join(planes: np.ndarray, out: np.ndarray) -> None:
    if planes.size != out.nbytes:
        raise CodecError(f"{planes.size} bytes instead of {out.nbytes}")
    out.view(np.uint8).reshape(-1, out.itemsize)[:] = planes.reshape(out.itemsize, -1).T


def _compress(stream: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(stream)


def _decompress(data: bytes, most: int) -> np.ndarray:
    """The bytes of a frame that claims at most ``most`` of them."""
    try:
        claimed = zstandard.frame_content_size(data)
        if not 0 <= claimed <= most:
            raise CodecError(f"a frame of {claimed} bytes where at most {most} can be")
        stream = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"no zstd frame: {error}") from error
    return np.frombuffer(stream, np.uint8)
