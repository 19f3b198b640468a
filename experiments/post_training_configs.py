"""Sizes of post-training that studies share: how long each stage lasts, and what agents may do."""

from dataclasses import replace

from c2.agent.harness import HarnessConfig
from c2.losses.config import PolicyGradientConfig
from c2.rl.controller import ControllerConfig
from c2.rl.environments import EnvironmentConfig
from c2.rl.schedule import ScheduleConfig as Schedule
from c2.rl.training import TrainingConfig
from c2.rollout.config import EngineConfig
from c2.sandbox.pool.config import PoolConfig
from c2.sandbox.pool.core import Limits
from c2.training.loop import LoopConfig
from c2.training.optimizer import OptimizerConfig, ScheduleConfig
from c2.training.pretrain import PhaseConfig
from experiments.demonstrations import DemonstrationsConfig
from experiments.fine_tuning import FineTuningConfig
from experiments.post_training import LessonConfig, PostTrainingConfig
from experiments.reinforcement import RLConfig
from experiments.repair_tasks import TasksConfig

FAMILIES = ("operator", "name", "boundary")
LEVEL = 0  # packages of one function
CONTEXT = 448  # tokens of a conversation


def mini() -> PostTrainingConfig:
    """Twenty-five minutes on two CPU cores, for about a million parameters.

    After sound demonstrations come a few of an expert that makes mistakes in most of its first
    edits, often does not look at the tests, and mostly gives up when they fail. Who does as it does
    solves less than it could. Whether rewards bring that out again is what is asked; they do not
    teach edits that nobody has shown.
    """
    sound = DemonstrationsConfig(
        count=5000, level=LEVEL, families=FAMILIES, slips=0.0, test_after=0.5
    )
    careless = replace(sound, count=1500, slips=0.95, test_after=0.45, repairs=0.2, seed=1)
    tuning = FineTuningConfig(
        phase=PhaseConfig(
            name="demonstrations",
            steps=160,
            context=CONTEXT,
            batch=10,
            learning_rate=ScheduleConfig(peak=6e-3, warmup_steps=16, final=0.1),
            data="fine_tuning",
        ),
        optimizer=OptimizerConfig(name="muon"),
        bias_update_rate=3e-3,
        loop=LoopConfig(log_every=10, checkpoint_every=100),
    )
    rate = ScheduleConfig(peak=1.5e-3, warmup_steps=5, final=0.1)
    return PostTrainingConfig(
        before=LessonConfig(demonstrations=sound, fine_tuning=tuning),
        controls=("shuffled", "fine_tuning", "sound"),
        demonstrations=careless,
        fine_tuning=replace(
            tuning, phase=replace(tuning.phase, steps=50, learning_rate=rate), seed=1
        ),
        reinforcement=RLConfig(
            controller=ControllerConfig(
                schedule=Schedule(steps=24, groups=16, group=8, slots=128, staleness=1),
                eval_every=24,
            ),
            training=TrainingConfig(
                objective=PolicyGradientConfig(tokens_per_rollout=64),
                optimizer=OptimizerConfig(weight_decay=0.0, clip_norm=0.1),
                learning_rate=ScheduleConfig(peak=3e-4, warmup_steps=2, decay="linear"),
                context=CONTEXT,
                rows=8,
                checkpoint_every=5,
            ),
            # few slots: most conversations wait for their tools
            engine=EngineConfig(
                slots=16, capacity=CONTEXT, prefill_rows=8, prefill_chunk=32, steps=8,
                prefix_entries=128,
            ),
            environments=EnvironmentConfig(
                harness=HarnessConfig(
                    max_turns=8, turn_tokens=40, total_tokens=400, context=CONTEXT,
                    deadline_s=300.0,
                ),
                syntax="plain",
                # everything runs on the same few cores, which are always short
                pool=PoolConfig(backend="zygote", limits=Limits(cpu_pressure=100.0)),
            ),
            tasks=TasksConfig(
                level=LEVEL, families=FAMILIES,
                held_out={"combination": 24, "template": 6, "family": 6},
            ),
            samples=8,
            eval_slots=128,
        ),
    )  # fmt: skip


def small() -> PostTrainingConfig:
    """Hours: all families, longer stages, larger steps."""
    config = mini()
    rl = config.reinforcement
    families = tuple(name for name in TasksConfig().families if name != "arguments")

    def longer(demonstrations: DemonstrationsConfig, tuning: FineTuningConfig, times: int):
        count = times * demonstrations.count
        steps = replace(tuning.phase, steps=times * tuning.phase.steps)
        return {
            "demonstrations": replace(demonstrations, count=count, level=1, families=families),
            "fine_tuning": replace(tuning, phase=steps),
        }

    before = config.before
    return replace(
        config,
        before=LessonConfig(**longer(before.demonstrations, before.fine_tuning, 20)),
        **longer(config.demonstrations, config.fine_tuning, 4),
        reinforcement=replace(
            rl,
            controller=replace(
                rl.controller,
                schedule=replace(rl.controller.schedule, steps=300),
                eval_every=50,
            ),
            training=replace(
                rl.training, learning_rate=replace(rl.training.learning_rate, peak=1e-4)
            ),
            tasks=replace(
                rl.tasks, level=1, families=families, held_out=dict.fromkeys(rl.tasks.held_out, 64)
            ),
        ),
    )


def smoke() -> PostTrainingConfig:
    """Every stage once; nothing is learned."""
    config = mini()
    rl = config.reinforcement
    phase = replace(
        config.fine_tuning.phase, steps=4, batch=2,
        learning_rate=ScheduleConfig(peak=3e-3, final=0.1),
    )  # fmt: skip
    few = replace(config.demonstrations, count=60)
    tuning = replace(config.fine_tuning, phase=phase, loop=LoopConfig(log_every=2))
    return replace(
        config,
        before=LessonConfig(demonstrations=few, fine_tuning=tuning),
        demonstrations=few,
        fine_tuning=tuning,
        reinforcement=replace(
            rl,
            controller=ControllerConfig(
                schedule=Schedule(steps=2, groups=2, group=3, slots=6, staleness=1), eval_every=2
            ),
            training=replace(
                rl.training,
                rows=2,
                inspect_every=1,
                learning_rate=replace(rl.training.learning_rate, warmup_steps=0),
            ),
            engine=replace(rl.engine, slots=8, prefill_rows=4, prefix_entries=0),
            environments=replace(
                rl.environments,
                harness=replace(rl.environments.harness, max_turns=3, turn_tokens=24),
                ready=2,
            ),
            tasks=replace(rl.tasks, held_out={"combination": 1, "family": 1}),
            samples=2,
            eval_slots=4,
        ),
    )
