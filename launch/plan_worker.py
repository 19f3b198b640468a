"""Compiles a training step in a process of its own: memory is measured, a crash is one line.

Reads the flags as JSON from standard input. Writes what it does to standard output, as lines of
JSON, the result last, and the module's text to a file.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from launch import targets


def main() -> None:
    """Compiles what standard input names."""
    request = json.load(sys.stdin)
    targets.prepare()
    import jax

    try:
        _tell({"stage": "tracing"})
        lowered, seconds = _timed(lambda: lower(request))
        _tell({"stage": "compiling", "seconds": seconds})
        options = request.get("options", {})
        compiled, compile_seconds = _timed(lambda: lowered.compile(compiler_options=options))
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        from launch.aot_worker import reason

        _tell({"error": reason(error)})
        return
    Path(request["hlo"]).write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    _tell(
        {
            "seconds": {"trace": seconds, "compile": compile_seconds},
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "memory": {
                "arguments": memory.argument_size_in_bytes,
                "outputs": memory.output_size_in_bytes,
                "aliased": memory.alias_size_in_bytes,
                "temporaries": memory.temp_size_in_bytes,
                "code": memory.generated_code_size_in_bytes,
                "peak": getattr(memory, "peak_memory_in_bytes", 0),
            },
        }
    )


def lower(request: dict[str, Any]) -> Any:
    """Traces and lowers the training step of a phase for the devices of a topology."""
    import jax
    import numpy as np

    from c2.parallel import mesh as meshes
    from c2.training import sharding
    from c2.training.pretrain import make_optimizer
    from c2.training.step import make_train_step
    from launch import plan_case, plan_mesh

    devices = targets.devices(request["topology"])
    where = plan_mesh.topology(request["topology"])
    planned = plan_case.case(request["config"], request["overrides"], request["phase"], where)
    phase, layout = planned.phase, planned.layout
    mesh = meshes.make(layout, devices)
    optimizer = make_optimizer(planned.config.optimizer, planned.config.phases, planned.model)
    step = make_train_step(
        planned.model,
        optimizer,
        mesh,
        layout,
        micro_batches=phase.micro_batches,
        bias_update_rate=planned.config.bias_update_rate,
        module=phase.mtp,
    )
    fields = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), np.int32)
    batch = {
        name: jax.ShapeDtypeStruct((phase.batch, phase.context), dtype)
        for name, dtype in (fields | {"loss_mask": np.float32}).items()
    }
    state = sharding.abstract_state(planned.model, optimizer, mesh, layout)
    with jax.default_device(devices[0]):  # Mosaic looks there for the chip it compiles for
        return step.lower(state, sharding.abstract_batch(batch, mesh, layout))


def _timed(work):
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
