import numpy as np
import pytest

from c2.config import ConfigError
from c2.data.readers import Document
from c2.data.tokenizer import train
from c2.evals.acceptance import acceptance_rate
from c2.evals.codebase_nll import stream

WINDOW = 7


@pytest.fixture(scope="module")
def documents():
    return [Document("", name, f"{name} = 1\n" * 9, "") for name in ("b.py", "a.py")]


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train([document.text for document in documents], 512)


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_mean_over_whole_windows_of_the_stream(documents, tokenizer, batch_size):
    def accept(tokens):
        assert tokens.shape == (batch_size, WINDOW) and tokens.dtype == np.int32
        return np.where(tokens[:, 2:] % 3 == 0, 0.75, 0.25).astype(np.float32)

    tokens = stream(documents, tokenizer)
    assert len(tokens) % WINDOW
    seen = [
        0.75 if tokens[at] % 3 == 0 else 0.25
        for at in range(len(tokens) // WINDOW * WINDOW)
        if at % WINDOW >= 2
    ]
    rate = acceptance_rate(documents, tokenizer, accept, window=WINDOW, batch_size=batch_size)
    assert rate == pytest.approx(np.mean(seen), rel=1e-9)
    assert 0.3 < rate < 0.7


def test_a_text_shorter_than_a_window_is_refused(documents, tokenizer):
    count = len(stream(documents, tokenizer))
    with pytest.raises(ConfigError, match=f"window: 999 tokens, but the text has only {count}"):
        acceptance_rate(documents, tokenizer, None, window=999)
