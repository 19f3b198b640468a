"""Checkpoints of a small typed tree and a small Grain pipeline."""

import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import flax
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from c2.config import ConfigError
from c2.training import checkpoint
from c2.training.checkpoint import CheckpointError, Checkpoints, ForeignCheckpointError


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: optax.OptState


def make_state(seed: int = 0, width: int = 64) -> State:
    key = jax.random.key(seed)
    params = {
        "w": jax.random.normal(key, (width, 256)),
        "half": jnp.full((5,), 1.25, jnp.bfloat16),
        "zeros": jnp.zeros((7, 3)),
        "nothing": None,
        "key": key,
    }
    opt_state = optax.adam(1e-3).init({"w": params["w"]})
    return State(jnp.int32(seed), params, opt_state)


def make_batches():
    numbers = grain.MapDataset.source(np.arange(100)).seed(3).shuffle().batch(4)
    return iter(numbers.to_iter_dataset())


def raw(tree) -> list[bytes]:
    plain = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def save_steps(directory: Path, steps, **retention) -> dict[int, State]:
    states = {step: make_state(seed=step) for step in steps}
    with Checkpoints(directory, **retention) as checkpoints:
        batches = make_batches()
        for step in range(1, max(steps) + 1):
            next(batches)
            if step in states:
                checkpoints.save(step, states[step], batches, {"phase": f"p{step}"})
    return states


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with steps 2 and 5; tests that damage it copy it first."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, save_steps(directory, [2, 5])


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_state_types_and_data_position_come_back_bitwise(saved):
    directory, states = saved
    batches = make_batches()
    checkpoints = Checkpoints(directory)
    step = checkpoints.latest()
    state = checkpoints.restore(step, make_state(seed=9), batches)

    assert step == 5
    assert jax.tree.structure(state) == jax.tree.structure(states[5])  # NamedTuples, None, classes
    assert raw(state) == raw(states[5])
    expected = make_batches()
    np.testing.assert_array_equal(next(batches), [next(expected) for _ in range(6)][5])


def test_target_may_be_abstract_and_data_may_stay_away(saved):
    directory, states = saved
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), make_state()
    )
    assert raw(Checkpoints(directory).restore(2, target)) == raw(states[2])


def test_metadata_is_read_without_the_state(copy):
    shutil.rmtree(copy / "00000005" / "state")
    assert Checkpoints(copy).metadata(5) == {"phase": "p5"}


def test_no_checkpoint_yet(tmp_path):
    assert Checkpoints(tmp_path / "none").latest() is None
    assert not (tmp_path / "none").exists()


def test_saving_is_a_snapshot(tmp_path):
    """The loop donates the state and draws batches while the save is still being written."""
    update = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    state = {"x": jax.random.normal(jax.random.key(0), (512, 1024))}
    expected = np.array(state["x"], copy=True)
    batches = make_batches()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, batches)
        for _ in range(20):
            state = {"x": update(state["x"])}
            next(batches)
        checkpoints.wait()
        fresh = make_batches()
        restored = checkpoints.restore(1, state, fresh)
    np.testing.assert_array_equal(np.asarray(restored["x"]), expected)
    np.testing.assert_array_equal(next(fresh), next(make_batches()))


def test_retention_keeps_the_newest_and_every_kth(tmp_path):
    save_steps(tmp_path, range(1, 10), keep=2, keep_every=4)
    assert Checkpoints(tmp_path).steps() == [4, 8, 9]


def test_a_damaged_newer_folder_is_not_counted_as_kept_and_is_replaced(copy):
    flip(copy / "00000005" / "manifest.json")
    with Checkpoints(copy, keep=1) as checkpoints:
        batches = make_batches()
        checkpoints.save(4, make_state(4), batches)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 5]  # 2 has made room
        assert checkpoints.latest() == 4
        checkpoints.save(5, make_state(5), batches)
        assert checkpoints.latest() == 5
        assert checkpoints.steps() == [5]


def flip(path: Path, seed: int = 0) -> None:
    content = bytearray(path.read_bytes())
    position = random.Random(seed).randrange(len(content))
    content[position] ^= 1 << (seed % 8)
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [flip, truncate, empty, Path.unlink])
def test_any_damage_to_any_file_is_noticed(saved, tmp_path, damage, caplog):
    for name in files(saved[0] / "00000005"):
        copy = tmp_path / "copy"
        shutil.copytree(saved[0], copy)
        path = copy / "00000005" / name
        if path.stat().st_size or damage is Path.unlink:
            damage(path)
            caplog.clear()
            assert Checkpoints(copy).latest() == 2, name
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert str(copy / "00000005") in record.getMessage()
            assert "\n" not in record.getMessage()
        shutil.rmtree(copy)


def files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def test_flipped_bytes_in_array_data_are_noticed(copy):
    """The case that Orbax loads without an error."""
    data = max((copy / "00000005").rglob("*"), key=lambda path: path.stat().st_size)
    assert "ocdbt" in str(data)
    for seed in range(20):
        flip(data, seed)
        assert Checkpoints(copy).latest() == 2
        flip(data, seed)
    assert Checkpoints(copy).latest() == 5


def test_nothing_sound_left(copy, caplog):
    for step in (2, 5):
        (copy / f"{step:08d}" / "manifest.json").unlink()
    assert Checkpoints(copy).latest() is None
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.replace(params=s.params | {"w": jnp.zeros((3, 256))}),
         r"\.params\['w'\] is float32\[64,256\] in the checkpoint but float32\[3,256\] here"),
        (lambda s: s.replace(params=s.params | {"half": jnp.zeros((5,))}),
         r"\.params\['half'\] is bfloat16\[5\] in the checkpoint but float32\[5\] here"),
        (lambda s: s.replace(params=s.params | {"extra": jnp.zeros(2)}),
         r"\.params\['extra'\] is absent in the checkpoint but float32\[2\] here"),
        (lambda s: s.replace(opt_state=optax.sgd(0.1).init(s.params["w"])),
         r"\.opt_state\[0\]\.count is int32\[\] in the checkpoint but absent here"),
    ],
)  # fmt: skip
def test_a_foreign_checkpoint_is_refused_by_name(saved, change, message):
    before = {name: (saved[0] / name).stat().st_mtime_ns for name in files(saved[0])}
    with pytest.raises(ForeignCheckpointError, match=message) as caught:
        Checkpoints(saved[0]).restore(5, change(make_state()), make_batches())
    assert isinstance(caught.value, ConfigError)
    assert "\n" not in str(caught.value)
    assert before == {name: (saved[0] / name).stat().st_mtime_ns for name in files(saved[0])}


def test_foreign_data_position_is_one_line(saved):
    rows = grain.MapDataset.range(4).to_iter_dataset()
    batches = iter(grain.experimental.InterleaveIterDataset([rows, rows], cycle_length=2))
    with pytest.raises(CheckpointError, match="00000005: cannot be restored: ") as caught:
        Checkpoints(saved[0]).restore(5, make_state(), batches)
    assert "\n" not in str(caught.value)


def test_data_that_refuse_the_position_are_bad_input(copy, monkeypatch):
    """As when the files of the corpus have changed since."""
    batches = make_batches()

    def refuse(state):
        raise ConfigError("sources: the data have changed")

    monkeypatch.setattr(type(batches), "set_state", lambda self, state: refuse(state))
    with pytest.raises(ForeignCheckpointError, match=r"00000005: sources: the data have changed$"):
        Checkpoints(copy).restore(5, make_state(), batches)


def test_a_failed_write_is_one_line_and_leaves_the_older_ones(tmp_path, capfd):
    """A limit on file sizes stands for a full disk: both fail in the same write calls."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        fill(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    printed, errors = capfd.readouterr()
    assert printed.startswith(f"{tmp_path}/00000002: could not be saved: ")
    assert "File too large" in printed
    assert printed.count("\n") == 1
    assert errors == ""
    assert Checkpoints(tmp_path).latest() == 1
    assert [path.name for path in tmp_path.iterdir()] == ["00000001"]


def test_a_full_disk_is_one_line_and_leaves_the_older_ones(tmp_path):
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    in_small_disk = ["unshare", "-Urm", "sh", "-c", f'{mount} && "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*in_small_disk, "true"]).returncode:
        pytest.skip("needs a mount namespace of its own")
    result = subprocess.run(
        [*in_small_disk, sys.executable, __file__, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert result.stderr == ""
    message, usable = result.stdout.splitlines()
    assert message.startswith(f"{tmp_path}/00000002: could not be saved: ")
    assert "No space left on device" in message
    assert usable == "usable: 1 ['00000001']"


def fill(directory: Path) -> None:
    batches = make_batches()
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, make_state(), batches)
    checkpoints.save(2, make_state(width=1200), batches)  # 1.2 MB
    try:
        checkpoints.wait()
    except CheckpointError as error:
        print(error)


def test_what_unfinished_saves_leave_behind_is_deleted(copy, tmp_path, monkeypatch):
    """By the next start, and by the end of a process in which Orbax goes on after a failure."""
    killed = copy / f"00000009{checkpoint._TEMPORARY}"
    (killed / "state").mkdir(parents=True)
    assert Checkpoints(copy).latest() == 5
    assert not killed.exists()

    def fail(folder, *args, **kwargs):
        late.mkdir(parents=True)
        raise OSError("the disk is full")

    late = tmp_path / "late" / f"00000001{checkpoint._TEMPORARY}"
    monkeypatch.setattr(checkpoint.ocp, "save_checkpointables_async", fail)
    checkpoints = Checkpoints(late.parent)
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoints.save(1, make_state(), make_batches())
    (late / "state").mkdir(parents=True)
    checkpoints.close()
    assert list(late.parent.iterdir()) == []


def test_manifest_lists_every_file_and_every_leaf(saved):
    folder = saved[0] / "00000005"
    manifest = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert sorted(manifest["files"]) == sorted(set(files(folder)) - {"manifest.json"})
    assert manifest["leaves"][".params['half']"] == "bfloat16[5]"
    assert manifest["versions"]["jax"] == jax.__version__


@pytest.mark.parametrize("retention", [{"keep": 0}, {"keep_every": 0}])
def test_retention_must_be_positive(tmp_path, retention):
    with pytest.raises(ConfigError, match=f"{next(iter(retention))}: 0"):
        Checkpoints(tmp_path, **retention)


if __name__ == "__main__":
    fill(Path(sys.argv[1]))
    found = Checkpoints(sys.argv[1])
    print("usable:", found.latest(), [path.name for path in found.directory.iterdir()])
