"""The Kubernetes API server, through the `kubernetes` package.

Owns credentials, time limits and the translation of that package's errors. The package is imported
when a client is opened and not before: it costs about 18 MiB of memory and 0.15 s on top of what
the agent has loaded anyway, which an agent that publishes nothing does not pay. Only its generic
`ApiClient` is used; the typed models would cost more and say nothing about custom objects.
All methods block: call them from a thread.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agent.errors import ConfigError, Refused, Unavailable

FIELD_MANAGER = "nodefabric"
CONNECT_SECONDS = 5.0
READ_SECONDS = 15.0
MAX_RETRY_AFTER_SECONDS = 3600.0
APPLY = "application/apply-patch+yaml"
"""Server-side apply. The body is JSON, which is YAML too."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOPOLOGIES = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
NODES = "/api/v1/nodes"


class ApiServer:
    """An open client. Use `in_cluster` or `from_kubeconfig`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._one_at_a_time = threading.Lock()

    @classmethod
    def in_cluster(cls, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> ApiServer:
        """Take address and credentials that kubelet gives to a pod. The token file is read again as it is renewed.

        Raises ConfigError outside a pod or without a service account.
        """
        from kubernetes.client import ApiClient, Configuration
        from kubernetes.config.config_exception import ConfigException
        from kubernetes.config.incluster_config import InClusterConfigLoader

        configuration = Configuration(retries=False)
        loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"), environ=environ)  # type: ignore[no-untyped-call]
        try:
            loader.load_and_set(configuration)  # type: ignore[no-untyped-call]
        except (ConfigException, OSError) as error:
            raise ConfigError(
                "API server", [f"{error}: run in a pod with a service account, name a kubeconfig, or do not publish"]
            ) from error
        return cls(ApiClient(configuration))

    @classmethod
    def from_kubeconfig(cls, path: Path) -> ApiServer:
        """Take address and credentials of a kubeconfig file's current context. Raises ConfigError."""
        import yaml
        from kubernetes.client import ApiClient, Configuration
        from kubernetes.config import ConfigException, load_kube_config

        configuration = Configuration(retries=False)
        try:
            load_kube_config(  # type: ignore[no-untyped-call]
                str(path), client_configuration=configuration, persist_config=False
            )
        except (ConfigException, OSError, TypeError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(str(path), [f"is not a usable kubeconfig: {' '.join(str(error).split())}"]) from error
        return cls(ApiClient(configuration))

    def close(self) -> None:
        """Close the connections."""
        self._client.rest_client.close()

    def node_uid(self, name: str) -> str:
        """Return the UID of a Node object. Raises Unavailable."""
        node = self._call("GET", f"{NODES}/{quote(name, safe='')}")
        uid = node.get("metadata", {}).get("uid")
        if not isinstance(uid, str) or not uid:
            raise Unavailable(f"the API server's Node object {name} has no UID")
        return uid

    def apply_topology(self, document: Mapping[str, Any]) -> None:
        """Apply a NodeResourceTopology object on the server's side, as its owner. Raises Unavailable."""
        name = quote(str(document["metadata"]["name"]), safe="")
        self._call("PATCH", f"{TOPOLOGIES}/{name}?fieldManager={FIELD_MANAGER}&force=true", document)

    def _call(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> dict[str, Any]:
        from kubernetes.client.exceptions import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "application/json"} | ({"Content-Type": APPLY} if document is not None else {})
        body = json.dumps(document) if document is not None else None
        where = f"{method} {path.partition('?')[0]}"
        with self._one_at_a_time:
            try:
                # Also renews the token, if its file was.
                request = self._client.param_serialize(
                    method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
                )
                response = self._client.call_api(*request, _request_timeout=(CONNECT_SECONDS, READ_SECONDS))
                with contextlib.closing(response.response):
                    data = response.read()
            except (ApiException, ConfigException, HTTPError, ssl.SSLError, OSError) as error:
                raise Unavailable(f"{where}: the API server does not answer: {_short(error)}") from error
        status = int(response.status)
        if 200 <= status < 300:
            return _decoded(data, where)
        raise _refusal(status, response.headers.get("Retry-After"), data, where)


def _decoded(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise Unavailable(f"{where}: the answer is not JSON") from error
    if not isinstance(document, dict):
        raise Unavailable(f"{where}: the answer is not an object")
    return document


def _refusal(status: int, retry_after: str | None, data: bytes, where: str) -> Unavailable:
    try:
        text = str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        text = data[:200].decode("utf-8", "replace")
    if status == 404 and where.startswith("PATCH"):
        text += " (is the CustomResourceDefinition noderesourcetopologies.topology.node.k8s.io installed?)"
    if status in (401, 403):
        text += " (does the agent's service account have the permissions of daemonset/base/rbac.yaml?)"
    message = f"{where}: {status} {' '.join(text.split())}"
    if status == 429 or status >= 500:
        seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
        return Unavailable(message, None if seconds is None else min(seconds, MAX_RETRY_AFTER_SECONDS))
    return Refused(status, message)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
