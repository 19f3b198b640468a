"""Logs as the programs print them, and records that become tasks."""

import json
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.sandbox.tasks.swebench import FORMATS, LANGUAGES, candidate, parse, read, unresolved
from c2.sandbox.tasks.swebench.records import apply, record

# Program -> (log, tests that passed, failed, were skipped). Written after the programs' own output.
LOGS = {
    "pytest": (
        "============================= test session starts ==============================\n"
        "collected 5 items\n\n"
        "tests/test_a.py::test_v[a b] PASSED                                      [ 20%]\n"
        "tests/test_a.py::TestB::test_c FAILED                                    [ 40%]\n"
        "=========================== short test summary info ============================\n"
        "PASSED tests/test_a.py::test_one\n"
        "PASSED tests/test_a.py::test_two[x - y]\n"
        "SKIPPED [1] tests/test_a.py:12: no reason\n"
        "XFAIL tests/test_a.py::test_known - a bug\n"
        "FAILED tests/test_a.py::TestB::test_c - AssertionError: assert 1 == 2\n"
        "ERROR tests/test_broken.py - ImportError: no\n"
        "==================== 1 failed, 3 passed, 1 skipped in 0.12s ====================\n",
        {
            "tests/test_a.py::test_v[a b]", "tests/test_a.py::test_one",
            "tests/test_a.py::test_known",
        },
        {"tests/test_a.py::TestB::test_c", "tests/test_broken.py"}, set(),
    ),
    "go": (
        "=== RUN   TestAdd\n--- PASS: TestAdd (0.00s)\n=== RUN   TestTable\n"
        "=== RUN   TestTable/empty_list\n    a_test.go:14: got 1, want 2\n"
        "--- FAIL: TestTable (0.01s)\n    --- FAIL: TestTable/empty_list (0.00s)\n"
        "    --- PASS: TestTable/one (0.00s)\n--- SKIP: TestNet (0.00s)\n"
        "FAIL\nFAIL\texample.org/pkg\t0.015s\nok  \texample.org/other\t0.011s\n",
        {"TestAdd", "TestTable/one"}, {"TestTable", "TestTable/empty_list"}, {"TestNet"},
    ),
    "cargo": (
        "running 4 tests\ntest tests::adds ... ok\ntest tests::breaks ... FAILED\n"
        "test tests::slow ... ignored\ntest tests::later ... ignored, not yet\n\nfailures:\n\n"
        "---- tests::breaks stdout ----\nthread 'tests::breaks' panicked at src/lib.rs:9:5:\n"
        "test result: FAILED. 1 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out\n",
        {"tests::adds"}, {"tests::breaks"}, {"tests::slow", "tests::later"},
    ),
    "jest": (
        "FAIL src/sum.test.js\n  sum\n    ✓ adds 1 + 2 (3 ms)\n    ✕ adds strings (1 ms)\n"
        "    ○ skipped later\n    ✓ is quick\n\n  ● sum › adds strings\n\n"
        "Tests:       1 failed, 1 skipped, 2 passed, 4 total\n",
        {"adds 1 + 2", "is quick"}, {"adds strings"}, {"skipped later"},
    ),
    "vitest": (
        " ✓ test/sum.test.ts > sum > adds 2ms\n × test/sum.test.ts > sum > breaks 5ms\n"
        " ↓ test/sum.test.ts > sum > later [skipped]\n\n Test Files  1 failed (1)\n",
        {"test/sum.test.ts > sum > adds"}, {"test/sum.test.ts > sum > breaks"},
        {"test/sum.test.ts > sum > later"},
    ),
    "tap": (
        "TAP version 13\n# sum\nok 1 adds\nnot ok 2 breaks\n  ---\n    operator: equal\n  ...\n"
        "ok 3 - ends\n\n1..3\n# tests 3\n# pass  2\n# fail  1\n",
        {"adds", "- ends"}, {"breaks"}, set(),
    ),
    "maven": (
        "+ mvn test -B -Dtest=org.a.SumTest#adds\n[INFO] Scanning for projects...\n"
        "[INFO] Tests run: 1, Failures: 0, Errors: 0, Skipped: 0\n[INFO] BUILD SUCCESS\n"
        "+ mvn test -B -Dtest=org.a.SumTest#breaks\n[ERROR] Tests run: 1, Failures: 1\n"
        "[INFO] BUILD FAILURE\n+ mvn test -B -Dtest=org.a.SumTest#never\n",
        {"org.a.SumTest#adds"}, {"org.a.SumTest#breaks"}, set(),
    ),
    "gradle": (
        "> Task :core:test\n\norg.a.SumTest > adds PASSED\n\norg.a.SumTest > breaks FAILED\n"
        "    java.lang.AssertionError at SumTest.java:17\norg.a.SumTest > later SKIPPED\n\n"
        "3 tests completed, 1 failed, 1 skipped\n\n> Task :core:test FAILED\n",
        {"org.a.SumTest > adds"}, {"org.a.SumTest > breaks"}, {"org.a.SumTest > later"},
    ),
    "ant": (
        "test:\n    [junit] Testsuite: lombok.TestA\n    [junit] [PASS] After.java: javac\n"
        "    [junit] [FAIL] Data.java: ecj\n    [junit] [ERR] Log.java: ecj\nBUILD FAILED\n",
        {"After.java: javac"}, {"Data.java: ecj", "Log.java: ecj"}, set(),
    ),
    "phpunit": (
        "PHPUnit 11.5.2 by Sebastian Bergmann and contributors.\n\nSum (Tests\\Sum)\n"
        " ✔ Adds two numbers  [0.35 ms]\n ✘ Adds strings\n   │\n   │ Failed asserting that 1.\n"
        " ↩ Later\n\nProduct (Tests\\Product)\n ✔ Adds two numbers\n\nTests: 4, Failures: 1.\n",
        {"Sum > Adds two numbers", "Product > Adds two numbers"}, {"Sum > Adds strings"},
        {"Sum > Later"},
    ),
    "minitest": (
        "Run options: -v --seed 1\n\n# Running:\n\nSumTest#test_adds = 0.00 s = .\n"
        "SumTest#test_: it breaks. = 0.01 s = F\nSumTest#test_raises = 0.01 s = E\n"
        "SumTest#test_later = 0.00 s = S\n\nFinished in 0.012s, 333.0 runs/s.\n",
        {"SumTest#test_adds"}, {"SumTest#test_: it breaks", "SumTest#test_raises"},
        {"SumTest#test_later"},
    ),
    "rspec": (
        "Sum adds two numbers - passed\nSum adds strings - failed\nSum later - pending\n",
        {"Sum adds two numbers"}, {"Sum adds strings"}, {"Sum later"},
    ),
    "test-unit": (
        "Loaded suite test\nStarted\nSumTest: \n  test: adds:\t\t.: (0.000321)\n"
        "  test_breaks:\t\tF\n  test_later:\t\tO: (0.000100)\nFinished in 0.002 seconds.\n",
        {"adds"}, {"test_breaks"}, {"test_later"},
    ),
    "googletest": (
        "[==========] Running 3 tests from 1 test suite.\n[ RUN      ] format_test.adds\n"
        "[       OK ] format_test.adds (0 ms)\n[ RUN      ] format_test.breaks\n"
        "a.cc:3: Failure\n[  FAILED  ] format_test.breaks (2 ms)\n"
        "[  FAILED  ] t/p.case/0, where GetParam() = 1 (1 ms)\n"
        "[  SKIPPED ] format_test.later (0 ms)\n[  PASSED  ] 1 test.\n"
        "[  FAILED  ] 1 test, listed below:\n[  FAILED  ] format_test.breaks\n",
        {"format_test.adds"}, {"format_test.breaks", "t/p.case/0"}, {"format_test.later"},
    ),
    "doctest": (
        '[doctest] run\n<?xml version="1.0"?>\n<doctest binary="t">\n <TestSuite>\n'
        '  <TestCase name="sum" filename="a.cpp">\n   <SubCase name="adds">\n'
        '    <Expression success="true" type="CHECK"/>\n   </SubCase>\n'
        '   <SubCase name="breaks">\n    <Expression success="true" type="CHECK"/>\n'
        '    <Expression success="false" type="CHECK"/>\n   </SubCase>\n  </TestCase>\n'
        ' </TestSuite>\n</doctest>\ndone\n',
        {"sum > adds"}, {"sum > breaks"}, set(),
    ),
    "jq": (
        "PASS: tests/mantest\nFAIL: tests/jqtest\nSKIP: tests/locale\n# TOTAL: 3\n",
        {"tests/mantest"}, {"tests/jqtest"}, {"tests/locale"},
    ),
    "micropython": (
        "pass  basics/0prelim.py\nFAIL  basics/array1.py\nskip  io/file.py\n"
        "3 tests performed (30 individual testcases)\n1 tests failed: array1\n",
        {"basics/0prelim.py"}, {"basics/array1.py"}, {"io/file.py"},
    ),
    "redis": (
        "[ready]: 1234\n[testing]: unit/type/list\n[ok]: LPOS basic usage (0 ms)\n"
        "[err]: LPOS RANK\n[skip]: large memory flag not provided\n[ignore]: not supported\n",
        {"LPOS basic usage"}, {"LPOS RANK"}, {"large memory flag not provided", "not supported"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", FORMATS)
def test_logs(program):
    log, *groups = LOGS[program]
    want = {
        name: status
        for names, status in zip(groups, ("PASSED", "FAILED", "SKIPPED"), strict=True)
        for name in names
    }
    if program == "pytest":  # a " - " in a name cannot be told from the reason behind it
        want["tests/test_a.py::test_two[x"] = "PASSED"
    assert parse(log, program) == want
    coloured = "\n".join(f"\x1b[1;32m{line}\x1b[0m" for line in log.splitlines())
    assert parse(coloured, program) == want


def test_every_language_of_the_multilingual_set_has_a_format():
    assert set(LANGUAGES) == {"c", "go", "java", "javascript", "php", "python", "ruby", "rust"}
    assert {name for names in LANGUAGES.values() for name in names} == set(FORMATS)


def test_who_fails_once_has_failed():
    assert parse("test a ... FAILED\ntest a ... ok\n", "cargo") == {"a": "FAILED"}
    assert parse("test a ... ok\ntest a ... FAILED\n", "cargo") == {"a": "FAILED"}


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FORMATS), st.text(max_size=200))
def test_any_log_is_read(program, log):
    assert set(parse(log, program).values()) <= {"PASSED", "FAILED", "SKIPPED"}


@pytest.mark.parity
@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("go", "gotest"), ("cargo", "cargo"), ("jest", "jest"), ("vitest", "vitest"),
        ("maven", "maven"), ("ant", "ant"), ("redis", "redis"), ("doctest", "doctest"),
        ("micropython", "micropython_test"), ("jq", "jq"), ("rspec", "rspec_transformed_json"),
        ("tap", "tap"), ("gradle", "gradle_custom"), ("test-unit", "ruby_unit"),
    ],
)  # fmt: skip
def test_names_are_those_of_swebench(program, name):
    pytest.importorskip("docker", reason="swebench is installed without what it needs")
    parsers = pytest.importorskip("swebench.harness.log_parsers").PARSER_REGISTRY
    log = LOGS[program][0]
    theirs, ours = parsers[f"parse_log_{name}"](log, None), parse(log, program)
    assert theirs.items() <= ours.items()
    assert set(ours) - set(theirs) <= {k for k, v in ours.items() if v == "SKIPPED"}


ROW = {
    "instance_id": "owner__pkg-1", "repo": "owner/pkg", "base_commit": "HEAD",
    "problem_statement": "f is wrong", "version": "1.0", "hints_text": "",
    "patch": (
        "diff --git a/pkg/a.py b/pkg/a.py\n--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -1,2 +1,2 @@\n"
        " def f(x):\n-    return x\n+    return x + 1\n"
    ),
    "test_patch": (
        "diff --git a/tests/test_a.py b/tests/test_a.py\nnew file mode 100644\n--- /dev/null\n"
        "+++ b/tests/test_a.py\n@@ -0,0 +1,3 @@\n+from pkg.a import f\n+def test_f():\n"
        "+    assert f(1) == 2\n"
    ),
    "FAIL_TO_PASS": '["tests/test_a.py::test_f"]', "PASS_TO_PASS": [],
}  # fmt: skip


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "pkg"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg/a.py").write_text("def f(x):\n    return x\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "start"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_a_record_becomes_a_task(tmp_path, repository):
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW | {"instance_id": "b"}) + "\n")
    first, second = read(file)
    assert (first.instance_id, second.instance_id) == ("owner__pkg-1", "b")
    made = candidate(first, repository, ["pytest==1 --hash=sha256:00"])
    task, solution = (solved := made.solved(first.fail_to_pass, first.pass_to_pass)).task, None
    solution = solved.solution
    assert task.files == {"pkg/a.py": "def f(x):\n    return x\n"}
    assert solution == {"pkg/a.py": "def f(x):\n    return x + 1\n"}
    assert list(task.hidden_tests) == ["tests/test_a.py"] and task.editable == ("pkg/*",)
    file.write_text(json.dumps([ROW, ROW]))
    assert list(read(file)) == [first, first]


def test_only_all_tests_resolve_a_record():
    item = record(ROW | {"PASS_TO_PASS": ["b"]})
    name = item.fail_to_pass[0]
    assert unresolved(item, {name: "PASSED", "b": "PASSED", "c": "FAILED"}) == {}
    assert unresolved(item, {name: "PASSED"}) == {"b": "missing"}
    assert unresolved(item, {name: "SKIPPED", "b": "PASSED"}) == {name: "SKIPPED"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"patch": None}, "patch: it is missing"),
        ({"FAIL_TO_PASS": "["}, "FAIL_TO_PASS: not JSON"),
        ({"FAIL_TO_PASS": "{}"}, "FAIL_TO_PASS: legal is a list"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS: owner__pkg-1 has none"),
        ({"PASS_TO_PASS": ROW["FAIL_TO_PASS"]}, "is in FAIL_TO_PASS too"),
    ],
)
def test_what_is_no_record(change, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        record(ROW | change)
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | change) + "\n")
    with pytest.raises(ConfigError, match=r"set\.jsonl:2: "):
        list(read(file))


def test_patches_that_do_not_fit_or_lead_away_are_refused():
    with pytest.raises(ConfigError, match="set: patch: "):
        apply({"pkg/a.py": "other\n"}, ROW["patch"], "set: patch")
    away = ROW["test_patch"].replace("tests/test_a.py", "../outside.py")
    with pytest.raises(ConfigError, match="test: "):
        apply({"a.py": ""}, away, "test")
