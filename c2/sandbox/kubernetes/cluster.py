"""The calls to the cluster's API, of which only `kubernetes`' public client is used."""

import datetime
import os
import urllib.parse
from typing import Any

import kubernetes
from kubernetes.client import ApiException
from kubernetes.stream import ws_client
from urllib3.exceptions import HTTPError
from websocket import WebSocket, WebSocketException

from c2.sandbox.kubernetes.config import KubernetesConfig
from c2.sandbox.protocol import SandboxError

EXTENSIONS, CORE, VERSION = "extensions.agents.x-k8s.io", "agents.x-k8s.io", "v1beta1"
POD_NAME = "agents.x-k8s.io/pod-name"  # annotation of a Sandbox whose pod has another name
OWNER, INSTANCE = "c2/owner", "c2/instance"  # labels of our claims
# Reasons for which a claim will never become ready.
FINAL = frozenset({
    "ClaimExpired", "SandboxExpired", "InvalidMetadata", "InvalidConfiguration",
    "EnvVarsInjectionRejected", "VolumeClaimTemplatesError", "PodFailed", "PodSucceeded",
})  # fmt: skip
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # a variable of all containers of a cluster
CALL_S = 30.0
FAILURES = (ApiException, HTTPError)

Object = dict[str, Any]


class Cluster:
    """One namespace of a cluster, seen by one owner. Calls may come from any thread.

    Args:
      config: where.
      instance: of the owner; it dies with this process.

    Raises:
      SandboxError: if there is no way to the cluster.
    """

    def __init__(self, config: KubernetesConfig, instance: str) -> None:
        self._settings = kubernetes.client.Configuration()
        try:
            if config.context is None and IN_CLUSTER in os.environ:
                kubernetes.config.load_incluster_config(self._settings)
            else:
                kubernetes.config.load_kube_config(
                    context=config.context, client_configuration=self._settings
                )
        except kubernetes.config.ConfigException as error:
            raise SandboxError(f"no cluster is configured: {error}") from error
        self._objects = kubernetes.client.CustomObjectsApi(
            kubernetes.client.ApiClient(self._settings)
        )
        self._config, self._instance = config, instance

    def template(self) -> Object:
        """The SandboxTemplate of the pool."""
        pool = self._get(EXTENSIONS, "sandboxwarmpools", self._config.pool)
        return self._get(EXTENSIONS, "sandboxtemplates", pool["spec"]["sandboxTemplateRef"]["name"])

    def claim(self, name: str, ends: datetime.datetime, labels: dict[str, str]) -> None:
        """Asks for a sandbox of the pool; asking again under the same name changes nothing."""
        body = {
            "apiVersion": f"{EXTENSIONS}/{VERSION}",
            "kind": "SandboxClaim",
            "metadata": {
                "name": name,
                "labels": {OWNER: self._config.owner, INSTANCE: self._instance},
                "annotations": {f"c2/{key}": value for key, value in labels.items()},
            },
            "spec": {
                "warmPoolRef": {"name": self._config.pool},
                "lifecycle": {"shutdownTime": _time(ends), "shutdownPolicy": "Delete"},
            },
        }
        # It may be there: after a first try of which the answer was lost.
        self._call("create_namespaced_custom_object", f"claim {name}", body=body, but=409)

    def wait(self, name: str) -> str:
        """Waits until a claim is ready; returns the name of its pod.

        Raises:
          SandboxError: if it will not be, or is not in time.
        """
        watch = kubernetes.watch.Watch()
        events = watch.stream(
            self._objects.list_namespaced_custom_object, EXTENSIONS, VERSION,
            self._config.namespace, "sandboxclaims", field_selector=f"metadata.name={name}",
            timeout_seconds=int(self._config.start_s),
        )  # fmt: skip
        try:
            for event in events:
                claim = event["object"]
                ready, reason = condition(claim, "Ready")
                if event["type"] == "DELETED" or reason in FINAL:
                    raise SandboxError(f"claim {name} has ended: {reason or 'it was deleted'}")
                if ready:
                    return self._pod(claim["status"]["sandbox"]["name"])
        except FAILURES as error:
            raise _line(error, f"claim {name}") from error
        finally:
            watch.stop()
        raise SandboxError(f"claim {name} is not ready after {self._config.start_s:.0f} s")

    def read(self, name: str) -> Object | None:
        """A claim, or None if it is gone."""
        return self._call("get_namespaced_custom_object", f"claim {name}", name=name, but=404)

    def renew(self, name: str, ends: datetime.datetime) -> None:
        """Puts off the end of a claim; does nothing if it is gone."""
        body = {"spec": {"lifecycle": {"shutdownTime": _time(ends)}}}
        method = "patch_namespaced_custom_object"
        self._call(method, f"claim {name}", name=name, body=body, but=404)

    def delete(self, name: str) -> None:
        """Ends a claim, and with it its sandbox."""
        self._call("delete_namespaced_custom_object", f"claim {name}", name=name, but=404)

    def delete_all(self, of_others: bool) -> None:
        """Ends all claims of this owner: those of earlier instances, or those of this one."""
        sign = "!=" if of_others else "="
        self._call(
            "delete_collection_namespaced_custom_object", f"claims of {self._config.owner}",
            label_selector=f"{OWNER}={self._config.owner},{INSTANCE}{sign}{self._instance}",
        )  # fmt: skip

    def execute(self, pod: str, container: str, command: list[str]) -> WebSocket:
        """Starts a command in a pod; a message of the connection begins with its channel."""
        # Not with `kubernetes.stream`: that keeps all output, and can miss some of it under TLS.
        query = [("container", container), ("stdin", "true"), ("stdout", "true")]
        query += [("stderr", "true"), *(("command", word) for word in command)]
        path = f"/api/v1/namespaces/{self._config.namespace}/pods/{pod}/exec"
        url = f"{self._settings.host}{path}?{urllib.parse.urlencode(query)}"
        tokens = self._settings.auth_settings().values()
        headers = {token["key"]: token["value"] for token in tokens if token["in"] == "header"}
        try:
            return ws_client.create_websocket(self._settings, url.replace("http", "ws", 1), headers)
        except (OSError, WebSocketException) as error:
            raise SandboxError(f"pod {pod} takes no command: {error}") from error

    def _pod(self, sandbox: str) -> str:
        found = self._get(CORE, "sandboxes", sandbox)
        return found["metadata"].get("annotations", {}).get(POD_NAME, sandbox)

    def _get(self, group: str, kind: str, name: str) -> Object:
        method = "get_namespaced_custom_object"
        return self._call(method, f"{kind} {name}", group=group, kind=kind, name=name)

    def _call(
        self,
        method: str,
        what: str,
        *,
        group: str = EXTENSIONS,
        kind: str = "sandboxclaims",
        but: int | None = None,
        **more: Any,
    ) -> Any:
        """Its answer, or None for the status `but`; raises SandboxError for other failures."""
        call = getattr(self._objects, method)
        names = {"namespace": self._config.namespace, "plural": kind, "_request_timeout": CALL_S}
        try:
            return call(group, VERSION, **names, **more)
        except FAILURES as error:
            if but is not None and getattr(error, "status", None) == but:
                return None
            raise _line(error, what) from error


def condition(claim: Object, name: str) -> tuple[bool, str]:
    """Whether a condition of a claim holds, and the reason; False and "" if nothing is known."""
    for found in claim.get("status", {}).get("conditions", ()):
        if found["type"] == name:
            return found["status"] == "True", found.get("reason", "")
    return False, ""


def _time(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _line(error: Exception, what: str) -> SandboxError:
    if isinstance(error, ApiException):
        return SandboxError(f"the cluster refuses {what}: {error.status} {error.reason}")
    return SandboxError(f"the cluster does not answer for {what}: {error!s:.300}")
