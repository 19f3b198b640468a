"""Which rollouts run, and which groups a step trains on: decisions alone.

No clock, no files, no processes: whoever calls says what has happened, so that a whole cluster can
be simulated and every decision repeated.

A group is all rollouts of one prompt. What happens to one, and to its rollouts::

    group:    begun --all rollouts have ended--> complete --picked by step n--> trained
                   +--fewer than `least` rollouts came to a score--> void

    rollout:  waiting -> running -> scored (a policy's failure is scored too)
                 ^          |
                 +--failed--+  through no fault of the policy, `attempts` times; then it is lost

Staleness. Step n trains version n into version n + 1. A group with tokens of version v, its oldest,
is trained at step v + S at the latest, where S is the bound. Call a group open from when it begins
until it is trained or void. With B groups a step, all open ones can be in time before step n if and
only if, for every v, at most B (v + S - n + 1) of them have an oldest version up to v. Both
decisions keep that true: a group begins only if it can be in time with all others, counting from
the version that is served at that moment, and a step picks the oldest complete groups and goes on
only if what stays open can be in time after it. Otherwise it waits. Nothing is ever dropped for its
age, so slow rollouts are not starved: the trainer waits for them instead.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from c2.config import ConfigError
from c2.records import NO_VERSION


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The shape of asynchronous training.

    Attributes:
      steps: training steps in all.
      groups: groups of one step.
      group: rollouts of one prompt.
      slots: rollouts that run at the same time.
      staleness: versions that a group's oldest token may be behind when it is trained; 0 trains
        in lock-step, on what the newest weights have sampled.
      least: rollouts with a score that a group needs.
      attempts: times that a rollout is tried before it is lost.
    """

    steps: int
    groups: int = 16
    group: int = 8
    slots: int = 128
    staleness: int = 2
    least: int = 2
    attempts: int = 3

    def __post_init__(self) -> None:
        for name in ("steps", "groups", "slots", "attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)}; legal: at least 1")
        if self.group < 2:
            raise ConfigError(f"group: {self.group}; legal: at least 2, a baseline needs others")
        if self.staleness < 0:
            raise ConfigError(f"staleness: {self.staleness}; legal: at least 0")
        if not 2 <= self.least <= self.group:
            raise ConfigError(f"least: {self.least}; legal: 2 to group = {self.group}")


class Job(NamedTuple):
    """A rollout to run; the same one again has the same group and sample."""

    group: int
    sample: int
    attempt: int


@dataclass(eq=False)
class OpenGroup:
    """An open group.

    Attributes:
      index: place in the order of prompts.
      version: the oldest version that its tokens can have.
      scored: the oldest version of every rollout with a score, by sample.
      lost: samples that were given up.
    """

    index: int
    version: int
    scored: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def ended(self, size: int) -> bool:
        """Whether nothing more will come."""
        return len(self.scored) + len(self.lost) == size


class Schedule:
    """The state of a run.

    Attributes:
      version: trained version, the number of steps done.
      served: the oldest version that new rollouts may be sampled from; set by the caller when
        inference has taken new weights.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self.version = self.served = 0
        self._config = config
        self._open: dict[int, OpenGroup] = {}
        self._complete: set[int] = set()
        self._waiting: deque[Job] = deque()
        self._running: dict[tuple[int, int], Job] = {}
        self._next = 0  # index of the next group
        self._counts: Counter[str] = Counter()

    @property
    def done(self) -> bool:
        """Whether all steps have been trained."""
        return self.version == self._config.steps

    @property
    def open(self) -> list[OpenGroup]:
        """Groups that have begun and are neither trained nor void."""
        return list(self._open.values())

    @property
    def running(self) -> list[Job]:
        """Rollouts that run."""
        return list(self._running.values())

    @property
    def voids_in_a_row(self) -> int:
        """How many groups have become void since the last one that became complete."""
        return self._counts["void_in_a_row"]

    def admit(self) -> list[Job]:
        """Rollouts to start now; those of older groups come first.

        A group begins where slots are free and staleness allows; none begins for which there is
        no step left.
        """
        jobs = []
        while len(self._running) < self._config.slots:
            if not self._waiting and not self._begin():
                break
            job = self._waiting.popleft()
            self._running[job.group, job.sample] = job
            self._counts["started"] += 1
            jobs.append(job)
        return jobs

    def scored(self, job: Job, oldest: int) -> None:
        """A rollout has come to a score.

        Args:
          job: the rollout.
          oldest: the oldest version of its tokens; `NO_VERSION` if it has none.
        """
        group = self._left(job)
        oldest = self.version if oldest == NO_VERSION else oldest
        if not group.version <= oldest <= self.version:
            raise ValueError(f"{job}: version {oldest}; legal: {group.version} to {self.version}")
        group.scored[job.sample] = oldest
        self._counts["scored"] += 1
        self._settle(group)

    def failed(self, job: Job) -> None:
        """A rollout has failed through no fault of the policy: it waits again or is lost."""
        group = self._left(job)
        self._counts["failed"] += 1
        if job.attempt < self._config.attempts:
            self._waiting.appendleft(job._replace(attempt=job.attempt + 1))
            return
        group.lost.add(job.sample)
        self._counts["lost"] += 1
        self._settle(group)

    def batch(self) -> list[int] | None:
        """The groups that the next step trains on; None as long as it has to wait.

        They stay open until `trained`.
        """
        size = self._config.groups
        if self.done or len(self._complete) < size:
            return None
        oldest = sorted(self._complete, key=lambda i: (self._open[i].version, i))[:size]
        left = [group.version for i, group in self._open.items() if i not in oldest]
        return oldest if self._in_time(left, self.version + 1) else None

    def trained(self, groups: Iterable[int]) -> int:
        """A step has been done on these groups; returns the new version."""
        for index in groups:
            self._complete.remove(index)
            group = self._open.pop(index)
            self._counts["trained"] += len(group.scored)
            oldest = self.version - group.version
            self._counts["max_staleness"] = max(self._counts["max_staleness"], oldest)
        self.version += 1
        return self.version

    def restore(self, version: int, begun: int, groups: Iterable[OpenGroup]) -> None:
        """Goes on where an earlier process stopped, with nothing running.

        Args:
          version: trained version.
          begun: groups begun so far.
          groups: those that are open. Rollouts without an entry run again, and may go on behind
            tokens that they have, so such a group keeps its version.
        """
        self.version = self.served = version
        self._next = begun
        for group in sorted(groups, key=lambda group: group.index):
            known = {*group.scored, *group.lost}
            new = [i for i in range(self._config.group) if i not in known]
            scored = {s: version if v == NO_VERSION else v for s, v in group.scored.items()}
            group.scored = scored
            self._open[group.index] = group
            self._waiting += [Job(group.index, i, 1) for i in new]
            # what the earlier process had counted
            self._counts.update(
                started=len(known), scored=len(group.scored), failed=len(group.lost)
            )
            self._counts["lost"] += len(group.lost)
            if not new:
                self._settle(group)

    def metrics(self) -> dict[str, int]:
        """Counts since the start, and how things stand."""
        names = ("started", "scored", "failed", "lost", "trained", "void")
        return {name: self._counts[name] for name in (*names, "max_staleness")} | {
            "begun": self._next,
            "open": len(self._open),
            "complete": len(self._complete),
            "waiting": len(self._waiting),
            "running": len(self._running),
        }

    def check(self) -> None:
        """Raises AssertionError unless every rollout has left exactly once, or is still here."""
        counts, size = self._counts, self._config.group
        assert counts["started"] == counts["scored"] + counts["failed"] + len(self._running)
        kept = sum(len(group.scored) for group in self._open.values())
        assert counts["scored"] == counts["trained"] + counts["void_scored"] + kept
        for group in self._open.values():
            missing = size - len(group.scored) - len(group.lost)
            here = [job for job in (*self._waiting, *self.running) if job.group == group.index]
            assert len(here) == missing and (group.index in self._complete) == (not missing)

    def _begin(self) -> bool:
        config = self._config
        steps_left = config.steps - self.version
        versions = [*(group.version for group in self._open.values()), self.served]
        if len(versions) > steps_left * config.groups or not self._in_time(versions, self.version):
            return False
        self._open[self._next] = OpenGroup(self._next, self.served)
        self._waiting += [Job(self._next, i, 1) for i in range(config.group)]
        self._next += 1
        return True

    def _left(self, job: Job) -> OpenGroup:
        if self._running.get((job.group, job.sample)) != job:
            raise ValueError(f"{job}: it does not run")
        del self._running[job.group, job.sample]
        return self._open[job.group]

    def _settle(self, group: OpenGroup) -> None:
        if not group.ended(self._config.group):
            return
        if len(group.scored) < self._config.least:
            del self._open[group.index]
            self._counts["void"] += 1
            self._counts["void_in_a_row"] += 1
            self._counts["void_scored"] += len(group.scored)
        else:
            self._counts["void_in_a_row"] = 0
            group.version = min(group.scored.values())
            self._complete.add(group.index)

    def _in_time(self, versions: Iterable[int], step: int) -> bool:
        """Whether groups with these oldest versions can all be trained in time from a step on."""
        config = self._config
        return all(
            count <= config.groups * (version + config.staleness - step + 1)
            for count, version in enumerate(sorted(versions), start=1)
        )
