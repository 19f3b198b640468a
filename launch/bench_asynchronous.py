"""Rollouts per second through the controller: asynchronous training against lock-step.

Services compute nothing. With a long tail, rollouts take 20 ms in the median and ten times that now
and then, as tools do, and a step takes 60 ms; then the gain of not waiting shows. Without latency
what remains is the controller's own work: scheduling, the journal on disk, the data of a step.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from c2.rl import simulated
from c2.rl.controller import Controller, ControllerConfig
from c2.rl.in_process import InProcess
from c2.rl.journal import Journal
from c2.rl.schedule import ScheduleConfig
from launch.bench_case import Case, Step, timed

PEER, UNIT, SAME_WORK = "lock-step", "rollouts", False
STALENESS = 2
SHAPE = {"groups": 16, "group": 8, "slots": 384}
LONG_TAIL = {"rollout_s": 0.02, "sigma": 1.2, "step_s": 0.06}


def cases(dtypes: Sequence[str]) -> dict[str, Case]:
    """With and without latency; there are no numbers of any precision."""
    del dtypes
    settings = {"long tail": (30, LONG_TAIL), "no latency": (20, {})}
    return {
        name: Case(
            partial(_prepare, steps, STALENESS, times),
            partial(_prepare, steps, 0, times),
            steps * SHAPE["groups"] * SHAPE["group"],
        )
        for name, (steps, times) in settings.items()
    }


def _prepare(steps: int, staleness: int, times: dict[str, float]) -> Step:
    return timed(lambda: asyncio.run(_train(steps, staleness, times)))


async def _train(steps: int, staleness: int, times: dict[str, float]) -> None:
    cluster = simulated.Cluster(**times)
    schedule = ScheduleConfig(steps=steps, staleness=staleness, **SHAPE)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder, "journal")) as journal:
        await Controller(
            ControllerConfig(schedule=schedule, eval_every=0),
            InProcess(),
            journal,
            training=partial(simulated.Training, cluster),
            inference=partial(simulated.Inference, cluster),
            environments=lambda inference: partial(simulated.Environments, cluster, inference),
            evaluation=None,
            prompt=str,
            credit=lambda groups: groups,
            observe=lambda kind, event: None,
        ).run()
