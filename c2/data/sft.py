"""Targeted fine-tuning examples from real code: write the body of a documented function.

A miniature of the report's supervised phase on targeted coding tasks (section 2). The prompt is a
function's signature and docstring, the completion its body, both as they stand in the file, so that
prompt + completion is the source text of the function.
"""

import ast
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from c2.data.readers import Document
from c2.data.store import TokenStore, from_documents
from c2.data.tokenizer import Tokenizer

INSTRUCTION = "Write the body of this function.\n\n"


@dataclass(frozen=True)
class Example:
    """A function split behind its docstring.

    Attributes:
      source: path of the document's source.
      prompt: lines from the first decorator or `def` up to the end of the docstring.
      completion: the rest of the function, starting with a line break.
    """

    source: str
    prompt: str
    completion: str


def examples(documents: Sequence[Document]) -> list[Example]:
    """All documented functions and methods with a body, in the order of the text.

    A function inside another one is not listed again: it is part of the outer one's body. Files
    that this interpreter cannot parse have no examples.
    """
    return [example for document in documents for example in _of_document(document)]


def _of_document(document: Document) -> list[Example]:
    if "\r" in document.text:  # line numbers would count other lines than split("\n") does
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old files
            tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = document.text.split("\n")
    splits = [_split(function, lines) for function in _functions(tree)]
    return [Example(document.source, *split) for split in splits if split]


def _functions(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Outermost functions below a node, lambdas aside."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(child)
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            found += _functions(child)
    return found


def _split(
    function: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]
) -> tuple[str, str] | None:
    """(prompt, completion), or None without a docstring that ends its line and a body below."""
    first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
    docstring = function.body[0]
    if ast.get_docstring(function, clean=False) is None or len(function.body) == 1:
        return None
    cut, last = docstring.end_lineno, function.end_lineno
    behind = lines[cut - 1].encode("utf-8")[docstring.end_col_offset :]
    if behind.strip():
        return None
    return "\n".join(lines[first - 1 : cut]), "\n" + "\n".join(lines[cut:last])


def tokenize(
    found: Sequence[Example], tokenizer: Tokenizer, sources: Sequence[str], mark: str
) -> TokenStore:
    """Tokenises examples as one exchange, of which only the assistant's turn is learned.

    <|end|> <|user|> instruction, prompt <|turn_end|> <|assistant|> completion <|turn_end|>

    Args:
      found: the examples.
      tokenizer: how to tokenise.
      sources: the paths of the configured sources.
      mark: the fingerprint to put on the result.
    """
    end, user, assistant, turn_end = map(
        tokenizer.special, ("end", "user", "assistant", "turn_end")
    )
    index = {path: number for number, path in enumerate(sources)}
    prompts = tokenizer.encode_all([INSTRUCTION + example.prompt for example in found])
    completions = tokenizer.encode_all([example.completion for example in found])

    def documents():
        for example, prompt, completion in zip(found, prompts, completions, strict=True):
            given = [end, user, *prompt, turn_end, assistant]
            ids = np.array([*given, *completion, turn_end], tokenizer.dtype)
            yield ids, len(given), index[example.source]

    return from_documents(documents(), tokenizer.dtype, mark)
