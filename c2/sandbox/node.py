"""The process that owns sandboxes: it starts them, ends them, and takes them along when it ends.

It lives in mounts of its own, so that the machine sees none of them, and what it starts dies with
it. It serves one owner over a socket and ends when that is closed; the
owner's death closes it. Requests and answers are JSON, one in a packet; the answer to `create`
carries the socket of the new sandbox's tool server.

What survives SIGKILL of this process are empty folders: its control groups and its place in the
folder for temporary files. Their names say which process they belonged to, and `sweep` removes
those of processes that are gone.
"""

import contextlib
import functools
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from c2.sandbox import cgroups, command, linux, seccomp
from c2.sandbox import root as roots
from c2.sandbox.box import Box
from c2.sandbox.egress.keeper import Keeper
from c2.sandbox.layers import CopyError
from c2.sandbox.protocol import SandboxError
from c2.sandbox.store import Store
from c2.sandbox.walls import Bubblewrap, Walls, Zygote

PREFIX = "c2-sandbox-"
MAX_PACKET = 1 << 17
HOST_ID = 61000  # user and group of sandboxes on a machine where this process is root
FINISHED = 10_000  # sandboxes whose end is remembered
TICK_S = 1.0
REST_S = 0.05  # without anything to do, after which there is time to clear up
END_S = 10.0


def main(kind: "type[Node] | None" = None) -> None:
    """Serves the socket whose descriptor is the first argument, with the walls of the second."""
    os.umask(0o022)
    owner = socket.socket(fileno=int(sys.argv[1]))
    name = f"{PREFIX}{linux.start_time(os.getpid())}-{os.getpid()}"
    sweep()
    try:
        node = (kind or Node)(owner, name, sys.argv[2])
    except (OSError, ImportError, SandboxError) as error:
        owner.send(json.dumps({"error": str(error)}).encode())
        remove_traces(name)
        return
    try:
        with contextlib.suppress(BrokenPipeError):  # the owner is gone, as `serve` will see
            owner.send(json.dumps({"name": name}).encode())
        node.serve()
    finally:
        node.end()


def sweep() -> None:
    """Removes what nodes left behind that were killed."""
    places = [Path(tempfile.gettempdir()), *cgroups.find().folders()]
    for name in {path.name for place in places for path in place.glob(PREFIX + "*")}:
        start, _, pid = name.removeprefix(PREFIX).partition("-")
        if start.isdigit() and pid.isdigit() and linux.start_time(int(pid)) != int(start):
            remove_traces(name)


def remove_traces(name: str) -> None:
    """Removes the control groups and the folder of a node whose sandboxes have ended, or will."""
    patience = time.monotonic() + END_S
    groups = [folder / name for folder in cgroups.find().folders()]
    for group in groups:
        cgroups.thaw(group)  # it may have been killed while it copied files
    for group in groups:
        while not cgroups.remove(group) and time.monotonic() < patience:
            time.sleep(0.01)
    shutil.rmtree(Path(tempfile.gettempdir(), name), ignore_errors=True)


class Node:
    """The state of the process."""

    ids = (HOST_ID, HOST_ID)
    # Calls that answer when they are done.
    later = frozenset({"create", "close", "set_network_policy"})

    def __init__(self, owner: socket.socket, name: str, walls: str) -> None:
        self._owner, self._parent = owner, os.getppid()
        self._ids = self.ids if os.getuid() == 0 else None
        if self._ids:
            os.setgroups([])
        trees = cgroups.find()
        if missing := trees.missing():
            raise SandboxError(f"no control group for {', '.join(missing)} can be made here")
        # Of 1 byte: no core files, not even where a program of the machine receives them.
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
        self._place = Path(tempfile.gettempdir(), name)
        self._place.mkdir()
        self._trees = trees.below(name)
        linux.private_mounts()
        linux.mount("c2", self._place, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
        (self._place / "boxes").mkdir()
        self._root = roots.make(self._place, self._ids)
        self._walls = self._walls_of(walls)
        self._store = Store(self._place / "layers", self._ids, roots.mount_points(self._root))
        self._gate: Keeper | None = None
        self._egress: dict | None = None  # the config of gates
        self._boxes: dict[str, Box] = {}
        self._starting: dict[str, int] = {}  # sandbox -> the request that waits for it
        self._closing: dict[str, list[int]] = {}
        self._ended: dict[str, tuple[str, str]] = {}  # why, and what it wrote last
        self._groups: list[Box] = []  # gone, but for their control groups
        self._count = 0
        self._events = selectors.DefaultSelector()
        self._events.register(owner, selectors.EVENT_READ, self._receive)
        if self._walls.news is not None:
            self._events.register(self._walls.news, selectors.EVENT_READ, self._walls.hear)
        self._open = True
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the owner decides

    def serve(self) -> None:
        """Answers requests until the owner is gone."""
        while self._open and os.getppid() == self._parent:
            now = time.monotonic()
            due = min((box.expiry()[0] for box in self._boxes.values()), default=now + TICK_S)
            self._step(max(0.0, min(TICK_S, due - now)))
            for box in self._boxes.values():
                when, why = box.expiry()
                if when <= time.monotonic():
                    box.kill(why)

    def end(self) -> None:
        """Ends all sandboxes and removes all traces."""
        self._events.unregister(self._owner)
        if self._walls.news is not None:
            self._events.unregister(self._walls.news)
        for box in self._boxes.values():
            box.kill("closed")
        patience = time.monotonic() + END_S
        while (self._boxes or self._groups) and time.monotonic() < patience:
            self._step(0.01)
        self._walls.close()
        if self._gate is not None:
            self._gate.end()
        linux.unmount(self._place)
        remove_traces(self._place.name)

    def _walls_of(self, name: str) -> Walls:
        rules = self._place / "rules"
        rules.write_bytes(seccomp.program())
        if name == "bwrap":
            bwrap = command.within_reach(command.find_bwrap(), self._place)
            return Bubblewrap(bwrap, rules, self._ids)
        return Zygote(self._root, self._place, rules, self._ids)

    def _calls(self) -> dict[str, Callable[..., dict | None]]:
        return {
            "create": self._create, "close": self._close, "renew": self._renew,
            "status": self._status, "snapshot": self._snapshot, "add_layer": self._store.add,
            "drop_layer": self._store.drop, "layer_folder": self._store.folder,
            "adopt": self._adopt, "egress": self._start_gate,
            "set_network_policy": self._set_network_policy,
        }  # fmt: skip

    def _stop(self, *_: object) -> None:
        self._open = False

    def _step(self, wait_s: float) -> None:
        wait_s = min(wait_s, 0.01 if self._groups else REST_S if self._store.unused else wait_s)
        events = self._events.select(wait_s)
        for key, _ in events:
            key.data()
        if not events and self._store.unused:
            self._store.clear()
        self._groups = [box for box in self._groups if not box.free()]

    def _receive(self) -> None:
        try:
            packet = self._owner.recv(MAX_PACKET)
        except OSError:
            packet = b""
        if not packet:
            self._open = False
            return
        request = json.loads(packet)
        number, method = request["id"], request["method"]
        if method in self.later:
            request["params"]["number"] = number
        try:
            result = self._calls()[method](**request["params"])
        except (SandboxError, CopyError, OSError) as error:
            self._reply(number, error=f"{method}: {error}")
        else:
            if result is not None:
                self._reply(number, **result)

    def _reply(self, number: int, fds: tuple[int, ...] = (), **fields: object) -> None:
        self._say({"id": number, **fields}, fds)

    def _say(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(self._owner, [json.dumps(message).encode()], fds)
        except OSError:
            self._open = False

    def _create(
        self,
        number: int,
        image: str | None,
        layers: list[str],
        resources: dict,
        deadline_s: float,
        ttl_s: float,
        walls: Walls | None = None,
        network: dict[str, dict] | None = None,
    ) -> None:
        self._count += 1
        name = str(self._count)
        folders = self._store.use(name, layers if image is None else [image, *layers])
        root = self._root if image is None else roots.of_image(self._root, folders.pop(0))
        box = Box(name, f"{self._place}/boxes/{name}", deadline_s, ttl_s)
        box.network = network or {}
        try:
            files = self._gate_files() if network else {}
            box.begin(walls or self._walls, root, folders, self._trees, resources, self._ids, files)
        except BaseException:
            box.kill("backend")
            box.free()
            self._store.release(name)
            raise
        self._boxes[name], self._starting[name] = box, number
        for fd, call in ((box.start.info, self._up), (box.start.ended, self._gone)):
            self._events.register(fd, selectors.EVENT_READ, functools.partial(call, box))

    def _up(self, box: Box) -> None:
        self._events.unregister(box.start.info)
        try:
            box.start.release()
        except SandboxError:
            box.kill("backend")  # `_gone` answers
            return
        number = self._starting.pop(box.name)
        try:
            if box.network:
                self._gate.open(box.name, box.start.process, **box.network)
        except SandboxError as error:
            self._reply(number, error=f"create: {error}")
            box.kill("closed")
            return
        self._reply(number, (box.client.fileno(),), sandbox=box.name)
        box.client.close()

    def _gone(self, box: Box) -> None:
        for fd in (box.start.info, box.start.ended):
            with contextlib.suppress(KeyError):  # it was up, or was not any more
                self._events.unregister(fd)
        del self._boxes[box.name]
        self._ended[box.name] = (box.reason or "exited", box.last_words())
        if len(self._ended) > FINISHED:
            del self._ended[next(iter(self._ended))]
        if number := self._starting.pop(box.name, None):
            words = box.last_words() or "it gave no reason"
            self._reply(number, error=f"the sandbox did not come up: {words}")
        elif box.reason != "closed":
            self._say({"ended": box.name, "reason": box.reason or "exited"})
        if box.network:
            self._gate.close(box.name)
        if not box.free():
            self._groups.append(box)
        self._store.release(box.name)
        for number in self._closing.pop(box.name, ()):
            self._reply(number)

    def _close(self, number: int, sandbox: str, reason: str = "closed") -> dict | None:
        if box := self._boxes.get(sandbox):
            self._closing.setdefault(sandbox, []).append(number)
            box.kill(reason)
            return None
        return {}

    def _adopt(self, sandbox: str, deadline_s: float, ttl_s: float) -> dict:
        if box := self._boxes.get(sandbox):
            box.limit(deadline_s, ttl_s)
        return {}

    def _renew(self, sandbox: str) -> dict:
        if box := self._boxes.get(sandbox):
            box.renewed = time.monotonic()
        return {}

    def _gate_files(self) -> dict[str, str]:
        """What a sandbox needs to get through the gate; makes a new one in place of one that died.

        Sandboxes that went through that stay without network: they trust its certificates alone.
        """
        if self._gate.lost:
            self._start_gate(self._egress)
            self._say({"warning": "another egress gate has been started, for sandboxes to come"})
        return self._gate.files

    def _start_gate(self, config: dict) -> dict:
        self._egress = config
        self._gate = Keeper(config, self._place.name, self._place, self._ids is not None)
        self._events.register(self._gate.news, selectors.EVENT_READ, self._hear_gate)
        return {}

    def _hear_gate(self) -> None:
        done = self._gate.hear()
        if why := self._gate.lost:
            self._events.unregister(self._gate.news)
            self._say({"warning": f"{why}; sandboxes reach nothing any more"})
        for number in done:
            self._reply(number, **({"error": why} if why else {}))

    def _set_network_policy(self, number: int, sandbox: str, policy: dict) -> None:
        box = self._boxes.get(sandbox)
        if box is None or box.reason is not None:
            raise SandboxError(f"sandbox {sandbox} is gone")
        self._gate.change(sandbox, box.start.process, policy, number)

    def _status(self, sandbox: str) -> dict:
        box = self._boxes.get(sandbox)
        if box and box.reason is None:
            return {"reason": None, **box.usage()}
        reason, words = (
            self._ended.get(sandbox, ("closed", "")) if box is None else (box.reason, "")
        )
        return {"reason": reason, "words": words}

    def _snapshot(self, sandbox: str) -> dict:
        box = self._boxes.get(sandbox)
        if box is None:
            raise SandboxError(f"sandbox {sandbox} is gone")
        with box.frozen():
            return self._store.add(box.upper, "/")


if __name__ == "__main__":
    main()
