import random
import subprocess
import sys
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.data.dedup import SHINGLE, deduplicate, jaccard, shingles


def words(seed, count):
    rng = random.Random(seed)
    return [f"w{rng.randrange(10**6)}" for _ in range(count)]


def changed(tokens, share, seed):
    """The same tokens with a block of new ones at the end."""
    keep = round(len(tokens) * (1 - share))
    return tokens[:keep] + words(seed, len(tokens) - keep)


def similarity_of(a, b):
    """Jaccard similarity of the sets of token runs, without hashing."""
    a, b = ({tuple(t[i : i + SHINGLE]) for i in range(len(t) - SHINGLE + 1)} for t in (a, b))
    return len(a & b) / len(a | b)


@given(st.integers(0, 10**6), st.floats(0, 1), st.integers(SHINGLE, 200))
@settings(max_examples=50, deadline=None)
def test_jaccard_is_that_of_token_runs(seed, share, count):
    a = words(seed, count)
    b = changed(a, share, seed + 1)
    assert jaccard(shingles(" ".join(a)), shingles(" ".join(b))) == similarity_of(a, b)


def test_shingles_ignore_layout_but_not_signs():
    assert np.array_equal(shingles("f(x,  y)\n\n= a"), shingles("f(x, y) = a"))
    assert not np.array_equal(shingles("f(x, y) = a"), shingles("f(x, y) + a"))
    assert len(shingles("a b")) == 1  # shorter than a shingle
    assert len(shingles(" \n")) == 0


def test_equal_and_similar_texts_are_dropped_and_the_first_is_kept():
    base = words(0, 400)
    texts = [
        " ".join(base),
        " ".join(words(1, 400)),
        " ".join(base),
        "  ".join(base),
        " ".join(changed(base, 0.05, 2)),
        " ".join(changed(base, 0.5, 3)),
    ]
    kept, dropped = deduplicate(texts, [], 0.8)
    assert kept == [0, 1, 5]
    assert dropped == {"duplicate": 1, "near duplicate": 2}


def test_decision_equals_all_pairs_comparison():
    groups = [words(seed, 120) for seed in range(30)]
    tokens = [
        changed(group, share, 1000 * seed)
        for seed, group in enumerate(groups, start=1)
        for share in (0, 0.02, 0.06, 0.1, 0.2, 0.4)
    ]
    expected = []
    for index, mine in enumerate(tokens):
        if all(similarity_of(mine, tokens[other]) < 0.8 for other in expected):
            expected.append(index)
    kept, _ = deduplicate([" ".join(mine) for mine in tokens], [], 0.8)
    assert kept == expected
    assert len(kept) > len(groups)


def test_threshold_of_one_keeps_all_that_differs():
    base = words(0, 100)
    texts = [" ".join(base), "\n".join(base), " ".join([*base[:-1], "other"])]
    assert deduplicate(texts, [], 1.0)[0] == [0, 2]


def test_held_out_text_cannot_come_back():
    secret = words(0, 300)
    texts = [
        " ".join(secret),  # a copy
        " ".join(changed(secret, 0.3, 1)),  # an older version
        " ".join(words(2, 3000) + secret),  # vendored in a larger file
        " ".join(secret[:100]),  # an excerpt
        " ".join(words(3, 300)),
        " ".join(words(4, 300) + secret[:30]),  # a shared idiom
    ]
    kept, dropped = deduplicate(texts, [" ".join(secret), "tiny file here"], 0.8)
    assert kept == [4, 5]
    assert dropped == {"resembles held-out": 4}


def test_same_result_in_processes_with_other_string_hashes():
    code = (
        "from c2.data.dedup import shingles, _minhash, _permutations\n"
        "s = shingles('def f(x): return x + 1')\n"
        "print(s.sum(), _minhash(s, *_permutations()).sum())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
