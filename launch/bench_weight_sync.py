"""Deltas of bf16 weights N(0, .02) that moved by 1e-6, in MB of raw weights on one core.

Ours is what `c2.weights` does with a chunk, the SHA-256 of the new state included: encoding it
against its base, and building it from a copy of the base. The peer sends everything, compressed.
The bytes per parameter of both stand in the names of the cases.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import ml_dtypes
import numpy as np
import zstandard

from c2.weights import codec
from c2.weights.publisher import PublisherConfig
from launch.bench_case import Case, Step, timed

NUMBERS, RATE = 1 << 24, 1e-6
PEER, UNIT, SAME_WORK = "zstd", "MB", False


class _Pair(NamedTuple):
    """Bit patterns of the same weights before and after a step, in chunks."""

    old: list[np.ndarray]
    new: list[np.ndarray]


def cases(dtypes: Sequence[str]) -> dict[str, Case]:
    """Both directions; none without bfloat16."""
    if "bfloat16" not in dtypes:
        return {}
    pair = _pair()
    ours = sum(len(packed.data) for packed in _encode(pair)) / NUMBERS
    peer = sum(len(data) for data in _compress(pair)) / NUMBERS
    amount = NUMBERS * pair.new[0].itemsize / 1e6
    return {
        f"{name} ({ours:.4f} bytes, zstd {peer:.2f})": Case(
            partial(_timed, prepare_ours), partial(_timed, prepare_peer), amount
        )
        for name, prepare_ours, prepare_peer in (
            ("encode", lambda pair: partial(_encode, pair), lambda pair: partial(_compress, pair)),
            ("decode", _decoder, _decompressor),
        )
    }


def _timed(prepare) -> Step:
    return timed(prepare(_pair()))


def _pair() -> _Pair:
    rng = np.random.default_rng(0)
    old = rng.normal(0, 0.02, NUMBERS).astype(np.float32)
    new = old + np.float32(RATE) * (rng.integers(0, 2, NUMBERS) * 2 - 1).astype(np.float32)
    chunk = PublisherConfig().chunk
    states = (codec.bits(x.astype(ml_dtypes.bfloat16)) for x in (old, new))
    return _Pair(*([x[at : at + chunk] for at in range(0, NUMBERS, chunk)] for x in states))


def _encode(pair: _Pair) -> list[codec.Packed]:
    encoded = []
    for old, new in zip(pair.old, pair.new, strict=True):
        encoded.append(codec.encode(new, old))
        hashlib.sha256(new).digest()
    return encoded


def _decoder(pair: _Pair):
    encoded = _encode(pair)

    def decode() -> None:
        for old, packed in zip(pair.old, encoded, strict=True):
            new = old.copy()
            codec.decode(packed, new)
            hashlib.sha256(new).digest()

    return decode


def _compress(pair: _Pair) -> list[bytes]:
    compressor = zstandard.ZstdCompressor()
    return [compressor.compress(new) for new in pair.new]


def _decompressor(pair: _Pair):
    compressed, decompressor = _compress(pair), zstandard.ZstdDecompressor()
    return lambda: [decompressor.decompress(data) for data in compressed]
