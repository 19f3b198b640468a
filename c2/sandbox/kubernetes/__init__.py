"""Sandboxes of a cluster, from the warm pools of kubernetes-sigs/agent-sandbox.

Needs the extra `k8s`, a cluster with that project's controllers and extensions (API version
v1beta1), and the objects that `python -m launch.sandboxes` prints. `template` says which walls the
cluster's objects must ask for, `cluster` makes the calls, `tunnel` carries the bytes.
"""

from c2.sandbox.kubernetes.backend import Kubernetes
from c2.sandbox.kubernetes.config import KubernetesConfig

__all__ = ["Kubernetes", "KubernetesConfig"]
