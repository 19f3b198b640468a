"""Layers, snapshots and forks: cheap copies that share nothing that can change."""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from c2.sandbox import battery
from c2.sandbox.bwrap import Bwrap
from c2.sandbox.protocol import Resources, SandboxError, Spec
from c2.sandbox.zygote import Zygote

pytestmark = pytest.mark.parametrize("bwrap", [Bwrap, Zygote], indirect=True)


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repo")
    for name in ("keep", "change", "delete", "d/one", "d/two", "replaced/old"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / "run.sh").write_text("echo ran")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("keep")
    (folder / "out").symlink_to("/etc/shadow")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture
def made(bwrap):
    """Handles to close after the test."""
    handles = []
    yield handles
    for handle in handles:
        bwrap.close(handle)


def shell(backend, handle, script):
    result = backend.exec(handle, ["sh", "-c", script])
    assert result.ok, result
    return result.stdout.decode()


TREE = """
import json, os
found = {}
for folder, folders, files in os.walk("/repo"):
    for name in folders + files:
        path = os.path.join(folder, name)
        shown = os.path.relpath(path, "/repo")
        if os.path.islink(path):
            found[shown] = "-> " + os.readlink(path)
        else:
            found[shown] = "/" if os.path.isdir(path) else open(path).read()
print(json.dumps(found))
"""


def tree(backend, handle) -> dict[str, str]:
    """Everything below /repo: contents of files, targets of links."""
    return json.loads(backend.exec(handle, ["python3", "-c", TREE]).stdout)


def test_layer_shows_a_folder(bwrap, repo, made):
    layer, deep = bwrap.add_layer(str(repo)), bwrap.add_layer(str(repo), at="/repo/a/b")
    made.append(bwrap.create(Spec(layers=(deep,))))
    assert shell(bwrap, made[0], "touch new a/new a/b/new; cat a/b/keep") == "keep"
    bwrap.close(made.pop())
    made.append(bwrap.create(Spec(layers=(layer,))))
    bwrap.drop_layer(layer)  # stays as long as it is used
    expected = {}
    for path in repo.rglob("*"):
        name = str(path.relative_to(repo))
        if path.is_symlink():
            expected[name] = f"-> {path.readlink()}"
        elif not path.is_fifo():  # pipes are left out
            expected[name] = "/" if path.is_dir() else path.read_text()
    assert tree(bwrap, made[0]) == expected
    assert shell(bwrap, made[0], "./run.sh") == "ran\n"
    # A layer is a copy: neither side sees the other's changes.
    shell(bwrap, made[0], "echo changed > keep; rm -r d")
    assert (repo / "keep").read_text() == "keep" and (repo / "d/one").exists()
    with pytest.raises(SandboxError, match="there is no"):
        bwrap.create(Spec(layers=(layer[:-1] + "99",)))


def test_forks_start_equal_and_go_their_own_way(bwrap, repo, made):
    layer = bwrap.add_layer(str(repo))
    parent = bwrap.create(Spec(layers=(layer,), env={"A": "b"}))
    made.append(parent)
    shell(
        bwrap, parent,
        "echo new > change; rm delete; rm -r replaced; mkdir replaced; echo x > replaced/new;"
        "mv d/one d/three; ln -s nowhere dangling; echo t > /tmp/t; echo h > ~/h; chmod 600 keep",
    )  # fmt: skip
    before = tree(bwrap, parent)
    assert "delete" not in before and "replaced/old" not in before
    forks = bwrap.fork(parent, 3)
    made += forks
    for fork in forks:
        assert tree(bwrap, fork) == before
        assert shell(bwrap, fork, "cat /tmp/t ~/h; stat -c %a keep; echo $A") == "t\nh\n600\nb\n"
    # Changes of every kind, on both sides; none crosses over.
    for handle, name in zip((parent, *forks), "0123", strict=True):
        shell(
            bwrap, handle,
            f"echo {name} > mine; echo {name} >> change; rm d/two; mkdir d/{name};"
            f"echo {name} > /tmp/t; rm -r replaced",
        )  # fmt: skip
    for handle, name in zip((parent, *forks), "0123", strict=True):
        after = tree(bwrap, handle)
        assert after["mine"] == f"{name}\n" and after["keep"] == "keep"
        assert (
            shell(bwrap, handle, "cat change /tmp/t; ls d")
            == f"new\n{name}\n{name}\n{name}\nthree\n"
        )
    # Forks of forks outlive their parents.
    grandchild = bwrap.fork(forks[0])[0]
    made.append(grandchild)
    for handle in (parent, *forks):
        bwrap.close(handle)
    bwrap.drop_layer(layer)
    assert shell(bwrap, grandchild, "cat mine; ls d") == "1\n1\nthree\n"
    second = bwrap.fork(grandchild)[0]
    made.append(second)
    assert shell(bwrap, second, "cat mine keep") == "1\nkeep"


def test_fork_of_a_busy_sandbox_is_of_one_moment(bwrap, made):
    made.append(bwrap.create(Spec()))
    # Writes the same number into one file after another, then the next number.
    count = (
        "import os\n"
        "fds = [os.open('f%02d' % i, os.O_CREAT | os.O_WRONLY) for i in range(40)]\n"
        "for number in range(10**7):\n"
        "    for fd in fds: os.pwrite(fd, b'%08d\\n' % number, 0)\n"
    )
    bwrap.start(made[0], ["python3", "-c", count])
    while bwrap.stat(made[0], "/repo/f39").size == 0:
        pass
    for _ in range(3):
        fork = bwrap.fork(made[0])[0]
        numbers = [int(line) for line in shell(bwrap, fork, "cat f*").split()]
        assert len(numbers) == 40 and sorted(numbers, reverse=True) == numbers
        assert numbers[0] - numbers[-1] <= 1
        assert bwrap.jobs(fork) == []  # processes are not part of it
        bwrap.close(fork)
    assert len(bwrap.jobs(made[0])) == 1


def test_hostile_trees(bwrap, made):
    made.append(bwrap.create(Spec(resources=Resources(disk_mb=16))))
    box = made[0]
    shell(bwrap, box, "truncate -s 1T sparse; mkfifo p; ln -s / root; ln -s p q; ln sparse hard")
    bwrap.exec(box, ["python3", "-c", "import socket; socket.socket(1).bind('/repo/s')"])
    fork = bwrap.fork(box)[0]
    made.append(fork)
    assert shell(bwrap, fork, "stat -c %s sparse; ls") == f"{1 << 40}\nhard\nq\nroot\nsparse\n"
    deep = "import os\nfor _ in range(200): os.mkdir('d'); os.chdir('d')"
    assert bwrap.exec(box, ["python3", "-c", deep]).ok
    with pytest.raises(SandboxError, match="more than 100 deep"):
        bwrap.fork(box)
    assert shell(bwrap, box, "echo alive") == "alive\n"  # and not frozen


@pytest.mark.parametrize(
    "path, script",
    [
        ("/home", "rm -r /home; ln -s /oldroot{target} /home"),
        ("/home/user", "rm -r /home/user; ln -s /oldroot{target}/x /home/user"),
        ("/repo", "rmdir /repo; ln -s /oldroot{target}/y /repo"),
        ("/tmp", "rmdir /tmp; echo > /tmp"),
    ],
)
def test_mount_points_cannot_be_led_astray(bwrap, made, path, script):
    """Bubblewrap follows links on the way to a mount point, while it still sees the machine."""
    with tempfile.TemporaryDirectory() as target:
        Path(target).chmod(0o777)  # so that only the refusal stands in the way
        made.append(bwrap.create(Spec()))
        assert bwrap.exec(made[0], ["sh", "-c", script.format(target=target)], cwd="/").ok
        with pytest.raises(SandboxError, match=f": {path} is not a folder"):
            made.extend(bwrap.fork(made[0]))
        assert os.listdir(target) == []


def test_layers_with_links_for_mount_points_are_refused(bwrap, tmp_path):
    (tmp_path / "user").symlink_to("/")
    with pytest.raises(SandboxError, match="/home/user is not a folder"):
        bwrap.add_layer(str(tmp_path), at="/home")


def test_deleted_mount_points_come_back(bwrap, made):
    made.append(bwrap.create(Spec()))
    assert bwrap.exec(made[0], ["rm", "-r", "/home", "/repo", "/tmp"], cwd="/").ok
    made.extend(bwrap.fork(made[0]))
    assert (
        shell(bwrap, made[1], "cd; pwd; touch /repo/a /tmp/b; stat -c %a /tmp")
        == "/home/user\n1777\n"
    )


def test_bad_layers(bwrap, tmp_path):
    with pytest.raises(SandboxError, match="No such file"):
        bwrap.add_layer(str(tmp_path / "none"))
    for at in ("work", "/a/../b"):
        with pytest.raises(SandboxError, match="at: "):
            bwrap.add_layer(str(tmp_path), at=at)
    with pytest.raises(SandboxError, match="at most 32"):
        bwrap.create(Spec(layers=("x",) * 33))


def test_image(bwrap, made, tmp_path):
    """A root of its own: a Python and a shell with the libraries that they need, nothing else."""
    python, shell_path = Path("/usr/bin/python3").resolve(), Path("/bin/sh").resolve()
    library = Path(f"/usr/lib/{python.name}")
    if not library.is_dir():
        pytest.skip("there is no /usr/bin/python3 with its library in /usr/lib")
    image = tmp_path / "image"
    (image / "bin").mkdir(parents=True)
    (image / "usr/bin").mkdir(parents=True)
    shutil.copy(python, image / "usr/bin/python3")
    shutil.copy(shell_path, image / "bin/sh")
    programs = [python, shell_path, *library.glob("lib-dynload/_ctypes.*")]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    for path in {word for word in listed.replace(":", "").split() if word.startswith("/")}:
        (image / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, image / path[1:])
    unneeded = ("test", "*-packages", "config-*", "idlelib", "ensurepip", "*.a")
    ignored = shutil.ignore_patterns(*unneeded)
    copied = image / library.relative_to("/")
    shutil.copytree(library, copied, symlinks=True, ignore=ignored, dirs_exist_ok=True)
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/file").write_text("content")
    root, repo = bwrap.add_layer(str(image), at="/"), bwrap.add_layer(str(tmp_path / "repo"))
    spec = Spec(image=root, layers=(repo,))
    made.append(bwrap.create(spec))
    result = bwrap.exec(
        made[0], ["sh", "-c", "read x < file; echo $x > out; echo $x $PATH; echo *"]
    )
    assert result.stdout == b"content /usr/local/bin:/usr/bin:/bin\nfile out\n", result
    assert bwrap.stat(made[0], "/usr/bin/env").kind is None
    # Its own interpreter, whoever started the tool server.
    facts = "import sys; print(sys.executable, sys.version_info[:3], sys.prefix)"
    argv = ["python3", "-I", "-S", "-B", "-c", facts]
    prepared = bwrap.finish(made[0], bwrap.prepare(made[0], argv), b"")
    new = bwrap.exec(made[0], argv)
    assert prepared.ok and prepared.stdout == new.stdout
    assert new.stdout.startswith(b"/usr/bin/python3 (")
    # Its own programs can be changed, in this sandbox and its forks.
    bwrap.write(made[0], "/bin/sh", b"broken")
    made.append(bwrap.create(spec))
    assert bwrap.stat(made[1], "/bin/sh").size == shell_path.stat().st_size
    # No other wall is lower than on the root of this machine, whose /usr is read-only.
    assert battery.holes(bwrap, spec) == {"files": "/usr/c2-probe can be made"}
    with pytest.raises(SandboxError, match="there is no 'nothing'"):
        bwrap.create(Spec(image="nothing"))
