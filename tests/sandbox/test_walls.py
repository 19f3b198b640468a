"""The battery must find every wall that is taken away, and then nothing may run."""

import pytest

from c2.sandbox import battery
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.plain import Plain
from c2.sandbox.protocol import ExecResult, SandboxError
from c2.sandbox.zygote import Zygote

# A node with a function of which the result is changed.
NODE = """
from c2.sandbox import linux, node, {module}
original = {module}.{name}
def changed(*args):
    result = original(*args)
    {change}
    return result
{module}.{name} = changed
node.main()
"""


def refusal(monkeypatch, function: str, change: str, backend: type[Bwrap] = Bwrap) -> str:
    module, _, name = function.partition(".")
    code = NODE.format(module=module, name=name, change=change)
    monkeypatch.setattr("c2.sandbox.bwrap.NODE", ("-c", code))
    with pytest.raises(SandboxError) as refused:
        backend()
    return str(refused.value)


def without(option: str) -> str:
    return f"del result[(i := result.index({option!r})) : i + 2]"


@pytest.mark.parametrize(
    "wall, change",
    [
        ("network", "result.remove('--unshare-net')"),
        ("user", f"{without('--cap-drop')}; result += ['--cap-add', 'ALL']"),
        ("seccomp", without("--seccomp")),
        ("processes", "result.remove('--unshare-pid'); result.remove('--as-pid-1')"),
        ("files", "result += ['--bind', '/tmp', '/tmp']"),
        ("devices", "result += ['--dev-bind', '/dev', '/dev']"),
    ],
)
def test_missing_option_is_found(monkeypatch, bwrap, wall, change):
    message = refusal(monkeypatch, "command.arguments", change)
    assert "refuses to run, walls are missing" in message and f"{wall}: " in message


PROC = 'proc = new + "/proc"'


def in_server(module: str, old: str, new: str) -> str:
    """Changes the copy of a module of the tool server that this node gives to sandboxes."""
    return f"""
    file = args[0] / "server/toolserver/{module}.py"
    text = file.read_text()
    assert {old!r} in text
    file.write_text(text.replace({old!r}, {new!r}))
    for compiled in file.parent.glob("__pycache__/{module}.*"): compiled.unlink()
    """


@pytest.mark.parametrize(
    "wall, old, new",
    [
        ("user", "while not libc.prctl(PR_CAPBSET_DROP, ", "while not libc.prctl(23, "),  # READ
        ("seccomp", "prctl(PR_SET_SECCOMP, ", "print("),
        ("files", PROC, '_mount("/tmp", new + "/tmp", None, MS_BIND | MS_REC)\n    ' + PROC),
        ("devices", PROC, '_mount("/dev", new + "/dev", None, MS_BIND | MS_REC)\n    ' + PROC),
        ("memory", 'os.write(fd, b"0")', "pass"),
        ("fork_bomb", 'os.write(fd, b"0")', "pass"),
    ],
)
def test_missing_step_is_found(monkeypatch, bwrap, wall, old, new):
    message = refusal(monkeypatch, "root.make", in_server("walls", old, new), Zygote)
    assert "refuses to run, walls are missing" in message and f"{wall}: " in message


@pytest.mark.parametrize("namespace", ["0x40000000", "0x20000000"])  # network, processes
def test_nothing_starts_without_a_namespace(monkeypatch, bwrap, namespace):
    change = in_server("zygote", f" | {namespace}", "")
    assert "Operation not permitted" in refusal(monkeypatch, "root.make", change, Zygote)


@pytest.mark.parametrize("wall, limit", [("fork_bomb", "pids"), ("memory", "memory")])
def test_missing_limit_is_found(monkeypatch, bwrap, wall, limit):
    change = f"object.__setattr__(result, {limit!r}, getattr(result, {limit!r}) * 100)"
    assert f"{wall}: " in refusal(monkeypatch, "cgroups.Limits", change)


def test_missing_controllers_are_found(monkeypatch, bwrap):
    message = refusal(monkeypatch, "cgroups.find", "result.v1.clear()")
    assert "cannot run here: no control group for " in message


def test_missing_disk_limit_is_found(monkeypatch, bwrap):
    change = "linux.mount('c2', args[0]._folder, None, 32, 'size=1g')"  # 32: remount
    assert "disk: " in refusal(monkeypatch, "box.Box.begin", change)


def test_garbage_from_the_probes_counts_as_a_hole(bwrap, monkeypatch):
    for output in (b"", b"[]", b"null", b"{}", b'{"user": "root"}'):
        result = ExecResult(0, None, output, b"", False, None, False, None, 0.1, 1, False)
        monkeypatch.setattr(bwrap, "exec", lambda *_, result=result, **__: result)
        assert battery.holes(bwrap)


def test_plain_backend_says_loudly_what_it_is():
    with pytest.warns(UserWarning, match="NO walls"), Plain() as plain:
        assert plain.capabilities == {"jobs"}
