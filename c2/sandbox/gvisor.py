"""A backend with a kernel of its own for every sandbox: gVisor, which can save running sandboxes.

What an escape would have to break first is gVisor, not the kernel of the machine. That costs memory
and time: tenths of a second for a start, and system calls several times as slow.

A checkpoint holds all processes with their memory, and all files. What `restore` makes of it goes
on from there, as often as wanted, and so does the sandbox itself. In every copy

- the kernel's random numbers are new: /dev/urandom, getrandom, and with them `uuid.uuid4`,
  `secrets`, `random.SystemRandom`, and whatever a program seeds from there when it starts;
- the wall clock is right, and the monotonic clock goes on as if nothing had happened;
- all processes get SIGURG, which does nothing to those that have no handler for it. What a running
  program has seeded before, it has to seed again: `random`, numpy, and the generator of OpenSSL
  would repeat themselves in all copies. In Python, `sys.path.append("/run/c2")` and
  `from toolserver.reseed import reseed_when_copied; reseed_when_copied()` see to these three;
- whatever a program has made of random numbers before, such as keys, names and ports, is in all
  copies. Take checkpoints before there are secrets;
- commands that somebody waited for are background jobs, under the same numbers.

What gVisor cannot save is refused, and the sandbox goes on: above all files that are open and have
been deleted.

When the memory of a sandbox is used up, all of it is ended, because gVisor's kernel is one of the
processes that the limit holds for. `kill -9 1` inside ends it, too.
"""

import dataclasses
from collections.abc import Callable

from c2.sandbox import battery
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.protocol import Handle, Resources, SandboxError, SandboxLost, Spec

NODE = ("-m", "c2.sandbox.gvisor_node")


class GVisor(Bwrap):
    """As `Bwrap`, with gVisor (the program `runsc`, for which this process must be root)."""

    name = "gvisor"
    capabilities = Bwrap.capabilities | {"memory_snapshot"}
    tested = dataclasses.replace(
        battery.SPEC, resources=Resources(memory_mb=384, disk_mb=16, pids=32)
    )
    # Its kernel shows the tool server's variables, of which there are none, and memory layout.
    terms = battery.Terms(hidden=("mem", "fd/0", "root/etc"), memory_ends_all=True)

    def __init__(self, ended: Callable[[str | None, str], None] = lambda *_: None) -> None:
        self._checkpoints: dict[str, Spec] = {}
        super().__init__(ended)

    def checkpoint(self, handle: Handle) -> str:
        """As `protocol.SupportsMemorySnapshot.checkpoint`; takes about a second."""
        sandbox = self._sandbox(handle)
        try:
            with sandbox.client.held():
                answer, _ = self._node.ask("checkpoint", sandbox=handle.id)
        except SandboxLost as error:
            raise self._lost(handle, error) from error
        layers = (*sandbox.spec.layers, answer["layer"])
        name = answer["checkpoint"]
        self._checkpoints[name] = dataclasses.replace(sandbox.spec, layers=layers)
        return name

    def restore(self, checkpoint: str) -> Handle:
        """As `protocol.SupportsMemorySnapshot.restore`."""
        return self._make("restore", self._saved(checkpoint), checkpoint=checkpoint)

    def drop_checkpoint(self, checkpoint: str) -> None:
        """As `protocol.SupportsMemorySnapshot.drop_checkpoint`."""
        spec = self._saved(checkpoint)
        del self._checkpoints[checkpoint]
        self._node.ask("drop_checkpoint", checkpoint=checkpoint)
        self.drop_layer(spec.layers[-1])

    def _saved(self, checkpoint: str) -> Spec:
        if checkpoint not in self._checkpoints:
            raise SandboxError(f"there is no checkpoint {checkpoint!r}")
        return self._checkpoints[checkpoint]

    def _program(self) -> tuple[str, ...]:
        return (*NODE, self.name)
