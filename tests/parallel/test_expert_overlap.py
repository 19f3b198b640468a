"""Exchanges run during grouped matmuls, in programs compiled for slices that are not there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import c2
from launch import targets

SCRIPT = """
import json, re, sys
from functools import partial
from launch import targets
targets.prepare()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from c2.parallel.expert import OVERLAP, expert_mlp

topology, impl, platform = sys.argv[1:]
devices = np.array(targets.devices(topology))
mesh, split = Mesh(devices.reshape(-1, 2), ("data_ep", "context_ep")), P(("data_ep", "context_ep"))
tokens, top_k, experts, embed, ffw = 1536 * devices.size, 4, 2 * devices.size, 512, 256
shapes = {
    "x": (tokens, embed), "routes": (tokens, top_k), "weights": (tokens, top_k),
    "gate_up": (experts, embed, 2, ffw), "down": (experts, ffw, embed),
}
dtypes = {"routes": jnp.int32, "weights": jnp.float32}
args = [
    jax.ShapeDtypeStruct(
        shape, dtypes.get(name, jnp.bfloat16), sharding=NamedSharding(mesh, split)
    )
    for name, shape in shapes.items()
]

def gradients(x, routes, *rest):
    def squares(x, *rest):
        out = mlp(x, routes, *rest)
        return (out * out).sum(dtype=jnp.float32)
    return jax.grad(squares, argnums=(0, 1, 2, 3))(x, *rest)

mlp = partial(
    expert_mlp, axes=("data_ep", "context_ep"), impl=impl, micro_batches=3, ragged=True
)
run = jax.shard_map(gradients, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
text = jax.jit(run).lower(*args).compile(OVERLAP[platform]).as_text()

loops = {}
for computation in text.split("\\n}"):
    if "ENTRY" in computation:
        continue
    running, matmuls = {}, []
    for line in computation.splitlines():
        if found := re.search(r"(%\\S+) = .* ragged-all-to-all-start\\(", line):
            running[found[1]] = 0
        elif found := re.search(r" ragged-all-to-all-done\\(.*?(%[^ ,)]+)\\)", line):
            matmuls.append(running.pop(found[1]))
        elif re.search('custom_call_target="(tpu_custom_call|mosaic_gpu)', line):
            running = {name: count + 1 for name, count in running.items()}
    if matmuls:
        loops["backward" if "transpose(jvp" in computation else "forward"] = matmuls
print(json.dumps(loops))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "impl", "platform"),
    [("b200:1x8", "blackwell", "gpu"), ("v5p:2x2x2", "tpu", "tpu")],
)
def test_exchanges_of_a_micro_batch_run_during_matmuls_of_another(topology, impl, platform):
    if reason := targets.missing(topology):
        pytest.skip(reason)
    command = [sys.executable, "-c", SCRIPT, topology, impl, platform]
    root = Path(c2.__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loops = json.loads(done.stdout)
    assert {name: len(matmuls) for name, matmuls in loops.items()} == {"forward": 2, "backward": 2}
    assert min(loops["backward"]) > 0
    # one exchange at a time: the TPU's scheduler hides the forward pass's second one, if it is
    # short, behind the weighted sum alone
    assert (max if platform == "tpu" else min)(loops["forward"]) > 0
