"""The leases of a namespace of Kubernetes, through the official client, as JSON.

JSON and not the classes of the client: these differ between its versions, and write times that the
API refuses if their microseconds are 0.

Always true here:
- a request is made once: one that fails may have been applied;
- a lease is replaced only on the condition of the version that it carries.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from cairn.errors import PlanError

RESOURCE: Final = ("coordination.k8s.io", "v1")
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

Json = dict[str, Any]


class ConflictError(Exception):
    """The object is not the one that was seen."""


class Leases:
    """The leases of one namespace, as JSON."""

    def __init__(self, namespace: str, *, timeout_s: float) -> None:
        """Read the configuration of the pod, or else the kubeconfig; nothing is asked yet."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise PlanError(
                "the leadership kubernetes: needs the client of Kubernetes\n"
                "  next: pip install 'cairn-state[kubernetes]'"
            ) from None
        self._failure: Any = client.ApiException
        settings = client.Configuration()
        found = _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else ""
        try:
            try:
                config.load_incluster_config(client_configuration=settings)
            except config.ConfigException:
                file = os.environ.get("KUBECONFIG")
                config.load_kube_config(config_file=file, client_configuration=settings)
                context = config.list_kube_config_contexts(config_file=file)[1]["context"]
                found = context.get("namespace", "")
        except Exception as error:
            raise PlanError(
                "the leadership kubernetes: finds neither a pod's service account nor a "
                f"kubeconfig: {type(error).__name__}\n"
                "  next: run it in a pod, or set KUBECONFIG"
            ) from None
        # A write that is repeated out of sight would be refused because of its own first try.
        settings.retries = False
        self.namespace = namespace or found or "default"
        self._api = client.CustomObjectsApi(client.ApiClient(settings))
        self._place = (*RESOURCE, self.namespace, "leases")
        self._timeout_s = timeout_s

    def read(self, name: str) -> Json | None:
        """Return a lease; None if there is none."""
        try:
            found: Json = self._call(self._api.get_namespaced_custom_object, name)
            return found
        except self._failure as error:
            if error.status == 404:
                return None
            raise

    def write(self, lease: Json) -> Json | None:
        """Replace the lease of this version, or create one without; None if it was deleted.

        ConflictError if the version is another, or a lease exists already.
        """
        metadata = lease["metadata"]
        try:
            if "resourceVersion" in metadata:
                replace = self._api.replace_namespaced_custom_object
                written: Json = self._call(replace, metadata["name"], lease)
            else:
                written = self._call(self._api.create_namespaced_custom_object, lease)
            return written
        except self._failure as error:
            if error.status == 409:
                raise ConflictError from None
            # The status of a lease that was deleted differs between versions of Kubernetes.
            if "resourceVersion" in metadata and self.read(metadata["name"]) is None:
                return None
            raise

    def list(self, label: str) -> list[Json]:
        found = self._call(self._api.list_namespaced_custom_object, label_selector=label)
        return list(found["items"])

    def delete(self, name: str) -> None:
        try:
            self._call(self._api.delete_namespaced_custom_object, name)
        except self._failure as error:
            if error.status != 404:
                raise

    def close(self) -> None:
        self._api.api_client.rest_client.pool_manager.clear()

    def _call(self, method: Any, *values: Any, **options: Any) -> Any:
        return method(*self._place, *values, _request_timeout=self._timeout_s, **options)


def describe(error: Exception) -> str:
    """Return the kind of an error, and the status that the API returned."""
    status = getattr(error, "status", None)
    return f"{type(error).__name__} {status}" if status else type(error).__name__
