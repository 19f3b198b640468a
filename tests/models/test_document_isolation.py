"""Packing is invisible: documents in a row, other rows and padding have no effect on a document.

Every comparison of packed rows is bitwise. It is not a matter of course: a document decides how
many tokens each expert gets, and so where in the experts' blocks the tokens of all others lie.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from c2 import models

ROWS = [[70, 50, 20], [130], [33, 40, 33, 33], [1, 64, 1, 63]]
SEQ = 150


@pytest.fixture(scope="module")
def batch(packed_rows, tiny_config):
    return packed_rows(ROWS, SEQ, tiny_config.vocab)


PRECISIONS = {
    "float32": ("float32", "native"),
    "bfloat16": ("bfloat16", "native"),
    "nvfp4": ("bfloat16", "nvfp4_fwd_mxfp8_bwd"),
}


@pytest.fixture(scope="module", params=PRECISIONS)
def forward(request, tiny_config, random_params):
    dtype, precision = PRECISIONS[request.param]
    experts = replace(tiny_config.moe, intermediate=32, precision=precision)
    cfg = replace(tiny_config, dtype=dtype, moe=experts)
    p = random_params(cfg)

    @jax.jit
    def run(tokens, positions, segment_ids):
        return models.forward(p, tokens, cfg, positions=positions, segment_ids=segment_ids)

    return run


def inputs(batch):
    return batch["tokens"], batch["positions"], batch["segment_ids"]


def bits(logits):
    return np.asarray(logits).view(np.uint32)


def documents(batch):
    for row, lengths in enumerate(ROWS):
        for segment in range(1, len(lengths) + 1):
            where = np.zeros((len(ROWS), SEQ), bool)
            where[row] = batch["segment_ids"][row] == segment
            yield where


def test_perturbing_a_document_changes_no_bit_of_the_others(forward, batch, tiny_config):
    tokens, *layout = inputs(batch)
    before = forward(tokens, *layout)
    rng = np.random.default_rng(2)
    for document in documents(batch):
        for new in (rng.integers(tiny_config.vocab, size=SEQ), 7):  # 7: all to few experts
            after = forward(np.where(document, new, tokens), *layout)
            others = (batch["segment_ids"] > 0) & ~document
            if document.sum() > 1:  # what makes the test one: other loads, other blocks
                assert (after.metrics["expert_load"] != before.metrics["expert_load"]).any()
                assert (bits(after.logits)[document] != bits(before.logits)[document]).any()
            np.testing.assert_array_equal(bits(after.logits)[others], bits(before.logits)[others])


def test_removing_documents_changes_no_bit_of_the_one_that_stays(forward, batch):
    before = bits(forward(*inputs(batch)).logits)
    for document in documents(batch):
        alone = forward(batch["tokens"], batch["positions"], batch["segment_ids"] * document)
        np.testing.assert_array_equal(bits(alone.logits)[document], before[document])


def test_garbage_in_padding_changes_no_bit(forward, batch, tiny_config):
    before = bits(forward(*inputs(batch)).logits)
    padding = batch["segment_ids"] == 0
    rng = np.random.default_rng(1)
    tokens = np.where(padding, rng.integers(-5, 2 * tiny_config.vocab, (4, SEQ)), batch["tokens"])
    positions = np.where(padding, rng.integers(-(10**9), 10**9, (4, SEQ)), batch["positions"])
    after = bits(forward(tokens, positions, batch["segment_ids"]).logits)
    np.testing.assert_array_equal(after[~padding], before[~padding])


@pytest.mark.parametrize("forward", ["float32"], indirect=True)
def test_packed_and_unpacked_agree(forward, batch, packed_rows, tiny_config):
    """Unpacked, each document has a row of its own and begins it."""
    packed = np.asarray(forward(*inputs(batch)).logits)
    for four in zip(*[documents(batch)] * len(ROWS), strict=True):
        lengths = [int(document.sum()) for document in four]
        alone = packed_rows([[length] for length in lengths], SEQ, tiny_config.vocab)
        for row, document in enumerate(four):
            alone["tokens"][row, : lengths[row]] = batch["tokens"][document]
        logits = forward(*inputs(alone)).logits
        for row, document in enumerate(four):
            np.testing.assert_allclose(logits[row, : lengths[row]], packed[document], atol=1e-5)
