"""Publishes parameters that lie on a mesh of eight devices, with several ranks in this process.

Run by `test_weights_devices`, in a process of its own, with the path of an empty folder.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from c2 import models
from c2.models import presets
from c2.parallel import mesh as meshes
from c2.parallel.mesh import MeshConfig
from c2.training import sharding
from c2.weights import devices, serving
from c2.weights.manifest import MismatchError
from c2.weights.publisher import Publisher, PublisherConfig
from c2.weights.store import open_store
from c2.weights.subscriber import Subscriber

RANKS = {"per device": [1] * 8, "per process": [4, 4], "uneven": [1, 5, 2], "one": [8]}


def config():
    """A small model whose expert and embedding axes divide over the mesh; others do not."""
    cfg = presets.get("tiny_mla_moe")
    attention = {"q_lora": 16, "kv_lora": 16, "nope": 16, "rope": 16, "v": 16, "heads": 8}
    return replace(
        cfg,
        vocab=63,
        hidden=32,
        layers=2,
        dense_layers=1,
        dense_intermediate=48,
        dtype="bfloat16",
        attention=replace(cfg.attention, **attention),
        moe=replace(cfg.moe, experts=8, top_k=2, intermediate=32),
    )


def check_chain(folder, split, states, expected, specs, cfg):
    """Publishes the states as these ranks would; every reader gets all of the last one."""
    borders = np.cumsum([0, *split])
    store, all_devices = open_store(folder), jax.devices()
    groups = [all_devices[a:b] for a, b in itertools.pairwise(borders)]
    writers = [Publisher(store, PublisherConfig(), owner="0", ranks=len(groups))]
    writers += [
        Publisher(
            store, PublisherConfig(), owner="", rank=rank, ranks=len(groups), epoch=writers[0].epoch
        )
        for rank in range(1, len(groups))
    ]
    for step, tensors in enumerate(states):
        for writer, group in zip(writers, groups, strict=True):
            writer.publish(step, devices.parts(tensors, group))
        published = [writer.wait() for writer in writers]
    numbers = sum(x.size for x in expected.values())
    assert sum(p.numbers for p in published) == numbers  # each number once
    fair = numbers / 8 * split[0]
    assert published[0].numbers < 1.6 * fair, (published[0].numbers, fair)
    for writer in reversed(writers):
        writer.close()
    subscriber = Subscriber(store, serving.wanted(specs, cfg.dtype))
    subscriber.poll()
    for name, held in subscriber.current.tensors.items():
        assert held.tobytes() == np.asarray(expected[name]).tobytes(), name


def check_refusals(mesh):
    """What cannot be a rank's rows is an error."""
    x = jnp.zeros((8, 8))
    rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    columns = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, mesh.axis_names)))
    first, _, third, *_ = jax.devices()
    for tensor, group, message in (
        (rows, [first, third], "rows from [0, 2] to [1, 3] are not consecutive"),
        (columns, None, "spread along other axes"),
    ):
        try:
            devices.parts({"x": tensor}, group)
        except MismatchError as error:
            assert message in str(error), error
        else:
            raise AssertionError(message)


def main():
    """All of it."""
    cfg = config()
    specs = models.spec(cfg)
    layout = MeshConfig(context=2, expert=4, weights="sharded")
    mesh = meshes.make(layout)
    rng = np.random.default_rng(0)
    masters = jax.tree.map(lambda s: rng.normal(0, 0.02, s.shape).astype(s.dtype), specs)
    later = jax.tree.map(lambda x: x * np.float32(1.001), masters)
    places = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), sharding.partitions(cfg, mesh, layout)
    )
    form = serving.make_serving_form(specs, cfg.dtype, mesh=mesh)
    states = [form(jax.device_put(params, places)) for params in (masters, later)]
    assert len(states[0]["head"].sharding.device_set) == 8
    expected = serving.make_serving_form(specs, cfg.dtype)(later)
    for name, split in RANKS.items():
        check_chain(str(Path(sys.argv[1], name)), split, states, expected, specs, cfg)
    check_refusals(mesh)


if __name__ == "__main__":
    main()
