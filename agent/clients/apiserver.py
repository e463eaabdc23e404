"""The Kubernetes API server, through the `kubernetes` package.

Owns credentials, time limits and the translation of that package's errors. The package is imported
when a client is opened and not before: an agent that publishes nothing does not pay for it. Only its
generic `ApiClient` is used; the typed models would cost more and say nothing about custom objects.
All methods block: call them from a thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from agent.clients.api_answers import body_of, decoded, lines_of, refusal, translated
from agent.errors import ConfigError, Refused, Unavailable

FIELD_MANAGER = "nodefabric"
CONNECT_SECONDS = 5.0
READ_SECONDS = 15.0
APPLY = "application/apply-patch+yaml"
"""Server-side apply. The body is JSON, which is YAML too."""
MERGE = "application/merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""A Node object with its list of images is tens of kilobytes; its metadata one."""

PODS_PER_PAGE = 50
"""For servers without a cache: one with answers `resourceVersion=0` with all pods (kubernetes/kubernetes#70735)."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
T = TypeVar("T")
_POD = {"metadata", "spec", "status"}
"""What an item of a list of pods has, and nothing in a pod: a volume claim's template has no status."""
_IMPORTING = threading.Lock()
"""Two clients may be opened at once, on threads of their own."""


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """A kind of object that belongs to no namespace."""

    api_version: str
    kind: str
    plural: str

    @property
    def path(self) -> str:
        """The collection's path."""
        root = "/apis" if "/" in self.api_version else "/api"
        return f"{root}/{self.api_version}/{self.plural}"

    def path_of(self, name: str) -> str:
        """One object's path."""
        return f"{self.path}/{quote(name, safe='')}"


NODE = ObjectKind("v1", "Node", "nodes")
TOPOLOGY = ObjectKind("topology.node.k8s.io/v1alpha2", "NodeResourceTopology", "noderesourcetopologies")
NUMATOPOLOGY = ObjectKind("nodeinfo.volcano.sh/v1alpha1", "Numatopology", "numatopologies")


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
        with _IMPORTING, _core_only():
            from kubernetes.client import ApiClient, Configuration
            from kubernetes.config.config_exception import ConfigException
            from kubernetes.config.incluster_config import InClusterConfigLoader

        configuration = Configuration(retries=False)
        configuration.keep_alive = True  # else a watch of a server that fell silent looks alive until its time is over
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

        with _IMPORTING, _core_only():
            from kubernetes.client import ApiClient, Configuration
            from kubernetes.config.config_exception import ConfigException
            from kubernetes.config.kube_config import load_kube_config

        configuration = Configuration(retries=False)
        configuration.keep_alive = True  # else a watch of a server that fell silent looks alive until its time is over
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

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        """Return an object's metadata, as fresh as the server's cache. Raises Unavailable, Refused if there is none."""
        path = f"{kind.path_of(name)}?resourceVersion=0"
        found = self._call("GET", path, accept=METADATA_ONLY).get("metadata")
        if not isinstance(found, dict):
            raise Unavailable(f"the API server's {kind.kind} {name} has no metadata")
        return found

    def get(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        """Return an object, as fresh as the server's cache; None if there is none. Raises Unavailable."""
        try:
            return self._call("GET", f"{kind.path_of(name)}?resourceVersion=0")
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def apply(self, kind: ObjectKind, document: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        """Apply an object on the server's side and return it as it is then.

        Fields that this agent applied before and the document lacks are removed. Raises Conflicted if another
        writer owns one of the fields with another value; with `force` it is taken over instead. Raises Unavailable.
        """
        query = urlencode({"fieldManager": FIELD_MANAGER, "force": str(force).lower()})
        return self._call("PATCH", f"{kind.path_of(str(document['metadata']['name']))}?{query}", document)

    def read(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        """Return an object as it is now, not as a cache has it. Raises Unavailable, Refused if there is none."""
        return self._call("GET", kind.path_of(name))

    def merge(self, kind: ObjectKind, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change the fields of an object that a patch names (RFC 7386), and return it as it is then.

        Raises Conflicted if the patch has a resource version and the object another one by now; Unavailable.
        """
        query = urlencode({"fieldManager": FIELD_MANAGER})
        return self._call("PATCH", f"{kind.path_of(name)}?{query}", patch, content_type=MERGE)

    def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object in the collection of this path. Raises Unavailable."""
        return self._call("POST", f"{path}?{urlencode({'fieldManager': FIELD_MANAGER})}", document)

    def list_pods(self, node_name: str, read: Callable[[dict[str, Any]], T]) -> tuple[str, list[T]]:
        """List what `read` makes of the pods bound to a node, as fresh as the server's cache, and their version.

        Raises Unavailable; Refused with status 410 if the server forgot the list before its last page was asked for.
        """

        def kept(found: dict[str, Any]) -> Any:
            return read(found) if found.keys() >= _POD else found

        selector = {"fieldSelector": f"spec.nodeName={node_name}", "limit": str(PODS_PER_PAGE)}
        pods: list[T] = []
        start = {"resourceVersion": "0"}
        while True:
            page = self._call("GET", f"/api/v1/pods?{urlencode(selector | start)}", kept=kept)
            pods += page.get("items") or ()
            if not (more := page["metadata"].get("continue")):
                return page["metadata"]["resourceVersion"], pods
            start = {"continue": more}

    def watch_pods(self, node_name: str, since: str, seconds: int) -> Iterator[dict[str, Any]]:
        """Yield what happens to the pods bound to a node after the resource version `since`.

        The server ends the watch after so many seconds; a connection that says nothing for a little longer counts as
        dead. Raises Unavailable; Refused with status 410 if the server no longer knows that version.
        """
        query = urlencode(
            {
                "watch": "true",
                "fieldSelector": f"spec.nodeName={node_name}",
                "resourceVersion": since,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(seconds),
            }
        )
        where = "WATCH /api/v1/pods"
        with self._answer("GET", f"/api/v1/pods?{query}", None, "application/json", seconds + READ_SECONDS) as response:
            if response.status != 200:
                raise refusal(response.status, response.headers.get("Retry-After"), body_of(response), where)
            with translated(where):
                for line in lines_of(response):
                    yield _event(line, where)

    def _call(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None = None,
        accept: str = "application/json",
        kept: Callable[[dict[str, Any]], Any] | None = None,
        content_type: str = APPLY,
    ) -> dict[str, Any]:
        """Send a request. `content_type` is that of a patch."""
        where = f"{method} {path.partition('?')[0]}"
        with (
            self._one_at_a_time,
            self._answer(method, path, document, accept, READ_SECONDS, content_type) as response,
        ):
            with translated(where):
                data = body_of(response)
            status, retry_after = int(response.status), response.headers.get("Retry-After")
        if 200 <= status < 300:
            return decoded(data, where, kept)
        raise refusal(status, retry_after, data, where)

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | None,
        accept: str,
        seconds: float,
        content_type: str = APPLY,
    ) -> Iterator[Any]:
        """Send a request, and give its answer's head with the body still to be read."""
        headers = {"Accept": accept}
        if document is not None:
            headers["Content-Type"] = content_type if method == "PATCH" else "application/json"
        # The package encodes a body itself if its type says JSON.
        body = json.dumps(document) if headers.get("Content-Type") == APPLY else document
        with translated(f"{method} {path.partition('?')[0]}"):
            # Also renews the token, if its file was.
            request = self._client.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = self._client.call_api(*request, _request_timeout=(CONNECT_SECONDS, seconds)).response
        with contextlib.closing(response):
            yield response


def _event(line: bytes, where: str) -> dict[str, Any]:
    event = decoded(line, where)
    if event.get("type") == "ERROR":
        status = event.get("object", {})
        raise Refused(int(status.get("code", 500)), f"{where}: {status.get('message', 'failed')}")
    return event


@contextlib.contextmanager
def _core_only() -> Iterator[None]:
    """Import modules of the package without what its `__init__` files load along.

    Those load OAuth, requests, websockets and the dynamic client: half of its memory, and no part of what a pod's
    service account needs. Empty packages stand in for them meanwhile; whoever imports them later gets the real ones.
    """
    if "kubernetes" in sys.modules:
        yield
        return
    found = importlib.util.find_spec("kubernetes")
    root = Path((found.submodule_search_locations or [""])[0]) if found is not None else Path()
    stand_ins = {"kubernetes": root, "kubernetes.config": root / "config", "kubernetes.utils": root / "utils"}
    for name, folder in stand_ins.items():
        module = ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
