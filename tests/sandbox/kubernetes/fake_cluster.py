"""A cluster of one process: the few calls of the API that are used, with pods in bubblewrap.

Objects are checked as the API server would: custom ones against the schemas of agent-sandbox, in
`agent_sandbox_v1beta1.json` (of kubernetes-sigs/agent-sandbox, Apache-2.0; without descriptions and
without what pods and network policies are made of), others against the official client's models.
"""

import asyncio
import contextlib
import copy
import datetime
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

from aiohttp import WSMsgType, web
from kubernetes import client

from c2.sandbox.command import find_bwrap

KINDS = json.loads(Path(__file__).with_name("agent_sandbox_v1beta1.json").read_text())
SCALARS = {"str": str, "bool": bool, "int": int, "float": float, "datetime": str}
JSON_TYPES = {
    "object": dict, "array": list, "string": str, "integer": int, "boolean": bool,
}  # fmt: skip


def check(body: dict) -> None:
    """Raises ValueError for what an API server would refuse, or drop without a word."""
    kind = body["kind"]
    if kind in KINDS:
        assert body["apiVersion"] == f"{KINDS[kind]['group']}/v1beta1"
        known = {key: value for key, value in body.items() if key != "metadata"}
        _check_schema(known, KINDS[kind]["schema"], kind)
        _check_model(body["metadata"], "V1ObjectMeta", "metadata")
        if pod := body["spec"].get("podTemplate"):
            _check_model(pod["spec"], "V1PodSpec", "pod")
    else:
        _check_model(body, f"V1{kind}", kind)


def _check_schema(value, schema: dict, at: str) -> None:
    if not isinstance(value, JSON_TYPES[schema["type"]]):
        raise ValueError(f"{at} is not of type {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{at} is none of {schema['enum']}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        raise ValueError(f"{at} does not match {schema['pattern']}")
    if value < schema.get("minimum", value) if isinstance(value, int) else False:
        raise ValueError(f"{at} is too small")
    if schema.get("format") == "date-time":
        datetime.datetime.fromisoformat(value)
    if isinstance(value, dict) and "properties" in schema:
        for name in schema.get("required", ()):
            if name not in value:
                raise ValueError(f"{at}.{name} is missing")
        for name, inner in value.items():
            if name not in schema["properties"]:
                raise ValueError(f"{at}.{name} is unknown")
            _check_schema(inner, schema["properties"][name], f"{at}.{name}")
    if isinstance(value, list) and "items" in schema:
        for inner in value:
            _check_schema(inner, schema["items"], at)


def _check_model(value, kind: str, at: str) -> None:
    if kind in SCALARS:
        if not isinstance(value, SCALARS[kind]):
            raise ValueError(f"{at} is not of type {kind}")
    elif kind.startswith("list["):
        for inner in value:
            _check_model(inner, kind[5:-1], at)
    elif kind.startswith("dict["):
        for inner in value.values():
            _check_model(inner, kind[5:-1].split(", ")[1], at)
    elif kind != "object":
        model = getattr(client, kind)
        names = {outer: inner for inner, outer in model.attribute_map.items()}
        for name, inner in value.items():
            if name not in names:
                raise ValueError(f"{at}.{name} is unknown")
            _check_model(inner, model.openapi_types[names[name]], f"{at}.{name}")
        given = {names[name]: inner for name, inner in value.items()}
        model(**given)  # raises ValueError if something is missing


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


class FakeCluster:
    """Runs until `close`.

    Attributes:
      objects: by kind (in the plural) and name.
      requests: (method, path) of all that was asked.
      ready: whether claims become ready.
      url: of the server.
    """

    def __init__(self, manifests: list[dict], folder: Path) -> None:
        self.objects: dict[str, dict[str, dict]] = {kind["plural"]: {} for kind in KINDS.values()}
        self.files: dict[str, dict[str, str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.ready, self.token = True, "secret-token"
        self._folder, self._count = folder, 0
        self._pods: dict[str, asyncio.subprocess.Process] = {}
        for body in manifests:
            if body["kind"] in KINDS:
                plural = KINDS[body["kind"]]["plural"]
                self.objects[plural][body["metadata"]["name"]] = body
            if body["kind"] == "ConfigMap":
                self.files[body["metadata"]["name"]] = body["data"]
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)))
        self._thread.start()
        started.wait()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join()

    def claims(self) -> dict[str, dict]:
        return self.objects["sandboxclaims"]

    def kill_pod(self, claim: str) -> None:
        """As if a node had died."""
        name = self.claims()[claim]["status"]["sandbox"]["name"]
        _kill(self._pods[f"pod-of-{name}"])

    def finish(self, claim: str) -> None:
        """As if the container had ended."""
        self._condition(self.claims()[claim], "Finished", "PodFailed")
        self.kill_pod(claim)

    async def _run(self, started: threading.Event) -> None:
        self._loop, self._done = asyncio.get_running_loop(), asyncio.Event()
        self._changed = asyncio.Condition()
        app = web.Application()
        group = r"/apis/{group}/v1beta1/namespaces/c2-sandboxes/{plural}"
        app.router.add_get("/api/v1/namespaces/c2-sandboxes/pods/{name}/exec", self._exec)
        app.router.add_route("*", group, self._collection)
        app.router.add_route("*", group + "/{name}", self._object)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        controller = asyncio.create_task(self._control())
        await self._done.wait()
        controller.cancel()
        for pod in self._pods.values():
            _kill(pod)
        await runner.cleanup()

    async def _control(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            now = datetime.datetime.now(datetime.UTC)
            for name, claim in list(self.claims().items()):
                life = claim["spec"]["lifecycle"]
                # The API keeps whole seconds; a claim of the same second is not yet late.
                end = datetime.datetime.fromisoformat(life["shutdownTime"])
                if end + datetime.timedelta(seconds=1) <= now:
                    await self._delete(name)
                elif "status" not in claim and self.ready:
                    self._count += 1
                    sandbox = f"{claim['spec']['warmPoolRef']['name']}-warm-{self._count}"
                    annotations = {"agents.x-k8s.io/pod-name": f"pod-of-{sandbox}"}
                    body = {"metadata": {"name": sandbox, "annotations": annotations}}
                    self.objects["sandboxes"][sandbox] = body
                    claim["status"] = {"sandbox": {"name": sandbox}}
                    self._condition(claim, "Ready", "DependenciesReady")
                    await self._tell()

    def _condition(self, claim: dict, kind: str, reason: str) -> None:
        found = claim["status"].setdefault("conditions", [])
        found.append({"type": kind, "status": "True", "reason": reason})

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _delete(self, name: str) -> None:
        claim = self.claims().pop(name)
        sandbox = claim.get("status", {}).get("sandbox", {}).get("name")
        if pod := self._pods.pop(f"pod-of-{sandbox}", None):
            _kill(pod)
        await self._tell()

    def _ask(self, request: web.Request) -> None:
        self.requests.append((request.method, request.path))
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized()

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        self._ask(request)
        found = self.objects[request.match_info["plural"]]
        if request.method == "POST":
            body = await request.json()
            try:
                check(body)
            except ValueError as error:
                return web.json_response({"message": str(error)}, status=422)
            if body["metadata"]["name"] in found:
                return web.json_response({}, status=409)
            found[body["metadata"]["name"]] = body
            return web.json_response(body, status=201)
        if request.method == "DELETE":
            words = request.query["labelSelector"].split(",")
            for name, body in list(found.items()):
                labels = body["metadata"]["labels"]
                pairs = [re.fullmatch("(.*?)(!?=)(.*)", word).groups() for word in words]
                if all((labels.get(key) == value) == (sign == "=") for key, sign, value in pairs):
                    await self._delete(name)
            return web.json_response({})
        return await self._watch(request, found)

    async def _watch(self, request: web.Request, found: dict) -> web.StreamResponse:
        assert request.query["watch"] == "True"
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        response = web.StreamResponse()
        await response.prepare(request)
        last = None
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    async with self._changed:
                        if found.get(name) == last:
                            await self._changed.wait()
                    kind = "DELETED" if name not in found else "MODIFIED" if last else "ADDED"
                    last = copy.deepcopy(found.get(name)) or last
                    event = {"type": kind, "object": last}
                    await response.write(json.dumps(event).encode() + b"\n")
                    if kind == "DELETED":
                        break
        return response

    async def _object(self, request: web.Request) -> web.Response:
        self._ask(request)
        found, name = self.objects[request.match_info["plural"]], request.match_info["name"]
        if name not in found:
            return web.json_response({}, status=404)
        if request.method == "PATCH":
            assert request.content_type == "application/merge-patch+json"
            patch = await request.json()
            found[name]["spec"]["lifecycle"] |= patch["spec"]["lifecycle"]
        body = found[name]
        if request.method == "DELETE":
            await self._delete(name)
        return web.json_response(body)

    async def _exec(self, request: web.Request) -> web.WebSocketResponse:
        self._ask(request)
        connection = web.WebSocketResponse(protocols=("v4.channel.k8s.io",), max_msg_size=0)
        await connection.prepare(request)
        (pool,) = self.objects["sandboxtemplates"].values()
        pod = pool["spec"]["podTemplate"]["spec"]
        command = [*self._container(pod), *request.query.getall("command")]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._pods[request.match_info["name"]] = process

        async def forward(stream, channel: bytes) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await stream.read(1 << 16):
                    await connection.send_bytes(channel + data)

        async def finish() -> None:
            await asyncio.gather(forward(process.stdout, b"\1"), forward(process.stderr, b"\2"))
            await connection.close()

        outputs = asyncio.create_task(finish())
        async for message in connection:
            if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                process.stdin.write(message.data[1:])
        _kill(process)
        await process.wait()
        await outputs
        return connection

    def _container(self, pod: dict) -> list[str]:
        """Bubblewrap with what the pod's spec says of files, user and rights."""
        (container,) = pod["containers"]
        user = pod["securityContext"]["runAsUser"]
        options = [
            str(find_bwrap()), "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-net",
            "--disable-userns", "--die-with-parent", "--new-session",
            "--uid", str(user), "--gid", str(pod["securityContext"]["runAsGroup"]),
            "--clearenv", "--setenv", "PATH", f"{os.path.realpath(sys.base_prefix)}/bin:/usr/bin",
            "--chdir", "/", "--proc", "/proc", "--dev", "/dev",
        ]  # fmt: skip
        if container["securityContext"]["capabilities"]["drop"] == ["ALL"]:
            options += ["--cap-drop", "ALL"]
        for name in ("usr", "bin", "sbin", "lib", "lib64"):
            original = Path("/", name)
            if original.is_symlink():
                options += ["--symlink", str(original.readlink()), str(original)]
            elif original.is_dir():
                options += ["--ro-bind", str(original), str(original)]
        prefix = os.path.realpath(sys.base_prefix)
        options += [] if f"{prefix}/".startswith("/usr/") else ["--ro-bind", prefix, prefix]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                size = int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi")) << 20
                options += ["--size", str(size), "--tmpfs", mount["mountPath"]]
            else:
                folder = self._folder / volume["configMap"]["name"]
                folder.mkdir(exist_ok=True)
                for name, text in self.files[folder.name].items():
                    (folder / name).write_text(text)
                options += ["--ro-bind", str(folder), mount["mountPath"]]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        return [*options, "--remount-ro", "/", "--"]
