"""The three shapes of control groups, on text and folders like those of real machines."""

from pathlib import Path

import pytest

from c2.sandbox.cgroups import Limits, create, find, remove

LIMITS = Limits(memory=64 << 20, pids=20, cpus=0.5)


def mount(place: Path, kind: str, options: str, root: str = "/") -> str:
    return f"30 24 0:26 {root} {place} rw,nosuid shared:4 - {kind} none rw,{options}\n"


def folder(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def read(path: Path) -> str:
    return path.read_text()


def test_version_1(tmp_path):
    for name in ("memory", "pids", "cpu,cpuacct", "freezer"):
        folder(tmp_path / name / "job/mine")
    mounts = "".join(
        mount(tmp_path / name, "cgroup", name) for name in ("memory", "pids", "cpu,cpuacct")
    ) + mount(tmp_path / "freezer", "cgroup", "freezer", root="/job")
    own = "4:memory:/job/mine\n3:pids:/job/mine\n2:cpu,cpuacct:/job/mine\n1:freezer:/job/mine\n"
    (tmp_path / "freezer/mine").mkdir()
    trees = find(mounts, own)
    assert trees.missing() == [] and trees.v2 is None
    assert trees.v1["memory"] == tmp_path / "memory/job/mine"
    # Only a part of the tree is mounted; the own group is found from there.
    assert trees.v1["freezer"] == tmp_path / "freezer/mine"
    group = create(trees.below("node"), "7", LIMITS)
    below = "job/mine/node/7"
    assert read(tmp_path / "memory" / below / "memory.limit_in_bytes") == str(64 << 20)
    assert read(tmp_path / "pids" / below / "pids.max") == "20"
    assert read(tmp_path / "cpu,cpuacct" / below / "cpu.cfs_quota_us") == "50000"
    group.attach(12)
    for place in group.folders:
        assert read(Path(place, "cgroup.procs")) == "12"
    oom = tmp_path / "memory" / below / "memory.oom_control"
    oom.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert group.oom_kills() == 3
    group.freeze(True)
    assert read(tmp_path / "freezer/mine/node/7/freezer.state") == "FROZEN"


def test_version_2(tmp_path):
    top = folder(tmp_path / "top", cgroup__controllers="cpu io memory pids\n")
    folder(top / "user/session", cgroup__controllers="cpu memory pids\n")
    trees = find(mount(top, "cgroup2", "nsdelegate"), "0::/user/session\n")
    assert trees.missing() == [] and trees.v2 == top / "user/session"
    assert read(trees.v2 / "cgroup.subtree_control") == "+cpu +memory +pids"
    (trees.v2 / "node").mkdir()
    (trees.v2 / "node/cgroup.controllers").write_text("cpu memory pids")
    group = create(trees.below("node"), "7", LIMITS)
    place = top / "user/session/node/7"
    assert read(top / "user/session/node/cgroup.subtree_control") == "+cpu +memory +pids"
    assert read(place / "memory.max") == str(64 << 20)
    assert read(place / "pids.max") == "20" and read(place / "cpu.max") == "50000 100000"
    (place / "memory.events").write_text("low 0\nmax 5\noom 2\noom_kill 1\noom_group_kill 0\n")
    (place / "memory.current").write_text("4096\n")
    (place / "cgroup.events").write_text("populated 1\nfrozen 1\n")
    assert (group.oom_kills(), group.memory(), group.is_frozen()) == (1, 4096, True)
    group.freeze(False)
    assert read(place / "cgroup.freeze") == "0"


def test_version_2_where_the_own_group_cannot_be_divided(tmp_path):
    top = folder(tmp_path / "top", cgroup__controllers="cpu memory pids\n")
    folder(top / "slice", cgroup__controllers="cpu memory pids\n")
    folder(top / "slice/session", cgroup__controllers="memory pids\n")
    # Writing to a folder fails, as it does in a group with processes.
    (top / "slice/session/cgroup.subtree_control").mkdir()
    trees = find(mount(top, "cgroup2", ""), "0::/slice/session\n")
    assert trees.v2 == top / "slice" and trees.missing() == []
    # The nearest that has all of them, else the one that has most.
    (top / "slice/cgroup.controllers").write_text("memory\n")
    assert find(mount(top, "cgroup2", ""), "0::/slice/session\n").v2 == top
    (top / "cgroup.controllers").write_text("memory pids\n")
    trees = find(mount(top, "cgroup2", ""), "0::/slice/session\n")
    assert trees.v2 == top and trees.missing() == ["cpu"]


def test_hybrid(tmp_path):
    """Limits from version 1; version 2 only to freeze, where version 1 cannot."""
    for name in ("memory", "pids", "cpu", "freezer"):
        folder(tmp_path / name)
    unified = folder(tmp_path / "unified", cgroup__controllers="")
    mounts = [mount(tmp_path / name, "cgroup", name) for name in ("memory", "pids", "cpu")]
    mounts.append(mount(unified, "cgroup2", ""))
    trees = find("".join(mounts), "0::/\n4:memory:/\n")
    assert trees.v2 == unified and trees.v2_controllers == frozenset() and not trees.missing()
    mounts.append(mount(tmp_path / "freezer", "cgroup", "freezer"))
    assert find("".join(mounts), "0::/\n").v2 is None


@pytest.mark.parametrize("mounts", ["", "30 24 0:26 / /proc rw - proc proc rw\n"])
def test_none(mounts):
    assert find(mounts, "").missing() == ["memory", "pids", "cpu", "freezer"]


def test_remove(tmp_path):
    folder(tmp_path / "node/7")
    assert remove(tmp_path / "node") and not (tmp_path / "node").exists()
    assert remove(tmp_path / "node")
