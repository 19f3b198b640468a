"""Negative log-likelihood of a whole code base (report sections 1 and 2, "codebase perplexity").

The files are concatenated in alphabetical order of their paths and scored by a rolling window, and
the negative log-likelihoods are summed. The report does not say what stands between two files: here
it is <|end|>, as between documents in training, without a line for the path. So the stream is

    <|end|> file <|end|> file <|end|> ... file <|end|>

The first <|end|> is given, all other tokens are scored: a model has to tell where a file ends, as a
compressor would. With a lossless tokenizer the sum is thus the information content of the files
under the model, and bits per byte can be compared between tokenizers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from c2.config import ConfigError
from c2.data.readers import Document
from c2.data.tokenizer import Tokenizer

# tokens int32 [batch, window] -> log p(tokens[:, i + 1] | tokens[:, :i + 1]), [batch, window - 1]
LogProbs = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class CodebaseNLL:
    """The result for one code base.

    Attributes:
      nats: summed negative log-likelihood.
      tokens: number of scored tokens.
      bytes: size of the files in UTF-8.
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def nats_per_token(self) -> float:
        """Mean negative log-likelihood; depends on the tokenizer."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Does not depend on the tokenizer."""
        return self.nats / self.bytes / math.log(2)


def codebase_nll(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    logprobs: LogProbs,
    *,
    window: int,
    stride: int,
    batch_size: int = 8,
) -> CodebaseNLL:
    """Scores a code base; see `rolling_nll` for the arguments that are not named here.

    Args:
      documents: the files, in any order.
      tokenizer: the tokenizer of the model behind `logprobs`.
      logprobs: the scoring function.
      window: tokens that the model sees at once.
      stride: tokens by which the window moves.
      batch_size: windows in one call.
    """
    tokens = stream(documents, tokenizer)
    nats = rolling_nll(tokens, logprobs, window=window, stride=stride, batch_size=batch_size)
    size = sum(len(document.text.encode("utf-8")) for document in documents)
    return CodebaseNLL(nats, len(tokens) - 1, size)


def stream(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
    """int32 [token]: the files in alphabetical order, with <|end|> around each."""
    ordered = sorted(documents, key=lambda document: document.path)
    end = np.array([tokenizer.special("end")], np.int32)
    files = tokenizer.encode_all([document.text for document in ordered])
    parts = [part.astype(np.int32) for ids in files for part in (ids, end)]
    return np.concatenate([end, *parts])


def rolling_nll(
    tokens: np.ndarray, logprobs: LogProbs, *, window: int, stride: int, batch_size: int = 8
) -> float:
    """Summed negative log-likelihood in nats of all tokens but the first.

    Each token is scored exactly once, given at least the `window - stride` tokens before it, or all
    of them where there are fewer. A small stride gives every token a long context and costs
    `window / stride` times as much as reading the tokens once.

    Args:
      tokens: int [token].
      logprobs: called with int32 [batch_size, window] always, so that a jitted function compiles
        once. It must be causal: what follows a token, or is in another row, may be padding.
      window: tokens that the model sees at once.
      stride: from 1 to `window - 1`.
      batch_size: windows in one call.

    Raises:
      ConfigError: if the stride does not fit the window.
    """
    if not 1 <= stride < window:
        raise ConfigError(
            f"stride: {stride} does not fit window {window}; legal: 1 to {window - 1}"
        )
    spans = list(_spans(len(tokens), window, stride))
    total = 0.0
    for begin in range(0, len(spans), batch_size):
        batch = np.zeros((batch_size, window), np.int32)
        scored = np.zeros((batch_size, window - 1), bool)
        for row, (start, first, last) in enumerate(spans[begin : begin + batch_size]):
            seen = tokens[start : start + window]
            batch[row, : len(seen)] = seen
            # Column i of the result scores the token at column i + 1.
            scored[row, first - start - 1 : last - start - 1] = True
        values = np.asarray(logprobs(batch), np.float64)
        total -= float(values[scored].sum())
    return total


def _spans(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields (start of the window, first scored token, end of the scored tokens)."""
    done = 1
    while done < count:
        # The last window is moved back to end with the text, which only lengthens the context.
        end = min(window if done == 1 else done + stride, count)
        yield max(end - window, 0), done, end
        done = end
