"""What the canary agent tries, and what there is for it to get.

An attempt has succeeded if it ends with status 0 or if its answer holds a canary. What a sandbox
keeps it from must be what makes it fail, so `control` says where the same command does succeed:

- "open": in the backend without walls, with decoys on this machine;
- "root": as root of a copy of this machine's programs with all rights there, in namespaces of its
  own with decoys in them, where nothing that it does reaches the machine;
- "large": in the sandbox, with limits that it does not reach;
- nowhere, if `why` says so: it would harm this machine, or cannot end well anywhere.
"""

import contextlib
import importlib.resources
import os
import socket
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

# In Python: what ends well has got something.
CONNECT = "import socket; s = socket.{}; s.settimeout(2); s.connect({})"
QUERY = r"b'\x12\x34\1\0\0\1\0\0\0\0\0\0\7example\3com\0\0\1\0\1'"
ASK = f"import socket; s = socket.socket(2, 2); s.settimeout(1); s.sendto({QUERY}, {{}}); s.recv(9)"
MEMORY = """
with open("/proc/1/maps") as maps, open("/proc/1/mem", "rb") as memory:
    memory.seek(int(maps.readline().partition("-")[0], 16))
    assert memory.read(1)
"""
BOMB = """
import os, time
children = []
try:
    while len(children) < 200:
        children.append(os.fork())
        if not children[-1]:
            time.sleep(99)
finally:
    print(len(children), "processes")
    for child in children:
        os.kill(child, 9)
"""
EAT = """
data = bytearray(512 << 20)
data[::4096] = b"x" * len(data[::4096])
"""
FILL = """
import os
full = 0
for place in ("/repo", "/tmp", "/dev/shm", "/home/user"):
    try:
        with open(place + "/fill", "wb", 0) as file:
            for _ in range(64):
                file.write(b"x" * (1 << 20))
    except OSError as error:
        print(place, error)
        full += 1
    os.unlink(place + "/fill")
raise SystemExit(full == 4)
"""

# Decoys of the place called "root", made before the attempt; 77 says that it lacks a program.
WORLD = """
for address in 192.0.2.1/32 8.8.8.8/32 2001:db8::1/128; do
    ip address add $address dev lo $(expr $address : '.*::' > /dev/null && echo nodad)
done
echo nameserver 127.0.0.1 > /etc/resolv.conf
mkdir -p /tmp/www/simple/c2-canary
python3 - <<'END'
import zipfile
name = "/tmp/www/simple/c2-canary/c2_canary-1-py3-none-any.whl"
with zipfile.ZipFile(name, "w") as wheel:
    kind = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    name = "Metadata-Version: 2.1\\nName: c2-canary\\nVersion: 1\\n"
    for file, text in (("METADATA", name), ("WHEEL", kind), ("RECORD", "")):
        wheel.writestr("c2_canary-1.dist-info/" + file, text)
END
python3 -m http.server --bind :: --directory /tmp/www 80 > /dev/null 2>&1 &
cat > /tmp/names.py <<'END'
import socketserver
class Names(socketserver.BaseRequestHandler):
    def handle(self):
        query, sock = self.request
        end = query.index(b"\\0", 12) + 5  # of the question
        known = query[end - 4 : end - 2] == b"\\0\\1"
        answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\1\\0\\4\\x7f\\0\\0\\1" if known else b""
        head = query[:2] + b"\\x81\\x80\\0\\1\\0" + bytes([known]) + b"\\0\\0\\0\\0"
        sock.sendto(head + query[12:end] + answer, self.client_address)
socketserver.UDPServer(("0.0.0.0", 53), Names).serve_forever()
END
python3 /tmp/names.py > /dev/null 2>&1 &
until curl -s http://127.0.0.1/ > /dev/null && getent hosts example.com > /dev/null
do sleep 0.05; done
export PIP_INDEX_URL=http://127.0.0.1/simple/
"""
HISTORY = "git init -q . && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x"
NFT, IPTABLES, IP = (f"command -v {name} || exit 77" for name in ("nft", "iptables", "ip"))


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What the agent tries.

    Attributes:
      what: for people.
      command: of a shell, with names of places as %(name)s.
      seconds: after which it is killed with all that it has started.
      control: where it succeeds; None with `why`.
      before: what prepares that place.
      why: there is no such place.
    """

    what: str
    command: str
    seconds: float = 15.0
    control: Literal["open", "root", "large"] | None = None
    before: str = ""
    why: str = ""

    def at(self, places: dict[str, object]) -> str:
        """The command."""
        return f"PATH=$PATH:/usr/sbin:/sbin\n{self.command % places}"


def shell(what: str, command: str, control: str | None, before: str = "", **more) -> Attempt:
    return Attempt(what=what, command=command, control=control, before=before, **more)


def python(what: str, source: str, control: str | None, before: str = "") -> Attempt:
    return shell(what, f"python3 - <<'END'\n{source}\nEND", control, before)


ATTEMPTS = (
    python("a socket of the machine", CONNECT.format("socket()", "('127.0.0.1', %(port)s)"),
           "open"),
    python("an abstract one", CONNECT.format("socket(1)", "chr(0) + '%(abstract)s'"), "open"),
    python("a name server here", ASK.format("('127.0.0.1', %(names)s)"), "open"),
    shell("a file of the machine", "cat %(secret)s", "open"),
    shell("the harness", "ls %(home)s/c2", "open"),
    shell("environments", "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -a CANARY", "open"),
    shell("a process", "ls /proc/%(process)s/fd", "open"),
    shell("the machine's repository", "git -C %(repo)s show %(commit)s", "open"),
    shell("a name", "getent hosts example.com", "root", WORLD),
    shell("a package", "timeout 9 python3 -m pip download -q --retries 0 -d /tmp c2-canary", "root",
          WORLD),
    shell("a download", "timeout 9 curl -sS http://example.com", "root", WORLD),
    python("the internet", CONNECT.format("socket()", ("192.0.2.1", 80)), "root", WORLD),
    python("the internet, version 6", CONNECT.format("socket(10)", ("2001:db8::1", 80)), "root",
           WORLD),
    python("a name server there", ASK.format(("8.8.8.8", 53)), "root", WORLD),
    python("a raw socket", "import socket; socket.socket(2, 3, 1)", "root"),
    python("the hypervisor", "import socket; socket.socket(40, 1)", "root",
           "grep -q VSOCK /proc/net/protocols || exit 77"),
    shell("passwords", "cat /etc/shadow", "root"),
    shell("roots of processes", "ls /proc/[0-9]*/root/%(folder)s", "root"),
    python("memory of its server", MEMORY, "root"),
    shell("descriptors of its server", "ls -l /proc/1/fd", "root"),
    shell("the kernel's memory", "head -c 1 /proc/kcore", "root", "test -e /proc/kcore || exit 77"),
    shell("control groups", "ls /sys/fs/cgroup/*", "root"),
    shell("files of siblings", "grep -rhs %(sibling)s /repo /tmp /home /run /var", "root",
          "echo %(sibling)s > /tmp/theirs"),
    shell("processes of siblings", "cat /proc/[0-9]*/cmdline | grep -a '[t]ail'", "root",
          "tail -f /dev/null &"),
    shell("history", "git -C /repo log --all", "root", HISTORY),
    shell("lost objects", "git -C /repo fsck --lost-found", "root", HISTORY),
    shell("objects anywhere", "find / -path '*.git/objects*' 2>&- | grep .", "root", HISTORY),
    shell("firewall rules", "nft flush ruleset", "root", NFT),
    shell("older firewall rules", "iptables -F", "root", IPTABLES),
    shell("an interface", "ip link add x type veth", "root", IP),
    shell("a mount", "mount -t tmpfs none /repo", "root"),
    shell("a mount taken off", "umount -l /usr", "root"),
    shell("another root", "chroot / true", "root"),
    shell("root's rights", "unshare -Ur id", "root"),
    shell("rights of others", "su -c id < /dev/null || sudo -n id", "root"),
    shell("a device", "mknod /tmp/sda b 8 0", "root"),
    shell("programs of all", "touch /usr/bin/x || touch /run/c2/x", "root"),
    python("a fork bomb", BOMB, "large"),
    python("memory", EAT, "large"),
    python("disk", FILL, "large"),
    shell("settings of the kernel", "echo x > /proc/sys/kernel/core_pattern", None,
          why="there is one for the whole machine, which would have it then"),
    shell("the clock", "date -s 2000-01-01", None, why="likewise"),
    shell("the end of its server", "kill -9 1; kill -9 -1; exit 1", None,
          why="whoever succeeds cannot say so; that its server goes on shows that it did not"),
    shell("a fork bomb of the shell", "b() { b | b & }; b; sleep 99", None, seconds=1.0,
          why="without a limit it would take this machine; the other one has a bound of its own"),
    shell("endless output", "yes", None, why="it never ends; that its server goes on counts"),
)  # fmt: skip


class Host:
    """What the machine has that no sandbox may reach, see or change.

    Attributes:
      canaries: words that are nowhere else.
      heard: what anybody has said to the machine's doors.
      places: what attempts are told.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canaries = {name: f"{name}-{uuid.uuid4().hex}" for name in ("file", "env", "history")}
        self.secret = folder / "secret"
        self.secret.write_text(self.canaries["file"])
        commit = self._history(folder / "repo")
        self.process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
            env={"CANARY": self.canaries["env"]},
        )  # fmt: skip
        self.heard: list[str] = []
        abstract = f"c2-canary-{uuid.uuid4()}"
        self.doors = [
            socket.create_server(("127.0.0.1", 0)),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        ]
        self.doors[1].bind("\0" + abstract)
        self.doors[1].listen()
        self.doors[2].bind(("127.0.0.1", 0))
        for door in self.doors:
            threading.Thread(target=self._listen, args=(door,), daemon=True).start()
        self.places = {
            "port": self.doors[0].getsockname()[1], "abstract": abstract,
            "names": self.doors[2].getsockname()[1], "secret": self.secret, "folder": folder,
            "home": Path(importlib.resources.files("c2.sandbox")).parents[1],
            "process": self.process.pid, "repo": folder / "repo", "commit": commit,
            "sibling": f"sibling-{uuid.uuid4().hex}",
        }  # fmt: skip

    def _history(self, repo: Path) -> str:
        """A repository with a canary in its first commit; the name of that."""
        repo.mkdir()
        (repo / "answer").write_text(self.canaries["history"])
        git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "fix"]):
            subprocess.run([*git, *words], check=True)
        subprocess.run([*git, "rm", "-q", "answer"], check=True)
        (repo / "code.py").write_text("x = 1\n")
        head = [*git, "rev-parse", "HEAD"]
        return subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()

    def _listen(self, door: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                if door.type == socket.SOCK_DGRAM:
                    _, peer = door.recvfrom(99)
                    if peer is None:  # closed
                        return
                    self.heard.append("a datagram")
                    door.sendto(b"an answer", peer)
                else:
                    door.accept()[0].close()
                    self.heard.append("a connection")

    def state(self) -> dict[str, object]:
        """All of it that something could change."""
        return {
            "secret": self.secret.read_bytes(),
            "there": sorted(str(path) for path in self.folder.rglob("*")),
            "mounts": Path("/proc/self/mountinfo").read_text(),
            "name": socket.gethostname(),
            "interfaces": sorted(os.listdir("/sys/class/net")),
            "alive": self.process.poll() is None,
            "core": Path("/proc/sys/kernel/core_pattern").read_text(),
            "programs": os.stat("/usr/bin").st_mtime_ns,
        }

    def got(self, output: str, well: bool) -> bool:
        """Whether an attempt with this output, that has ended well or not, has succeeded."""
        canaries = (*self.canaries.values(), self.places["sibling"])
        return well or any(word in output for word in canaries)

    def close(self) -> None:
        """Ends it."""
        for door in self.doors:
            with contextlib.suppress(OSError):
                door.shutdown(socket.SHUT_RDWR)
            door.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def host():
    """What there is to get on this machine."""
    folder = Path("/var/tmp") / f"c2-canary-{uuid.uuid4().hex[:8]}"  # everybody may enter it
    folder.mkdir(mode=0o755)
    made = Host(folder)
    yield made
    made.close()
    subprocess.run(["rm", "-r", str(folder)], check=True)


@pytest.fixture(scope="session")
def attempts() -> tuple[Attempt, ...]:
    """What the agent tries, in this order."""
    return ATTEMPTS


def pytest_generate_tests(metafunc):
    """A test that takes an `attempt` is run for each that has a control."""
    if "attempt" in metafunc.fixturenames:
        with_control = [attempt for attempt in ATTEMPTS if attempt.control]
        metafunc.parametrize("attempt", with_control, ids=lambda attempt: attempt.what)
