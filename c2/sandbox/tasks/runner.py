"""Runs tests against code that may try anything, in processes apart from it.

Shipped as source text into a sandbox and run there with Python 3.9 or newer and nothing but its
standard library. Three kinds of processes:

  tester   reads the request on standard input and writes the verdict on standard output. Executes
           the tests, in which modules of the repository are stand-ins that forward calls.
  nursery  forked before the request is read, so it knows neither tests nor nonce. Forks workers.
  worker   imports the repository, anew for each test, and answers calls; its standard streams are
           /dev/null. Only plain data comes back, as JSON, and the tester compares it. No test fails
           for what others have left there: it is run once more, in a worker of its own.

So the code under test shares no memory with the tests, never sees an expected value, and has no
file descriptor on which a verdict counts. The tester and the nursery are "not dumpable": other
processes of the same user can't trace them or open their files through /proc.

Request: {"nonce", "packages": [..], "tests": {path: text}, "ids": [path::function, ..], "test_s",
"total_s"}. Answer: the line {"nonce", "state": "ready"} before any code of the repository runs,
then {"nonce", "state": "done", "results": {id: "" or why it failed}}.
"""

import builtins
import ctypes
import json
import os
import signal
import socket
import sys
import time

MAX_ANSWER = 1 << 20
MAX_WHY = 200
PR_SET_DUMPABLE = 4


class Remote:
    """Stands for a module, function or other object in the worker."""

    def __init__(self, ask, module, names=()):
        self._ask, self._module, self._names = ask, module, names

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        names = (*self._names, name)
        answer = self._ask({"module": self._module, "names": names})
        plain = "value" in answer
        return decode(answer["value"]) if plain else Remote(self._ask, self._module, names)

    def __call__(self, *args, **kwargs):
        """What the function gives; raises the built-in exception that it raises."""
        call = [encode(args), encode(kwargs)]
        answer = self._ask({"module": self._module, "names": self._names, "call": call})
        if "value" not in answer:
            raise RemoteError("not an answer")
        return decode(answer["value"])


class RemoteError(Exception):
    """An exception of the code under test that is not a built-in one, or an answer like none."""


# Tester ----------------------------------------------------------------------------------------


def main():
    """Serves one request."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        nursery(theirs)
        os._exit(0)
    theirs.close()
    request = json.loads(sys.stdin.buffer.read())
    verdict = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tests print is no verdict
    _say(verdict, request, state="ready")
    results = _run_all(request, ours)
    os.kill(child, signal.SIGKILL)  # the code may have stopped it
    _say(verdict, request, state="done", results=results)


def _say(verdict, request, **answer):
    print(json.dumps({"nonce": request["nonce"], **answer}), file=verdict, flush=True)


def _run_all(request, control):
    """The results of all tests."""
    codes = {path: compile(text, path, "exec") for path, text in request["tests"].items()}
    end = time.monotonic() + request["total_s"]

    def run(worker, name):
        path, _, function = name.partition("::")
        deadline = min(end, time.monotonic() + request["test_s"])
        worker = worker or Worker(control, deadline)
        hook = import_hook(request["packages"], worker.asker(deadline))
        why = run_test(request["tests"][path], codes[path], function, hook)
        if why:
            worker.end()  # it may be busy or broken
        return why, None if why else worker

    results, used = {}, None  # a process costs more than most tests, so they share one
    for name in request["ids"]:
        try:
            why, worker = run(used, name)
            if why and used:
                why, worker = run(None, name)
        except OSError as error:
            why, worker = f"no process for the test: {error}", None
        results[name], used = why, worker
    if used:
        used.end()
    return results


class Worker:
    """A process for the code under test, as the tester sees it; raises OSError if none comes."""

    def __init__(self, control, deadline):
        self._stream, far = socket.socketpair()
        with far:
            control.settimeout(max(deadline - time.monotonic(), 0.001))
            socket.send_fds(control, [b"+"], [far.fileno()])
        self._pid = int.from_bytes(control.recv(4), "big")
        if not self._pid:
            raise OSError("the code ended what makes them")
        self._tests = 0

    def asker(self, deadline):
        """For one more test: a function that sends a question and returns its answer, a dict."""
        self._tests += 1
        return _asker(self._stream, self._tests, deadline)

    def end(self):
        """Ends it and what it has started."""
        self._stream.close()
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except OSError:
            return  # it is gone


def _asker(stream, test, deadline):
    def ask(question):
        question["test"] = test
        line = bytearray()
        try:
            stream.settimeout(max(deadline - time.monotonic(), 0.001))
            stream.sendall(json.dumps(question).encode() + b"\n")
            while not line.endswith(b"\n"):
                stream.settimeout(max(deadline - time.monotonic(), 0.001))
                chunk = stream.recv(1 << 16)
                if not chunk or len(line) > MAX_ANSWER:
                    raise RemoteError("the process of the code ended" if not chunk else "too much")
                line += chunk
        except socket.timeout:  # noqa: UP041 - another class before Python 3.10
            raise RemoteError("out of time") from None
        except OSError as error:
            raise RemoteError("the process of the code ended") from error
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            raise RemoteError("not an answer") from None
        if not isinstance(answer, dict):
            raise RemoteError("not an answer")
        if "error" in answer:
            raise _exception(answer["error"])
        return answer

    return ask


def _exception(error):
    """The built-in exception that the code raised, or a `RemoteError` that tells of it."""
    parts = error if isinstance(error, list) and len(error) == 2 else ["RemoteError", ""]
    kind, text = (str(part)[:MAX_WHY] for part in parts)
    cls = getattr(builtins, kind, None)
    try:
        if issubclass(cls, Exception):
            return cls(text)
    except TypeError:
        pass  # not a class, or one that takes other arguments
    return RemoteError(f"{kind}: {text}")


def import_hook(packages, ask):
    """An `__import__` that gives stand-ins for the modules of `packages`."""

    def hook(name, globals=None, locals=None, fromlist=(), level=0):
        top = name.partition(".")[0]
        if top not in packages:
            return __import__(name, globals, locals, fromlist, level)
        if fromlist:
            return Remote(ask, name)
        ask({"module": name, "names": ()})
        return Remote(ask, top)

    return hook


def run_test(text, code, function, hook):
    """Executes a test file and calls one function of it.

    Args:
      text: the file.
      code: the file compiled.
      function: name of the function.
      hook: takes the place of `__import__` in the file.

    Returns:
      "" if the test passed, else why not, in one line.
    """
    space = {"__builtins__": {**vars(builtins), "__import__": hook}, "__name__": "tests"}
    try:
        exec(code, space)
        space[function]()
    except AssertionError as error:
        return _one_line(_explain(error, text, space)) or "failed"
    except (Exception, SystemExit) as error:
        return _one_line(f"{type(error).__name__}: {error}")
    return ""


def _explain(error, text, space):
    """For `assert CALL == VALUE`: "CALL gives X, want VALUE"; else the message or the line."""
    number, trace = 0, error.__traceback__
    while trace:
        number = trace.tb_lineno if trace.tb_frame.f_globals is space else number
        trace = trace.tb_next
    line = text.splitlines()[number - 1].strip()
    call, equals, want = line[len("assert ") :].partition(" == ")
    try:
        return f"{call} gives {eval(call, space)!r}, want {want}" if equals else str(error) or line
    except Exception:
        return line


def _one_line(text):
    return " ".join(text.split())[:MAX_WHY]


# Nursery and worker ----------------------------------------------------------------------------


def nursery(control):
    """Forks a worker for every descriptor that comes, and answers with its process id."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children need no burial
    while True:
        _, (*fds,), _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(fds[0])
            os._exit(0)
        os.close(fds[0])
        control.sendall(pid.to_bytes(4, "big"))


def work(fd):
    """Answers questions about the repository in the working directory."""
    folder, before, test = os.getcwd(), set(sys.modules), 1
    sys.path.insert(0, folder)
    with open(fd, "rb") as questions:
        for question in map(json.loads, questions):
            if question["test"] != test:
                test = question["test"]
                _forget(folder, before)
            os.write(fd, json.dumps(_answer(question)).encode() + b"\n")


def _forget(folder, before):
    """Lets the next import of any module of the repository be the first one."""
    own = {entry.partition(".")[0] for entry in os.listdir(folder)}
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] in own:
            del sys.modules[name]


def _answer(question):
    try:
        target = _module(question["module"])
        for name in question["names"]:
            target = _attribute(target, name)
        if "call" in question:
            args, kwargs = question["call"]
            return {"value": encode(target(*decode(args), **decode(kwargs)))}
        return {"value": encode(target)} if is_plain(target) else {}
    except BaseException as error:
        return {"error": [type(error).__name__, str(error)]}


def _attribute(target, name):
    """An attribute, or a module of a package that nobody has imported yet."""
    if hasattr(target, name) or not hasattr(target, "__path__"):
        return getattr(target, name)
    return _module(f"{target.__name__}.{name}")


def _module(name):
    __import__(name)
    return sys.modules[name]


def is_plain(value):
    """Whether `encode` takes a value's type."""
    return value is None or type(value) in (bool, int, float, str, list, tuple, set, dict)


def encode(value):
    """Plain data as JSON that keeps types; exact types only, so no subclass with its own `==`."""
    if not is_plain(value):
        raise TypeError(f"a {type(value).__name__} is not plain data")
    if type(value) is dict:
        return ["dict", *([encode(key), encode(item)] for key, item in value.items())]
    if type(value) in (list, tuple, set):
        return [type(value).__name__, *map(encode, value)]
    return value


def decode(value):
    """The inverse of `encode`.

    Raises:
      RemoteError: if `encode` cannot have written it.
    """
    if not isinstance(value, (list, dict)):
        return value
    try:
        kind, *items = value
        if kind == "dict":
            return {decode(key): decode(item) for key, item in items}
        return {"list": list, "tuple": tuple, "set": set}[kind](map(decode, items))
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RemoteError("not plain data") from None


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to take an interpreter apart costs more than all of the above
