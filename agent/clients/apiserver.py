"""The Kubernetes API server, through the `kubernetes` package.

Owns credentials, time limits and the translation of that package's errors. The package is imported
when a client is opened and not before: an agent that publishes nothing does not pay for it. Only its
generic `ApiClient` is used; the typed models would cost more and say nothing about custom objects.
All methods block: call them from a thread.
"""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from agent.errors import ConfigError, Conflicted, Refused, Unavailable

FIELD_MANAGER = "nodefabric"
CONNECT_SECONDS = 5.0
READ_SECONDS = 15.0
MAX_RETRY_AFTER_SECONDS = 3600.0
MAX_ANSWER_BYTES = 64 << 20
MAX_EVENT_BYTES = 8 << 20
"""A watch event holds one object; etcd takes none above 1.5 MiB."""
APPLY = "application/apply-patch+yaml"
"""Server-side apply. The body is JSON, which is YAML too."""
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""A Node object with its list of images is tens of kilobytes; its metadata one."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MANAGER = re.compile(r'conflict with "([^"]*)"')


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

    @property
    def definition(self) -> str | None:
        """Name of the CustomResourceDefinition that the cluster must have; None for a kind it always has."""
        group, slash, _ = self.api_version.partition("/")
        return f"{self.plural}.{group}" if slash else None


NODE = ObjectKind("v1", "Node", "nodes")
TOPOLOGY = ObjectKind("topology.node.k8s.io/v1alpha2", "NodeResourceTopology", "noderesourcetopologies")
NUMATOPOLOGY = ObjectKind("nodeinfo.volcano.sh/v1alpha1", "Numatopology", "numatopologies")
_DEFINITIONS = {kind.path: kind.definition for kind in (TOPOLOGY, NUMATOPOLOGY)}


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

    def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object in the collection of this path. Raises Unavailable."""
        return self._call("POST", f"{path}?{urlencode({'fieldManager': FIELD_MANAGER})}", document)

    def list_pods(self, node_name: str) -> dict[str, Any]:
        """List the pods bound to a node, as fresh as the server's cache. Raises Unavailable."""
        query = urlencode({"fieldSelector": f"spec.nodeName={node_name}", "resourceVersion": "0"})
        return self._call("GET", f"/api/v1/pods?{query}")

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
                raise _refusal(response.status, response.headers.get("Retry-After"), _body(response), where)
            with _translated(where):
                for line in _lines(response):
                    event = _decoded(line, where)
                    if event.get("type") == "ERROR":
                        status = event.get("object", {})
                        raise Refused(int(status.get("code", 500)), f"{where}: {status.get('message', 'failed')}")
                    yield event

    def _call(
        self, method: str, path: str, document: Mapping[str, Any] | None = None, accept: str = "application/json"
    ) -> dict[str, Any]:
        where = f"{method} {path.partition('?')[0]}"
        with self._one_at_a_time, self._answer(method, path, document, accept, READ_SECONDS) as response:
            with _translated(where):
                data = _body(response)
            status, retry_after = int(response.status), response.headers.get("Retry-After")
        if 200 <= status < 300:
            return _decoded(data, where)
        raise _refusal(status, retry_after, data, where)

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, document: Mapping[str, Any] | None, accept: str, seconds: float
    ) -> Iterator[Any]:
        """Send a request, and give its answer's head with the body still to be read."""
        headers = {"Accept": accept}
        if document is not None:
            headers["Content-Type"] = APPLY if method == "PATCH" else "application/json"
        # The package encodes a body of plain JSON itself.
        body = json.dumps(document) if method == "PATCH" else document
        with _translated(f"{method} {path.partition('?')[0]}"):
            # Also renews the token, if its file was.
            request = self._client.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = self._client.call_api(*request, _request_timeout=(CONNECT_SECONDS, seconds)).response
        with contextlib.closing(response):
            yield response


@contextlib.contextmanager
def _translated(where: str) -> Iterator[None]:
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (ApiException, ConfigException, HTTPError, ssl.SSLError, OSError) as error:
        raise Unavailable(f"{where}: the API server does not answer: {_short(error)}") from error


def _body(response: Any) -> bytes:
    data: bytes = response.read(MAX_ANSWER_BYTES + 1)
    if len(data) > MAX_ANSWER_BYTES:
        raise Unavailable(f"the API server's answer is larger than {MAX_ANSWER_BYTES} bytes")
    return data


def _lines(response: Any) -> Iterator[bytes]:
    """Yield the lines of a streamed answer as they come. Raises Unavailable for one without end."""
    pending = b""
    for chunk in response.stream(amt=None):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from filter(None, lines)
        if len(pending) > MAX_EVENT_BYTES:
            raise Unavailable(f"a watch event is larger than {MAX_EVENT_BYTES} bytes")


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
        answer = json.loads(data)
        text = str(answer["message"])
    except (ValueError, KeyError, TypeError):
        answer, text = {}, data[:200].decode("utf-8", "replace")
    definition = _DEFINITIONS.get(where.partition(" ")[2].rpartition("/")[0])
    if status == 404 and where.startswith("PATCH") and definition:
        text += f" (is the CustomResourceDefinition {definition} installed?)"
    if status in (401, 403):
        text += " (does the agent's service account have the permissions that the configuration needs?)"
    message = f"{where}: {status} {' '.join(text.split())}"
    if status == 409:
        return Conflicted(message, _owners(answer))
    if status == 429 or status >= 500:
        seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
        return Unavailable(message, None if seconds is None else min(seconds, MAX_RETRY_AFTER_SECONDS))
    return Refused(status, message)


def _owners(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Read who owns what from the causes of a conflict."""
    details = answer.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    found = []
    for cause in causes if isinstance(causes, list) else []:
        manager = _MANAGER.search(str(cause.get("message", ""))) if isinstance(cause, dict) else None
        if manager is not None:
            found.append((str(cause.get("field", "")), manager[1]))
    return found


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
