"""The Kubernetes API server, through the `kubernetes` package.

Owns credentials, time limits and the translation of that package's errors. The package is imported
when a client is opened and not before: an agent that publishes nothing does not pay for it. Only its
generic `ApiClient` is used; the typed models would cost more and say nothing about custom objects.
All methods block: call them from a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any, Generic, ParamSpec, Self, TypeVar
from urllib.parse import quote, urlencode

from agent.errors import ConfigError, Conflicted, Refused, Unavailable
from agent.model.fields import MAX_DEPTH, at, is_deep, objects_at

FIELD_MANAGER = "nodefabric"
CONNECT_SECONDS = 5.0
READ_SECONDS = 15.0
"""For a whole answer. A request waits as long for earlier ones, and to be connected: kubelet, which waits 45 s for all
of that, still hears what is wrong."""
APPLY = "application/apply-patch+yaml"
"""Server-side apply. The body is JSON, which is YAML too."""
MERGE = "application/merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""A Node object with its list of images is tens of kilobytes; its metadata one."""

ITEMS_PER_PAGE = 50
"""For servers without a cache: one with answers `resourceVersion=0` with all (kubernetes/kubernetes#70735)."""
SOME_AT_ONCE = 8
"""Requests of a client that serves many pods which start together."""

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
P = ParamSpec("P")
T = TypeVar("T")
_IMPORTING = threading.Lock()
"""The package imports itself in a ring: of two threads that come first together, one would see half of it."""


def load() -> None:
    """Import the package before there is a client."""
    with _IMPORTING:
        import kubernetes.client
        import kubernetes.config.incluster_config  # noqa: F401


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """A kind of object: of the cluster, or of one namespace or all, or of all until `within` names one."""

    api_version: str
    kind: str
    plural: str
    item: frozenset[str] = frozenset({"metadata", "spec"})
    """What an item of a list has, and nothing in such an object."""

    def within(self, namespace: str) -> ObjectKind:
        """Return the kind's objects of one namespace."""
        return replace(self, plural=f"namespaces/{quote(namespace, safe='')}/{self.plural}")

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
POD = ObjectKind("v1", "Pod", "pods", frozenset({"metadata", "spec", "status"}))
"""A volume claim's template, in a pod, has no status."""
DAEMONSET = ObjectKind("apps/v1", "DaemonSet", "daemonsets")
SLICE = ObjectKind("resource.k8s.io/v1", "ResourceSlice", "resourceslices")
CLAIM = ObjectKind("resource.k8s.io/v1", "ResourceClaim", "resourceclaims")


@dataclass(frozen=True, slots=True)
class _Read(Generic[T]):
    """What was made of an item of a list."""

    value: T


class ApiServer:
    """An open client. Use `in_cluster` or `from_kubeconfig`."""

    def __init__(self, client: Any, at_once: int = 1, read_seconds: float = READ_SECONDS) -> None:
        """`at_once`: so many requests, besides watches, are under way at a time."""
        self._client = client
        self._read_seconds = read_seconds
        self._turns = threading.BoundedSemaphore(at_once)

    @classmethod
    def in_cluster(cls, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT, at_once: int = 1) -> Self:
        """Take address and credentials that kubelet gives to a pod. The token file is read again as it is renewed.

        Raises ConfigError outside a pod or without a service account.
        """
        with _IMPORTING:
            from kubernetes.config.config_exception import ConfigException
            from kubernetes.config.incluster_config import InClusterConfigLoader

        loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"), environ=environ)  # type: ignore[no-untyped-call]
        try:
            client = _opened(loader.load_and_set)
        except (ConfigException, OSError) as error:
            raise ConfigError(
                "API server", [f"{error}: run in a pod with a service account, name a kubeconfig, or do not publish"]
            ) from error
        return cls(client, at_once)

    @classmethod
    def from_kubeconfig(cls, path: Path, at_once: int = 1, read_seconds: float = READ_SECONDS) -> Self:
        """Take address and credentials of a kubeconfig file's current context. Raises ConfigError."""
        import yaml

        with _IMPORTING:
            from kubernetes.config.config_exception import ConfigException
            from kubernetes.config.kube_config import load_kube_config

        try:
            client = _opened(
                lambda found: load_kube_config(str(path), client_configuration=found, persist_config=False)  # type: ignore[no-untyped-call]
            )
        except (ConfigException, OSError, TypeError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(str(path), [f"is not a usable kubeconfig: {' '.join(str(error).split())}"]) from error
        return cls(client, at_once, read_seconds)

    def close(self) -> None:
        """Close the connections."""
        self._client.rest_client.close()

    def metadata(self, kind: ObjectKind, name: str) -> dict[str, Any]:
        """Return an object's metadata, as fresh as the server's cache, with a UID.

        Raises Unavailable, Refused if there is none.
        """
        path = f"{kind.path_of(name)}?resourceVersion=0"
        found: dict[str, Any] = at(self._call("GET", path, accept=METADATA_ONLY), "metadata", dict)
        at(found, "uid", str)
        return found

    def get(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        """Return an object, as fresh as the server's cache; None if there is none. Raises Unavailable."""
        return self._if_there("GET", f"{kind.path_of(name)}?resourceVersion=0")

    def apply(self, kind: ObjectKind, document: Mapping[str, Any], *, force: bool) -> dict[str, Any]:
        """Apply an object on the server's side and return it as it is then.

        Fields that this agent applied before and the document lacks are removed. Raises Conflicted if another
        writer owns one of the fields with another value; with `force` it is taken over instead. Raises Unavailable.
        """
        query = urlencode({"fieldManager": FIELD_MANAGER, "force": str(force).lower()})
        return self._call("PATCH", f"{kind.path_of(str(document['metadata']['name']))}?{query}", document)

    def current(self, kind: ObjectKind, name: str) -> dict[str, Any] | None:
        """Return an object as it is now, not as a cache has it; None if there is none. Raises Unavailable."""
        return self._if_there("GET", kind.path_of(name))

    def merge(self, kind: ObjectKind, name: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Change the fields of an object that a patch names (RFC 7386), and return it as it is then.

        Raises Conflicted if the patch has a resource version and the object another one by now; Unavailable.
        """
        query = urlencode({"fieldManager": FIELD_MANAGER})
        return self._call("PATCH", f"{kind.path_of(name)}?{query}", patch, content_type=MERGE)

    def create(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object in the collection of this path. Raises Unavailable."""
        return self._call("POST", f"{path}?{urlencode({'fieldManager': FIELD_MANAGER})}", document)

    def apply_status(self, kind: ObjectKind, document: Mapping[str, Any]) -> dict[str, Any]:
        """Apply an object's status, with force, and return the object. Raises Unavailable, Refused if there is none.

        A `metadata.uid` in the document that is not the object's is refused, too.
        """
        query = urlencode({"fieldManager": FIELD_MANAGER, "force": "true"})
        return self._call("PATCH", f"{kind.path_of(str(document['metadata']['name']))}/status?{query}", document)

    def replace_status(self, kind: ObjectKind, document: Mapping[str, Any], *, blanks: bool) -> dict[str, Any]:
        """Replace the status of an object of one version, with a body as `json_of` writes it, and return the object.

        Raises Conflicted if the object has another version by now; Unavailable, Refused if there is none.
        """
        path = f"{kind.path_of(str(document['metadata']['name']))}/status"
        return self._call("PUT", f"{path}?{urlencode({'fieldManager': FIELD_MANAGER})}", json_of(document, blanks))

    def delete(self, kind: ObjectKind, name: str, uid: str) -> bool:
        """Delete an object if it is still this one. Returns whether it was there.

        Raises Conflicted if it is another by now; Unavailable.
        """
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        return self._if_there("DELETE", kind.path_of(name), options) is not None

    def list_of(
        self, kind: ObjectKind, selector: Mapping[str, str], read: Callable[[dict[str, Any]], T]
    ) -> tuple[str, list[T]]:
        """List what `read` makes of the objects whose fields are these, as fresh as the server's cache; their version.

        Raises Unavailable; Refused with status 410 if the server forgot the list before its last page was asked for.
        """

        def kept(found: dict[str, Any]) -> Any:
            return _Read(read(found)) if found.keys() >= kind.item else found

        query = {"fieldSelector": _fields(selector), "limit": str(ITEMS_PER_PAGE)}
        items: list[T] = []
        start = {"resourceVersion": "0"}
        while True:
            page = self._call("GET", f"{kind.path}?{urlencode(query | start)}", kept=kept)
            for item in at(page, "items", list, []):
                if not isinstance(item, _Read):
                    raise Unavailable(f"LIST {kind.path}: an item is no {kind.kind}")
                items.append(item.value)
            if not (more := at(page, "metadata.continue", str, "")):
                return at(page, "metadata.resourceVersion", str), items
            start = {"continue": more}

    def watch(
        self, kind: ObjectKind, selector: Mapping[str, str], since: str, seconds: int
    ) -> Iterator[dict[str, Any]]:
        """Yield what happens to the objects whose fields are these after the resource version `since`.

        The server ends the watch after so many seconds; one that goes on for a little longer counts as dead. Raises
        Unavailable; Refused with status 410 if the server no longer knows that version.
        """
        query = urlencode(
            {
                "watch": "true",
                "fieldSelector": _fields(selector),
                "resourceVersion": since,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(seconds),
            }
        )
        where = f"WATCH {kind.path}"
        with self._answer(
            "GET", f"{kind.path}?{query}", None, "application/json", seconds + self._read_seconds
        ) as response:
            if response.status != 200:
                raise refusal(response.status, response.headers.get("Retry-After"), body_of(response), where)
            with translated(where):
                for line in lines_of(response):
                    yield _event(line, where)

    def _if_there(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        try:
            return self._call(method, path, document)
        except Refused as refused:
            if refused.status == HTTPStatus.NOT_FOUND:
                return None
            raise

    def _call(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | bytes | None = None,
        accept: str = "application/json",
        kept: Callable[[dict[str, Any]], Any] | None = None,
        content_type: str = APPLY,
    ) -> dict[str, Any]:
        """Send a request. `content_type` is that of a patch."""
        where = f"{method} {path.partition('?')[0]}"
        with (
            self._turn(where),
            self._answer(method, path, document, accept, self._read_seconds, content_type) as response,
        ):
            with translated(where):
                data = body_of(response)
            status, retry_after = int(response.status), response.headers.get("Retry-After")
        if 200 <= status < 300:
            return decoded(data, where, kept)
        raise refusal(status, retry_after, data, where)

    @contextlib.contextmanager
    def _turn(self, where: str) -> Iterator[None]:
        if not self._turns.acquire(timeout=self._read_seconds + CONNECT_SECONDS):
            raise Unavailable(f"{where} is not sent: the API server has not answered earlier requests for too long")
        try:
            yield
        finally:
            self._turns.release()

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        document: Mapping[str, Any] | bytes | None,
        accept: str,
        seconds: float,
        content_type: str = APPLY,
    ) -> Iterator[Any]:
        """Send a request, and give its answer's head with the body still to be read, all within so many seconds."""
        from urllib3 import Timeout

        headers = {"Accept": accept}
        if document is not None:
            headers["Content-Type"] = content_type if method == "PATCH" else "application/json"
        body = document if document is None or isinstance(document, bytes) else json.dumps(document).encode()
        with translated(f"{method} {path.partition('?')[0]}"):
            # Also renews the token, if its file was.
            method, url, headers, *_ = self._client.param_serialize(
                method, path, header_params=headers, auth_settings=["BearerToken"]
            )
            # Not by the package, which would write the bodies of some requests itself, and in its own way.
            timeout = Timeout(connect=CONNECT_SECONDS, read=seconds)
            response = self._client.rest_client.pool_manager.request(
                method, url, body=body, headers=headers, timeout=timeout, preload_content=False
            )
        with contextlib.closing(response):
            yield response


def json_of(document: Mapping[str, Any], blanks: bool) -> bytes:
    """Write JSON with the keys in their order, as most clients do, or with blanks and in ASCII, as Python's do.

    The API server keeps the parameters of claims as bytes (RawExtension), and calls them changed if a blank is.
    """
    if blanks:
        return json.dumps(document).encode()
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _opened(load_into: Callable[[Any], object]) -> Any:
    """Open a client for what is loaded into its configuration: address and credentials."""
    with _IMPORTING:
        from kubernetes.client import ApiClient, Configuration

    from agent.cluster.whole_answers import limit

    configuration = Configuration(retries=False)
    configuration.keep_alive = True  # else a watch of a server that fell silent looks alive until its time is over
    load_into(configuration)
    client = ApiClient(configuration)
    limit(client.rest_client.pool_manager)
    return client


log = logging.getLogger(__name__)


async def on_own_thread(work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Run blocking work on a daemon thread of its own.

    Not on the loop's executor: the interpreter joins that one's threads at exit, so an API server
    that does not answer would hold up the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]  # None only where T allows it

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work(*args, **more)
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, value, failure)
        except RuntimeError:
            log.debug("the loop ended before the API server answered")

    threading.Thread(target=run, name="api", daemon=True).start()
    return await done


def _fields(selector: Mapping[str, str]) -> str:
    return ",".join(f"{field}={value}" for field, value in selector.items())


def _event(line: bytes, where: str) -> dict[str, Any]:
    event = decoded(line, where)
    if event.get("type") == "ERROR":
        code, text = at(event, "object.code", int, 500), at(event, "object.message", str, "failed")
        raise Refused(code, f"{where}: {text}")
    return event


MAX_RETRY_AFTER_SECONDS = 3600.0
MAX_ANSWER_BYTES = 16 << 20
"""500 pods, which no kubelet is meant for, of 32 KiB each, which few have."""
MAX_TEXT = 2000
"""Of a refusal's message, for errors and logs."""

_MANAGER = re.compile(r'conflict with "([^"]*)"')
_CUSTOM = re.compile(r"PATCH /apis/([^/]+)/[^/]+/([^/]+)/[^/]+$")
_OF_DRA = re.compile(r"[A-Z]+ /apis/resource\.k8s\.io/v1/resourceslices")


@contextlib.contextmanager
def translated(where: str) -> Iterator[None]:
    """Turn the package's errors, and those of the connection, into Unavailable."""
    from kubernetes.client.exceptions import ApiException
    from kubernetes.config.config_exception import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (ApiException, ConfigException, HTTPError, OSError) as error:
        raise Unavailable(f"{where}: the API server does not answer: {_short(error)}") from error


def body_of(response: Any) -> bytes:
    """Read a whole answer. Raises Unavailable for one without end."""
    data: bytes = response.read(MAX_ANSWER_BYTES + 1)
    if len(data) > MAX_ANSWER_BYTES:
        raise Unavailable(f"the API server's answer is larger than {MAX_ANSWER_BYTES} bytes")
    return data


def lines_of(response: Any) -> Iterator[bytes]:
    """Yield the lines of a streamed answer as they come: one watch event each, which holds one object.

    Raises Unavailable for a line without end.
    """
    pending = b""
    for chunk in response.stream(amt=None):
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > MAX_ANSWER_BYTES:
            raise Unavailable(f"an event of the API server is larger than {MAX_ANSWER_BYTES} bytes")
        yield from filter(None, lines)


def decoded(data: bytes, where: str, kept: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """Read a JSON object, with what `kept` makes of each object in it. Raises Unavailable for anything else.

    Decoded, an object may take a dozen times as much memory as it has bytes, and who may create pods decides how many
    and how large those of a node are. So a list is read with a `kept` that keeps little of each as soon as it is there.
    """
    try:
        document = json.loads(data, object_hook=kept)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{where}: the answer is not JSON, or nested too deeply") from error
    if not isinstance(document, dict):
        raise Unavailable(f"{where}: the answer is not a JSON object")
    if is_deep(document):
        raise Unavailable(f"{where}: the answer is nested more than {MAX_DEPTH} levels deep")
    return document


def refusal(status: int, retry_after: str | None, data: bytes, where: str) -> Unavailable:
    """Make the error for an answer of this status, with the remedy where there is one."""
    try:
        answer = decoded(data, where)
        text = _shortened(at(answer, "message", str))
    except Unavailable:
        answer, text = {}, data[:200].decode("utf-8", "replace")
    if status == 404 and _OF_DRA.match(where):
        text += " (Kubernetes 1.34 and newer have resource.k8s.io/v1: does this cluster?)"
    elif status == 404 and (custom := _CUSTOM.match(where)):
        text += f" (is the CustomResourceDefinition {custom[2]}.{custom[1]} installed?)"
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
    """Read who owns what from the causes of a conflict; nobody, where it does not name them as Kubernetes does."""
    found = []
    with contextlib.suppress(Unavailable):
        for cause in objects_at(answer, "details.causes"):
            if (manager := _MANAGER.search(at(cause, "message", str, ""))) is not None:
                found.append((at(cause, "field", str, ""), manager[1]))
    return found


def _shortened(text: str) -> str:
    """Leave the middle of a long text out: a refused value stands between the field and what is wrong with it."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2]} ... {text[-MAX_TEXT // 2 :]}"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
