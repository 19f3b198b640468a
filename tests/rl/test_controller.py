"""The controller with services that compute nothing: who is trained, and what deaths change."""

import asyncio
from collections import Counter
from functools import partial

import pytest

from c2.rl.controller import Controller, ControllerConfig, TrainingError
from c2.rl.in_process import InProcess
from c2.rl.journal import Journal
from c2.rl.schedule import ScheduleConfig
from c2.rl.simulated import Cluster, Environments, Evaluation, Inference, Training


def make_controller(
    cluster,
    journal,
    launcher=None,
    *,
    environments=None,
    times=(5.0, 5.0),
    restarts=10_000,
    **schedule,
):
    seen = []
    ping_s, patience_s = times
    shape = {"steps": 8, "groups": 3, "group": 4, "slots": 10, "staleness": 2} | schedule
    config = ControllerConfig(
        schedule=ScheduleConfig(**shape),
        workers=2,
        eval_every=3,
        ping_s=ping_s,
        patience_s=patience_s,
        restarts=restarts,
    )
    controller = Controller(
        config,
        launcher or InProcess(),
        journal,
        training=partial(Training, cluster),
        inference=partial(Inference, cluster),
        environments=environments or (lambda handle: partial(Environments, cluster, handle)),
        evaluation=partial(Evaluation, cluster),
        prompt=lambda index: f"task-{index}",
        credit=lambda groups: groups,
        observe=lambda kind, event: seen.append((kind, event)),
    )
    controller.seen = seen
    return controller


def run_to_the_end(cluster, path, **schedule):
    async def body():
        with Journal(path) as journal:
            controller = make_controller(cluster, journal, **schedule)
            async with asyncio.timeout(60):
                await controller.run()
            return controller, journal

    return asyncio.run(body())


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_prompt_is_trained_once_and_none_too_late(tmp_path, staleness):
    cluster = Cluster()
    controller, journal = run_to_the_end(cluster, tmp_path / "journal", staleness=staleness)
    assert Counter(cluster.trained()) == Counter(f"task-{i}" for i in range(24))
    steps = [event for kind, event in controller.seen if kind == "step"]
    assert len(steps) == 8 and all(0 <= s["staleness"] <= staleness for s in steps)
    assert controller.schedule.metrics()["trained"] == cluster.started == 96
    assert journal.evaluations == {v: {"measured": float(v)} for v in (0, 3, 6, 8)}
    assert not [name for name in cluster.store if name.startswith("pinned")]
    assert [e["version"] for kind, e in controller.seen if kind == "weights"] == list(range(9))


def test_failures_of_the_infrastructure_leave_no_row(tmp_path):
    cluster = Cluster(fails=0.3, seed=3)
    controller, journal = run_to_the_end(cluster, tmp_path / "journal", attempts=1)
    counts = controller.schedule.metrics()
    assert (
        counts["lost"] == counts["failed"] > 0
        and counts["failed"] + counts["scored"] == counts["started"]
    )
    assert len(journal.batches) == 8 and all(len(batch) == 3 for batch in journal.batches)
    with Journal(tmp_path / "journal") as journal:
        rows = sum(len(journal.rollouts(group)) for batch in journal.batches for group in batch)
    assert rows == counts["trained"] < 96


def test_a_cluster_in_which_everything_fails_ends_in_an_error(tmp_path):
    with pytest.raises(TrainingError, match="no rollout comes to a score"):
        run_to_the_end(Cluster(fails=1.0), tmp_path / "journal")


def test_a_service_that_raises_ends_training_with_its_error(tmp_path):
    class Faulty(Environments):
        async def rollout(self, prompt, sample):
            raise ValueError(f"{prompt} has no tests")

    async def body():
        cluster = Cluster()
        with Journal(tmp_path / "journal") as journal:
            make = lambda handle: partial(Faulty, cluster, handle)  # noqa: E731
            await make_controller(cluster, journal, environments=make).run()

    with pytest.raises(ValueError, match="task-0 has no tests"):
        asyncio.run(body())


def test_a_checkpoint_without_its_journal_is_refused(tmp_path):
    cluster = Cluster()
    cluster.store["checkpoint"] = (5, "")
    with pytest.raises(TrainingError, match="5 steps done, but the journal has 0"):
        run_to_the_end(cluster, tmp_path / "journal")


def test_a_version_that_died_with_its_training_is_trained_again_before_it_is_published(tmp_path):
    cluster, launcher, deaths = Cluster(checkpoint_every=3), InProcess(), [1, 2, 5]

    class Dying(Training):
        async def publish(self):
            if self.steps in deaths:
                deaths.remove(self.steps)
                launcher.kill("training")
                await asyncio.sleep(0)
            await super().publish()

    async def body():
        with Journal(tmp_path / "journal") as journal:
            controller = make_controller(cluster, journal, launcher, staleness=0)
            controller._makes["training"] = partial(Dying, cluster)
            async with asyncio.timeout(60):
                await controller.run()

    asyncio.run(body())
    assert not deaths
    assert Counter(cluster.trained()) == Counter(f"task-{i}" for i in range(24))


def interrupted(cluster, path, *, kills, **schedule):
    """Kills services, and now and then all of them with the controller, at random moments."""
    restarts = 0

    async def life(budget):
        launcher = InProcess()
        with Journal(path) as journal:
            controller = make_controller(cluster, journal, launcher, attempts=99, **schedule)
            running = asyncio.create_task(controller.run())
            while not running.done():
                moment = cluster.started + cluster.random.randrange(7)
                while cluster.started < moment and not running.done():
                    await asyncio.sleep(0)
                await cluster.pause()
                if budget[0] and launcher.services:
                    budget[0] -= 1
                    if not cluster.random.randrange(6):
                        running.cancel()
                        break
                    launcher.kill(cluster.random.choice(sorted(launcher.services)))
            try:
                async with asyncio.timeout(60):
                    await running
            except asyncio.CancelledError:
                return False
            finally:
                await launcher.close()
            return True

    budget = [kills]
    while not asyncio.run(life(budget)):
        restarts += 1
    assert not budget[0], "it was over before all kills had come"
    return restarts


@pytest.mark.parametrize("checkpoint_every", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_times_lose_and_double_no_prompt(tmp_path, seed, checkpoint_every):
    cluster = Cluster(seed=seed, checkpoint_every=checkpoint_every)
    restarts = interrupted(cluster, tmp_path / "journal", kills=50, steps=30)
    assert restarts > 0
    assert Counter(cluster.trained()) == Counter(f"task-{i}" for i in range(90))
    with Journal(tmp_path / "journal") as journal:
        assert sorted(journal.evaluations) == [*range(0, 31, 3)]


@pytest.mark.parametrize("seed", range(2))
def test_lock_step_ends_in_the_same_weights_however_often_it_is_killed(tmp_path, seed):
    whole = Cluster(seed=100)
    run_to_the_end(whole, tmp_path / "whole", staleness=0, steps=30)
    cluster = Cluster(seed=seed, checkpoint_every=2)
    interrupted(cluster, tmp_path / "killed", kills=50, staleness=0, steps=30)
    assert cluster.store["checkpoint"] == whole.store["checkpoint"]


def test_a_service_that_does_not_answer_is_replaced(tmp_path):
    class Mute(Environments):
        async def ping(self):
            await asyncio.sleep(60)

    async def body():
        cluster = Cluster()
        launcher = InProcess()
        with Journal(tmp_path / "journal") as journal:
            first = [True]

            def make(handle):
                def environments():
                    kind = Mute if first and first.pop() else Environments
                    return kind(cluster, handle)

                return environments

            controller = make_controller(
                cluster, journal, launcher, environments=make, times=(0.01, 0.01), steps=60
            )
            async with asyncio.timeout(60):
                await controller.run()
            return [event["reason"] for kind, event in controller.seen if kind == "death"]

    reasons = asyncio.run(body())
    assert reasons and "no answer in 0.01 s" in reasons[0]


def test_code_is_replaced_once_a_service_has_nothing_to_do(tmp_path):
    class New(Environments):
        rollouts = 0

        async def rollout(self, prompt, sample):
            New.rollouts += 1
            return await super().rollout(prompt, sample)

    async def body():
        cluster, launcher = Cluster(), InProcess()
        with Journal(tmp_path / "journal") as journal:
            controller = make_controller(cluster, journal, launcher, steps=40)
            running = asyncio.create_task(controller.run())
            while len(journal.batches) < 5:
                await asyncio.sleep(0)
            handle = controller._handles["inference"]
            for number in range(2):
                await controller.replace(f"environments-{number}", partial(New, cluster, handle))
            await running
            return controller.schedule.metrics(), cluster

    counts, cluster = asyncio.run(body())
    assert New.rollouts > 0 and counts["failed"] == 0  # nobody was interrupted
    assert len(cluster.trained()) == 120


def test_services_that_keep_dying_end_training(tmp_path):
    async def body():
        launcher = InProcess()
        with Journal(tmp_path / "journal") as journal:
            controller = make_controller(Cluster(), journal, launcher, restarts=2, steps=10_000)
            running = asyncio.create_task(controller.run())
            while not running.done():
                launcher.kill("inference")
                await asyncio.sleep(0.01)
            with pytest.raises(TrainingError, match=r"inference has died 3 times; .*killed"):
                await running

    asyncio.run(body())
