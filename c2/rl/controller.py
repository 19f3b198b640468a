"""The controller of asynchronous training: it decides nothing itself and computes nothing.

`c2.rl.schedule` decides which rollouts run and which groups a step trains on, `c2.rl.journal` keeps
what must not be lost, and four services do the work, somewhere (report section 6). The controller
carries news between them, and puts services that die back in their place while the others go on.

What it calls, all of it asynchronous:

    environments   rollout(prompt, sample) -> Rollout; the same again goes on behind its last
                   checkpoint, and gives the same from the same weights;
                   forget(prompts) whose rollouts will not be asked for again
    training       position() -> steps done, at first those of its newest checkpoint;
                   step(number, data) -> metrics; publish() returns when the newest weights are out
    inference      load(version) -> metrics, once it serves this version
    evaluation     pin(version) keeps it for evaluate(version) -> scores, whoever dies meanwhile,
                   until forget(version)
    all            ping() -> process id

After a death. A rollout whose environment died goes on, by the schedule's rule. Training comes
back at its newest checkpoint and repeats the steps since then on the groups of the journal.
Inference comes back with the newest weights; whoever samples from it waits for that. A controller
that was killed takes all services with it, and the next one goes on from journal and checkpoint.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from c2.config import ConfigError
from c2.records import Group, Rollout
from c2.rl.calls import Handle, Launcher, LostError
from c2.rl.journal import Journal
from c2.rl.schedule import Job, Schedule, ScheduleConfig

Make = Callable[[], Any]
Observe = Callable[[str, Mapping[str, Any]], None]
"""Is told of ``step``, ``rollout``, ``evaluation``, ``weights`` and ``death``."""

ENVIRONMENTS, TRAINING, INFERENCE, EVALUATION = (
    "environments", "training", "inference", "evaluation",
)  # fmt: skip


RETRY_S = 0.05  # between a call that failed and the next look whether the service is there


class TrainingError(Exception):
    """Training cannot go on."""


@dataclass(frozen=True, kw_only=True)
class ControllerConfig:
    """How often to look and how much to bear.

    Attributes:
      schedule: what runs and what is trained.
      workers: environment services.
      eval_every: steps between two evaluations; the last version is always evaluated, and the
        first. 0 for none at all.
      ping_s: seconds between two questions whether a service is alive.
      patience_s: seconds after which one that does not answer is taken for dead.
      restarts: deaths of one service after which training gives up.
    """

    schedule: ScheduleConfig
    workers: int = 1
    eval_every: int = 10
    ping_s: float = 10.0
    patience_s: float = 60.0
    restarts: int = 100

    def __post_init__(self):
        if self.workers < 1:
            raise ConfigError(f"workers: {self.workers}; legal: at least 1")
        for name in ("eval_every", "restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: at least 0")
        for name in ("ping_s", "patience_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: above 0")


class Controller:
    """Runs one training; see the module.

    Attributes:
      schedule: its state.
    """

    def __init__(
        self,
        config: ControllerConfig,
        launcher: Launcher,
        journal: Journal,
        *,
        training: Make,
        inference: Make,
        environments: Callable[[Handle], Make],
        evaluation: Make | None,
        prompt: Callable[[int], str],
        credit: Callable[[Sequence[Group]], Any],
        observe: Observe,
    ) -> None:
        """Starts nothing.

        Args:
          config: how.
          launcher: where services run.
          journal: of this run.
          training: makes the service.
          inference: likewise.
          environments: likewise, from the handle of inference.
          evaluation: likewise; None for none.
          prompt: the prompt of a group, by its place in the order; each at most once.
          credit: turns the groups of a step into what training learns from.
          observe: is told what happens.
        """
        self.schedule = Schedule(config.schedule)
        self._config, self._launcher, self._journal = config, launcher, journal
        self._makes: dict[str, Make] = {TRAINING: training, INFERENCE: inference}
        self._environments = environments
        if evaluation is not None and config.eval_every:
            self._makes[EVALUATION] = evaluation
        self._prompt, self._credit, self._observe = prompt, credit, observe
        self._handles: dict[str, Handle] = {}
        self._up: dict[str, asyncio.Event] = {}
        self._load: Counter[str] = Counter()  # rollouts by environment service
        self._lives: Counter[str] = Counter()  # how often a service has died
        self._training = asyncio.Lock()  # held by whoever has steps done
        self._changed = asyncio.Event()
        self._stepping = False
        self._weights: asyncio.Task | None = None  # the newest version on its way to inference
        self._evaluations: list[asyncio.Task] = []
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """Trains to the last step, from where the journal and the checkpoint are.

        Raises:
          TrainingError: if services keep dying, or no rollout comes to a score any more.
          Exception: what a service has raised.
        """
        try:
            async with self._tasks:
                await self._start()
                watchers = [self._tasks.create_task(self._watch(name)) for name in self._handles]
                await self._restore()
                while not self.schedule.done:
                    self._changed.clear()
                    self._go_on()
                    await self._changed.wait()
                await self._weights
                await asyncio.gather(*self._evaluations)
                await self._forget(range(len(self._journal.prompts)))
                for watcher in watchers:
                    watcher.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        self.schedule.check()

    async def replace(self, name: str, make: Make) -> None:
        """Puts another service in the place of one, for new code, once that has nothing to do."""
        self._makes[name] = make
        self._up[name].clear()
        while self._load[name] or (name == TRAINING and self._stepping):
            await asyncio.sleep(0.01)
        await self._launcher.stop(name)  # and `_watch` starts it again

    def metrics(self) -> dict[str, float]:
        """How things stand."""
        return {**self.schedule.metrics(), "served": self.schedule.served}

    async def _start(self) -> None:
        """Starts all services; inference first, because environments must know it."""
        self._handles[INFERENCE] = await self._launcher.start(INFERENCE, self._makes[INFERENCE])
        make = self._environments(self._handles[INFERENCE])
        for number in range(self._config.workers):
            self._makes[f"{ENVIRONMENTS}-{number}"] = make

        async def start(name: str) -> None:
            self._handles[name] = await self._launcher.start(name, self._makes[name])

        rest = [name for name in self._makes if name != INFERENCE]
        await asyncio.gather(*map(start, rest))
        for name in self._makes:
            self._up[name] = asyncio.Event()
            self._up[name].set()

    async def _restore(self) -> None:
        """Goes on with what an earlier process has left."""
        journal, shape = self._journal, self._config.schedule
        version = len(journal.batches)
        await self._catch_up(version)
        groups = journal.open_groups(shape.group, shape.least)
        self.schedule.restore(version, len(journal.prompts), groups)
        await self._forget(set(range(len(journal.prompts))) - {group.index for group in groups})
        for earlier in filter(self._to_evaluate, range(version)):
            self._evaluations.append(self._tasks.create_task(self._evaluate(earlier)))
        self._weights = self._tasks.create_task(self._serve(version, None))
        await self._weights

    def _go_on(self) -> None:
        """Starts whatever can start now."""
        schedule, shape = self.schedule, self._config.schedule
        for job in schedule.admit():
            if job.group == len(self._journal.prompts):
                self._journal.begun(job.group, self._prompt(job.group), schedule.served)
            self._tasks.create_task(self._roll(job))
        if not self._stepping and (picked := schedule.batch()) is not None:
            self._stepping = True
            self._tasks.create_task(self._step(picked))
        if schedule.voids_in_a_row > shape.groups * (shape.staleness + 1):
            raise TrainingError("no rollout comes to a score any more; see the environments' log")

    async def _roll(self, job: Job) -> None:
        """Runs one rollout and takes note of how it ended."""
        name = await self._least_loaded()
        self._load[name] += 1
        try:
            rollout: Rollout = await self._handles[name].call(
                "rollout", self._journal.prompts[job.group], job.sample
            )
            failed = rollout.failed
        except LostError:
            failed = True
        finally:
            self._load[name] -= 1
        if failed:
            self.schedule.failed(job)
            if job.attempt == self._config.schedule.attempts:
                self._journal.lost(job)
        else:
            self._journal.scored(job, rollout)
            self.schedule.scored(job, rollout.oldest_version)
            self._observe("rollout", {"job": job, "rollout": rollout})
        self._changed.set()

    async def _least_loaded(self) -> str:
        while True:
            workers = [n for n in self._up if n.startswith(ENVIRONMENTS)]
            up = [name for name in workers if self._up[name].is_set()]
            if up:
                return min(up, key=lambda name: (self._load[name], name))
            waits = [asyncio.create_task(self._up[name].wait()) for name in workers]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def _step(self, picked: list[int]) -> None:
        """Trains on groups, then lets the new weights go their way."""
        step = self.schedule.version
        self._journal.batch(picked)
        metrics = await self._catch_up(len(self._journal.batches))
        version = self.schedule.trained(picked)
        self._observe("step", {"step": step, **metrics, **self.metrics()})
        self._weights = self._tasks.create_task(self._serve(version, self._weights))
        self._tasks.create_task(self._forget(picked))
        if self._to_evaluate(version):
            await self._weights  # a restart after the next step would find another version
        self._stepping = False
        self._changed.set()

    async def _catch_up(self, steps: int) -> Mapping[str, float]:
        """Has all batches of the journal trained up to a step; returns the last one's metrics."""
        metrics: Mapping[str, float] = {}
        async with self._training:
            while True:
                try:
                    step = await self._call(TRAINING, "position")
                    if step > len(self._journal.batches):
                        raise TrainingError(
                            f"training comes with {step} steps done, but the journal has "
                            f"{len(self._journal.batches)}: they are not of the same run"
                        )
                    while step < steps:
                        data = self._credit(self._groups(self._journal.batches[step]))
                        metrics = await self._call(TRAINING, "step", step, data)
                        step += 1
                    return metrics
                except LostError:
                    await asyncio.sleep(RETRY_S)

    def _groups(self, picked: Sequence[int]) -> list[Group]:
        journal = self._journal
        return [
            Group(task=journal.prompts[i], rollouts=tuple(journal.rollouts(i).values()))
            for i in sorted(picked)
        ]

    async def _forget(self, groups: Iterable[int]) -> None:
        """Lets the checkpoints of rollouts go that are over for good."""
        prompts = [self._journal.prompts[group] for group in groups]
        await self._insist(f"{ENVIRONMENTS}-0", "forget", prompts)

    async def _serve(self, version: int, before: asyncio.Task | None) -> None:
        """Brings a version to inference and, where that is due, to evaluation."""
        if before is not None:
            await before
        await self._publish(version)
        metrics = await self._insist(INFERENCE, "load", version)
        self.schedule.served = version
        self._changed.set()
        self._observe("weights", {"version": version, **metrics})
        if self._to_evaluate(version):
            await self._insist(EVALUATION, "pin", version)
            self._evaluations.append(self._tasks.create_task(self._evaluate(version)))

    async def _publish(self, version: int) -> None:
        """Has a version published by a training that has it, and not by one that comes back."""
        while True:
            life = self._lives[TRAINING]
            if await self._insist(TRAINING, "position") < version:
                await self._catch_up(version)
            await self._insist(TRAINING, "publish")
            if life == self._lives[TRAINING]:
                return

    def _to_evaluate(self, version: int) -> bool:
        if EVALUATION not in self._makes or version in self._journal.evaluations:
            return False
        return version % self._config.eval_every == 0 or version == self._config.schedule.steps

    async def _evaluate(self, version: int) -> None:
        found = await self._insist(EVALUATION, "evaluate", version)
        self._journal.evaluated(version, found)
        self._observe("evaluation", {"version": version, "found": found})
        await self._insist(EVALUATION, "forget", version)

    async def _insist(self, name: str, method: str, *args: Any) -> Any:
        """Calls a service, again if it dies during the call."""
        while True:
            try:
                return await self._call(name, method, *args)
            except LostError:
                await asyncio.sleep(RETRY_S)

    async def _call(self, name: str, method: str, *args: Any) -> Any:
        """Calls a service once it is up."""
        await self._up[name].wait()
        return await self._handles[name].call(method, *args)

    async def _watch(self, name: str) -> None:
        """Sees a service die, by itself or because it does not answer, and starts it again."""
        for _ in range(self._config.restarts + 1):
            reason = await self._death(name)
            self._lives[name] += 1
            self._up[name].clear()
            self._observe("death", {"service": name, "reason": reason})
            try:
                await self._launcher.start(name, self._makes[name])
            except LostError as error:
                reason = str(error)
            else:
                self._up[name].set()
        raise TrainingError(f"{name} has died {self._config.restarts + 1} times; {reason}")

    async def _death(self, name: str) -> str:
        dying = asyncio.create_task(self._launcher.died(name))
        try:
            while True:
                done, _ = await asyncio.wait([dying], timeout=self._config.ping_s)
                if done:
                    return dying.result()
                try:
                    async with asyncio.timeout(self._config.patience_s):
                        await self._handles[name].call("ping")
                except TimeoutError:
                    return f"{name}: no answer in {self._config.patience_s:g} s"
                except LostError:
                    pass  # `dying` is going to say more
        finally:
            dying.cancel()
