"""Wrong solutions that are made of a right one."""

import ast

from c2.sandbox.tasks.mutants import mutants


def test_mutants_are_programs_that_do_something_else(numb):
    made = mutants({"a.py": numb.old}, {"a.py": numb.new, "b.txt": "x"}, 12)
    assert made == mutants({"a.py": numb.old}, {"a.py": numb.new}, 12)
    texts = [mutant["a.py"] for mutant in made]
    assert all(ast.dump(ast.parse(text)) != ast.dump(ast.parse(numb.new)) for text in texts)
    # By hand: the parts of the change, then what can be altered in it.
    whole = numb.new.removeprefix('"""Numbers."""\n\n\n')
    expected = {
        whole.replace("    if low > high:\n        raise ValueError\n", "").replace(
            "min(max(x, low), high)", "max(x, low)"
        ),
        whole.replace("\n\ndef half(x):\n    return x / 2\n", ""),
        whole.replace("low > high", "low <= high"), whole.replace("x / 2", "x / 3"),
        whole.replace("if low > high", "if not low > high"),
        whole.replace("x / 2", "None"), whole.replace("min(max(x, low), high)", "None"),
    }  # fmt: skip
    assert {_plain(text) for text in texts} == {_plain(text) for text in expected}
    assert len(mutants({"a.py": numb.old}, {"a.py": numb.new}, 3)) == 3


def _plain(text):
    tree = ast.parse(text)
    if isinstance(tree.body[0], ast.Expr):
        del tree.body[0]
    return ast.unparse(tree)


def test_words_alone_have_no_mutants():
    old = 'def f(x: int) -> int:\n    """Old."""\n    return x\n'
    new = 'def f(x: float) -> float:\n    """New."""\n    return x  # so\n'
    assert [m for m in mutants({"a.py": old}, {"a.py": new}, 9) if "None" not in m["a.py"]] == []
    assert mutants({"a.py": old}, {"a.py": old}, 9) == []
    assert mutants({"a.py": old}, {"a.py": "def f(:"}, 9) == []
