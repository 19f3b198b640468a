"""The schedule in simulated clusters: staleness, liveness, fairness, and a ledger that adds up."""

import heapq
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from c2.config import ConfigError
from c2.records import NO_VERSION
from c2.rl.schedule import OpenGroup, Schedule, ScheduleConfig


class Cluster:
    """A discrete-event simulation: rollouts with log-normal durations, a trainer, dying workers.

    A rollout begins with the version of the moment and takes new weights in flight, which are
    served some time after they were trained.
    """

    def __init__(self, config, *, seed=0, sigma=1.0, step_s=1.0, dies=0.0, sync_s=0.1):
        self.schedule, self.config = Schedule(config), config
        self.rng = np.random.default_rng(seed)
        self.sigma, self.step_s, self.dies, self.sync_s = sigma, step_s, dies, sync_s
        self.now, self.events, self.busy = 0.0, [], None
        self.length = {}  # of every rollout, whatever the attempt
        self.kept, self.staleness, self.trained = [], [], Counter()
        self.oldest = defaultdict(list)

    def run(self):
        while not self.schedule.done:
            for job in self.schedule.admit():
                self.start(job)
            picked = None if self.busy else self.schedule.batch()
            if picked is not None:
                self.busy = picked
                self.push(self.step_s, "step", (picked,))
            assert self.events, "a deadlock: nothing runs and nothing can start"
            self.now, _, kind, value = heapq.heappop(self.events)
            getattr(self, kind)(*value)
        self.schedule.check()
        return self

    def start(self, job):
        size = self.length.setdefault(job[:2], self.rng.lognormal(0, self.sigma))
        lives = self.rng.exponential(1 / self.dies) if self.dies else np.inf
        self.push(min(size, lives), "end", (job, self.schedule.served, lives < size))

    def push(self, after, kind, value):
        heapq.heappush(self.events, (self.now + after, len(self.events), kind, value))

    def end(self, job, version, died):
        if died:
            self.schedule.failed(job)
            return
        self.schedule.scored(job, version)
        self.oldest[job.group].append((version, self.length[job[:2]]))

    def step(self, picked):
        for group in picked:
            versions, lengths = zip(*self.oldest.pop(group), strict=True)
            self.staleness.append(self.schedule.version - min(versions))
            self.kept += lengths
            self.trained[group] += 1
        self.push(self.sync_s, "sync", (self.schedule.trained(picked),))
        self.busy = None

    def sync(self, version):
        self.schedule.served = version


def distance(a, b):
    """The Kolmogorov-Smirnov distance of two samples."""
    a, b = np.sort(a), np.sort(b)
    at = np.concatenate([a, b])
    below = (np.searchsorted(x, at, side="right") / len(x) for x in (a, b))
    return np.abs(np.subtract(*below)).max()


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("dies", [0.0, 0.02])
def test_ten_thousand_steps_stay_in_bounds_and_starve_nobody(staleness, dies):
    config = ScheduleConfig(steps=10_000, groups=2, group=2, slots=9, staleness=staleness)
    cluster = Cluster(config, seed=staleness, sigma=1.2, dies=dies).run()
    assert max(cluster.staleness) == min(staleness, max(cluster.staleness)) <= staleness
    assert staleness == 0 or max(cluster.staleness) > 0  # it did run ahead
    assert set(cluster.trained.values()) == {1} and sum(cluster.trained.values()) == 20_000
    generated = list(cluster.length.values())
    if not dies:
        assert sorted(generated) == sorted(cluster.kept)  # every rollout is trained
    assert distance(generated, cluster.kept) < 0.015


def test_dropping_the_late_instead_would_starve_long_rollouts():
    """The distance above can be large: rollouts longer than some age are what dropping loses."""
    lengths = np.random.default_rng(0).lognormal(0, 1.2, 20_000)
    assert distance(lengths, lengths[lengths < 4]) > 0.1


def test_running_ahead_takes_less_time_than_lock_step():
    times = []
    for staleness in (0, 2):
        config = ScheduleConfig(steps=300, groups=4, group=4, slots=32, staleness=staleness)
        times.append(Cluster(config, sigma=1.0, step_s=2.0).run().now)
    assert times[0] > 1.5 * times[1]


@settings(max_examples=40)
@given(st.data())
def test_any_order_of_events_keeps_the_ledger(data):
    draw = data.draw
    group = draw(st.integers(2, 3))
    config = ScheduleConfig(
        steps=draw(st.integers(1, 5)),
        groups=draw(st.integers(1, 3)),
        group=group,
        slots=draw(st.integers(1, 7)),
        staleness=draw(st.integers(0, 3)),
        least=draw(st.integers(2, group)),
        attempts=draw(st.integers(1, 2)),
    )
    schedule, began, trained, ages = Schedule(config), {}, [], []
    for _ in range(200):
        for job in schedule.admit():
            began[job] = schedule.served
        schedule.check()
        picked = schedule.batch()
        if schedule.served < schedule.version and (
            draw(st.booleans()) or not (schedule.running or picked)
        ):
            schedule.served += 1
            continue
        assert schedule.running or picked  # else nothing would ever happen again
        if picked is not None and (not schedule.running or draw(st.booleans())):
            versions = [g.version for g in schedule.open if g.index in picked]
            ages += [schedule.version - version for version in versions]
            schedule.trained(picked)
            trained += picked
        else:
            job = draw(st.sampled_from(schedule.running))
            if draw(st.integers(0, 4)):
                schedule.scored(job, draw(st.integers(began[job], schedule.version)))
            else:
                schedule.failed(job)
        if schedule.done:
            break
    schedule.check()
    assert len(set(trained)) == len(trained)
    assert max(ages, default=0) <= config.staleness
    if schedule.done:
        assert len(trained) == config.steps * config.groups and not schedule.metrics()["open"]


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 3))
def test_a_restart_goes_on_with_the_same_groups_in_the_same_bounds(seed, staleness):
    """Stopped anywhere, with finished rollouts saved: each prompt is trained once, as without."""
    config = ScheduleConfig(steps=6, groups=2, group=3, slots=8, staleness=staleness)
    rng = np.random.default_rng(seed)
    schedule, trained, ages = Schedule(config), [], []
    while not schedule.done:
        schedule.served = schedule.version
        schedule.admit()
        picked = schedule.batch()
        if picked is not None:
            ages += [schedule.version - g.version for g in schedule.open if g.index in picked]
            schedule.trained(picked)
            trained += picked
        elif schedule.running:
            job = schedule.running[rng.integers(len(schedule.running))]
            schedule.scored(job, schedule.version)
        if rng.random() < 0.1:
            saved = [
                OpenGroup(g.index, g.version, dict(g.scored), set(g.lost)) for g in schedule.open
            ]
            version, begun = schedule.version, schedule.metrics()["begun"]
            schedule = Schedule(config)
            schedule.restore(version, begun, saved)
            schedule.check()
    assert sorted(trained) == list(range(12)) and max(ages) <= staleness


def test_a_failure_that_is_nobodys_fault_leaves_no_row_and_a_group_of_one_is_void():
    config = ScheduleConfig(steps=1, groups=1, group=3, slots=3, staleness=0, attempts=1)
    schedule = Schedule(config)
    first = schedule.admit()
    schedule.failed(first[0])
    schedule.failed(first[1])
    schedule.scored(first[2], 0)
    assert schedule.metrics()["void"] == 1 and schedule.batch() is None
    second = schedule.admit()  # another prompt takes its place
    assert {job.group for job in second} == {1}
    schedule.failed(second[0])
    for job in second[1:]:
        schedule.scored(job, 0)
    assert schedule.batch() == [1]
    schedule.trained([1])
    assert schedule.done and not schedule.admit()
    assert schedule.metrics()["trained"] == 2
    schedule.check()


def test_a_rollout_without_a_token_is_of_no_age():
    schedule = Schedule(ScheduleConfig(steps=9, groups=1, group=2, slots=9, staleness=0))
    first, second = schedule.admit()
    schedule.scored(first, NO_VERSION)
    schedule.scored(second, 0)
    assert schedule.batch() == [0]


def test_lock_step_begins_nothing_before_new_weights_are_served():
    schedule = Schedule(ScheduleConfig(steps=2, groups=1, group=2, slots=9, staleness=0))
    for job in schedule.admit():
        schedule.scored(job, 0)
    schedule.trained(schedule.batch())
    assert not schedule.admit()
    schedule.served = 1
    assert [job.group for job in schedule.admit()] == [1, 1]


def test_a_failed_rollout_is_tried_again_before_others_begin():
    schedule = Schedule(ScheduleConfig(steps=9, groups=1, group=2, slots=2, attempts=2))
    first, second = schedule.admit()
    schedule.failed(first)
    assert schedule.admit() == [first._replace(attempt=2)]
    schedule.failed(first._replace(attempt=2))
    assert schedule.metrics()["lost"] == 1
    with pytest.raises(ValueError, match="does not run"):
        schedule.scored(first, 0)
    schedule.scored(second, 0)
    schedule.check()


def test_the_oldest_groups_are_waited_for():
    """With a bound of 1, version 0's group has to be in step 1, whatever else is complete."""
    schedule = Schedule(ScheduleConfig(steps=9, groups=1, group=2, slots=9, staleness=1))
    jobs = schedule.admit()
    assert {job.group for job in jobs} == {0, 1}
    for job in jobs[2:]:
        schedule.scored(job, 0)
    assert schedule.batch() == [1]  # group 0 is slow, and still has a step
    schedule.served = schedule.trained([1])
    later = [job for job in schedule.admit() if job.group == 2]
    for job in later:
        schedule.scored(job, 1)
    assert schedule.batch() is None  # now it has none
    for job in jobs[:2]:
        schedule.scored(job, 0)
    assert schedule.batch() == [0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 0), ("groups", 0), ("group", 1), ("staleness", -1), ("least", 9), ("attempts", 0)],
)
def test_a_config_without_sense_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field}: .*legal"):
        ScheduleConfig(**{"steps": 1, field: value})
