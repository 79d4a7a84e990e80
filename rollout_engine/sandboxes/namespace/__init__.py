"""The `namespace` sandbox: boxes made of Linux namespaces by a small launcher of the engine's own."""

from __future__ import annotations

from rollout_engine.sandboxes.namespace.doctor import Capability, capabilities
from rollout_engine.sandboxes.namespace.provider import NamespaceProvider
from rollout_engine.sandboxes.namespace.sandbox import NamespaceSandbox

__all__ = ["Capability", "NamespaceProvider", "NamespaceSandbox", "capabilities"]
