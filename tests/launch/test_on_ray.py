"""What calls of actors end in, without a cluster; `test_controller_processes` has one."""

import asyncio
from types import SimpleNamespace

import pytest

from c2.rl.calls import LostError

pytest.importorskip("ray", reason="needs the extra `ray`")


def test_an_answer_that_went_down_with_its_node_is_lost_and_the_next_is_asked_of_the_new_actor(
    monkeypatch,
):
    import ray
    from ray.exceptions import ActorDiedError, ObjectReconstructionFailedError

    from launch.on_ray import RayHandle

    async def answer(method, args):
        if ends:
            raise ends.pop()
        return method, args

    def find(name, namespace):
        found.append((name, namespace))
        return SimpleNamespace(call=SimpleNamespace(remote=answer))

    monkeypatch.setattr(ray, "get_actor", find)
    ends = [ActorDiedError(), ObjectReconstructionFailedError("ab")]
    found = []

    async def calls():
        handle = RayHandle("environments-0", "run")
        for _ in range(2):
            with pytest.raises(LostError, match="environments-0: "):
                await handle.call("rollout", "task", 1)
        for _ in range(2):
            assert await handle.call("rollout", "task", 1) == ("rollout", ("task", 1))

    asyncio.run(calls())
    assert found == [("environments-0", "run")] * 3
