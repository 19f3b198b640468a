import ast
import textwrap

import numpy as np

from c2.data import sft
from c2.data.config import Source
from c2.data.packing import pack
from c2.data.readers import Document, Limits, read
from c2.data.tokenizer import train

FILES = read(Source(path="stdlib:json"), Limits((".py",), 10**6))[0]


def of(text, path="m.py"):
    return sft.examples([Document("source", path, textwrap.dedent(text), "")])


def test_split_behind_the_docstring():
    [example] = of('''
        import x

        @decorator(
            1)
        def f(a: int = 1) -> int:
            """Doc, é.

            More.
            """

            # A comment.
            return (a +
                    1)  # behind

        y = f()
    ''')
    assert example.prompt == (
        '@decorator(\n    1)\ndef f(a: int = 1) -> int:\n    """Doc, é.\n\n    More.\n    """'
    )
    assert example.completion == ("\n\n    # A comment.\n    return (a +\n            1)  # behind")
    assert example.source == "source"


def test_methods_and_nested_functions():
    found = of('''
        if True:
            class A:
                async def method(self):
                    "doc"
                    def inner():
                        """inner"""
                        return 1
                    return inner
        try:
            pass
        except E:
            def handler():
                "doc"
                return 2
    ''')
    assert [example.prompt.split("(")[0].split()[-1] for example in found] == ["method", "handler"]
    assert found[0].prompt.startswith("        async def method")
    assert "return inner" in found[0].completion


def test_functions_that_are_left_out():
    assert of("def f():\n    return 1\n") == []  # no docstring
    assert of('def f():\n    """doc"""\n') == []  # no body
    assert of('def f(): """doc"""; return 1\n') == []  # one line
    assert of('def f():\n    """doc"""; x = 1\n    return x\n') == []  # body on the same line
    assert of("def f(:\n") == []  # does not parse
    assert of("x = '\0'\n") == []
    assert of('def f():\r\n    """doc"""\r\n    return 1\r\n') == []


def test_examples_of_real_code_are_exactly_its_functions():
    found = sft.examples(FILES)
    segments = {
        segment
        for document in FILES
        for node in ast.walk(ast.parse(document.text))
        if isinstance(node, ast.FunctionDef)
        for segment in [ast.get_source_segment(document.text, node)]
    }
    undecorated = [e for e in found if not e.prompt.lstrip().startswith("@")]
    assert len(undecorated) > 10
    for example in undecorated:
        # get_source_segment has no indentation before `def` and no comment behind the last line.
        whole = (example.prompt + example.completion).lstrip(" ")
        assert any(whole.startswith(segment) for segment in segments)
        ast.parse(textwrap.dedent(example.prompt + example.completion))


def test_only_the_completion_is_learned():
    tokenizer = train([document.text for document in FILES], 700)
    found = sft.examples(FILES)[:40]
    store = sft.tokenize(found, tokenizer, ["other", "stdlib:json"], "mark")
    assert set(store.sources.tolist()) == {1}
    special = tokenizer.special
    for index, example in enumerate(found):
        ids = store.tokens[store.offsets[index] : store.offsets[index + 1]].tolist()
        prompt = store.prompts[index]
        assert ids[:2] == [special("end"), special("user")]
        assert ids[prompt - 2 : prompt] == [special("turn_end"), special("assistant")]
        assert ids[-1] == special("turn_end")
        assert tokenizer.decode(ids[2 : prompt - 2]) == sft.INSTRUCTION + example.prompt
        assert tokenizer.decode(ids[prompt:-1]) == example.completion
        # Tokenised in two parts, the function has the same tokens as in its file.
        together = tokenizer.encode(sft.INSTRUCTION + example.prompt + example.completion)
        assert ids[2 : prompt - 2] + ids[prompt:-1] == together

    learned = []
    for row in pack(store, 512, overlong="drop"):
        learned += [row["targets"][row["loss_mask"] > 0]]
    fitting = [i for i in range(len(found)) if store.lengths[i] <= 512]
    expected = [
        store.tokens[store.offsets[i] + store.prompts[i] : store.offsets[i + 1]] for i in fitting
    ]
    count = lambda parts: np.bincount(np.concatenate(parts), minlength=700)  # noqa: E731
    np.testing.assert_array_equal(count(learned), count(expected))
