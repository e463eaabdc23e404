"""What the API server answers: bodies, streams, and refusals as errors of ours."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agent.errors import Conflicted, Refused, Unavailable
from agent.model.fields import MAX_DEPTH, at, is_deep, objects_at

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
    except (ApiException, ConfigException, HTTPError, ssl.SSLError, OSError) as error:
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
    if is_deep(data, document):
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
