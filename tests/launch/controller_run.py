"""A training that computes nothing, with its services in processes or actors, for tests to kill.

    python controller_run.py FOLDER local|ray STALENESS

Writes ``pids``, a JSON object from service to process, and goes on with what is in FOLDER.
"""

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path

from c2.rl import simulated
from c2.rl.calls import LostError
from c2.rl.controller import Controller, ControllerConfig
from c2.rl.journal import Journal
from c2.rl.schedule import ScheduleConfig

STEPS, GROUPS, GROUP = 40, 2, 3


def make_launcher(kind):
    if kind == "local":
        from launch.local import LocalLauncher

        return LocalLauncher()
    import ray

    from launch.on_ray import RayLauncher

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    return RayLauncher(f"run-{os.getpid()}")


async def main(folder, kind, staleness):
    cluster = simulated.Cluster(
        store=simulated.Folder(folder / "store"), rollout_s=0.03, step_s=0.03, checkpoint_every=2
    )
    config = ControllerConfig(
        schedule=ScheduleConfig(
            steps=STEPS, groups=GROUPS, group=GROUP, slots=9, staleness=staleness, attempts=999
        ),
        workers=2,
        eval_every=10,
        restarts=999,
    )
    launcher = make_launcher(kind)
    with Journal(folder / "journal") as journal:
        controller = Controller(
            config,
            launcher,
            journal,
            training=partial(simulated.Training, cluster),
            inference=partial(simulated.Inference, cluster),
            environments=lambda inference: partial(simulated.Environments, cluster, inference),
            evaluation=partial(simulated.Evaluation, cluster),
            prompt=lambda index: f"task-{index}",
            credit=lambda groups: groups,
            observe=lambda kind, event: None,
        )
        running = asyncio.create_task(controller.run())
        pids = asyncio.create_task(write_pids(controller, folder / "pids"))
        try:
            await running
        finally:
            pids.cancel()
            await launcher.close()
    (folder / "done").touch()


async def write_pids(controller, path):
    """Says again and again who is where."""
    while True:
        pids = {"controller": os.getpid()}
        for name, handle in list(controller._handles.items()):
            try:
                pids[name] = await handle.call("ping")
            except LostError:
                continue
        if len(pids) > 1:  # else the controller would always be killed first
            path.with_suffix(".new").write_text(json.dumps(pids))
            path.with_suffix(".new").rename(path)
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
