"""How often a multi-token-prediction module's drafts are accepted on text it was not trained on.

The text is the stream of `c2.evals.codebase_nll`, cut into windows without overlap: acceptance
hardly depends on the length of the context, so no token needs a long one.
"""

from collections.abc import Callable, Sequence

import numpy as np

from c2.config import ConfigError
from c2.data.readers import Document
from c2.data.tokenizer import Tokenizer
from c2.evals.codebase_nll import stream

# tokens int32 [batch, window] -> probability that a draft for tokens[:, 2:] is accepted
Accept = Callable[[np.ndarray], np.ndarray]


def acceptance_rate(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    accept: Accept,
    *,
    window: int,
    batch_size: int = 8,
) -> float:
    """The mean over all tokens that could be drafted; what is left of the last window is not used.

    Args:
      documents: the files, in any order.
      tokenizer: the tokenizer of the model behind ``accept``.
      accept: called with int32 [batch_size, window] always.
      window: tokens that the model sees at once, at least 3.
      batch_size: windows in one call.

    Raises:
      ConfigError: if the text does not fill one window.
    """
    tokens = stream(documents, tokenizer)
    count = len(tokens) // window
    if not count:
        raise ConfigError(
            f"window: {window} tokens, but the text has only {len(tokens)}; legal: up to that"
        )
    rows = tokens[: count * window].reshape(count, window)
    total = 0.0
    for begin in range(0, count, batch_size):
        batch = np.zeros((batch_size, window), np.int32)
        real = rows[begin : begin + batch_size]
        batch[: len(real)] = real
        total += float(np.asarray(accept(batch), np.float64)[: len(real)].mean(-1).sum())
    return total / count
