"""The conformance suite that Inspect AI gives to providers of sandboxes, on every backend here.

`KNOWN` names what is refused, and why.
"""

import os
import warnings

import anyio
import pytest

from c2.sandbox.protocol import SandboxError

pytest.importorskip("inspect_ai", reason="needs the extra `parity`")
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from c2.sandbox.inspect_sandbox import BACKENDS, Config, Sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.parity, pytest.mark.slow]
KNOWN = {
    "test_exec_as_user": "inside is one user without rights, who cannot become or make another",
    "test_exec_large_command": "a request has at most 1 MiB, and an output at most 256 KiB",
}
AS_ROOT = "without walls commands are root's, who may read and write everything"
KNOWN_AS_ROOT = {
    "test_read_file_not_allowed": AS_ROOT,
    "test_write_text_file_without_permissions": AS_ROOT,
    "test_write_binary_file_without_permissions": AS_ROOT,
}


@pytest.fixture(scope="module")
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="module", params=list(BACKENDS))
def config(request, anyio_backend):
    return Config(backend=request.param, memory_mb=512)


@pytest.fixture(scope="module")
async def environment(config):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the plain backend
        try:
            await Sandbox.task_init("task", config)
        except SandboxError as error:
            pytest.skip(str(error))
    made = await Sandbox.sample_init("task", config, {})
    yield made["default"]
    await Sandbox.sample_cleanup("task", config, made, False)
    await Sandbox.task_cleanup("task", config, True)


@pytest.fixture
def sandbox_env(request, config, environment):
    root = config.backend == "plain" and os.getuid() == 0
    known = KNOWN | (KNOWN_AS_ROOT if root else {})
    if why := known.get(request.node.originalname):
        request.node.add_marker(pytest.mark.xfail(reason=why, strict=True))
    return environment


async def test_backend_ends_with_its_last_task():
    config = Config(backend="bwrap")
    for _ in range(2):
        await Sandbox.task_init("task", config)
    backend = Sandbox._backends["bwrap"]
    made = await Sandbox.sample_init("task", config, {})
    await Sandbox.task_cleanup("task", config, True)
    assert (await made["default"].exec(["echo", "hi"])).stdout == "hi\n"
    await Sandbox.sample_cleanup("task", config, made, True)
    await Sandbox.task_cleanup("task", config, True)
    with pytest.raises(SandboxError, match="node process"):
        await anyio.to_thread.run_sync(backend.add_layer, "/")


async def test_other_settings_are_refused():
    with pytest.raises(SandboxError, match="legal is a Config"):
        await Sandbox.task_init("task", "compose.yaml")
    assert Sandbox.config_deserialize({"backend": "zygote"}) == Config(backend="zygote")
