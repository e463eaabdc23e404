"""What kubelet's DRA manager asks of the API server: claims, and the end of slices.

Source: Kubernetes 1.36, pkg/kubelet/cm/dra/manager.go and plugin/dra_plugin_manager.go.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

API = "apis/resource.k8s.io/v1"
TIMEOUT_SECONDS = 10.0


class ClusterFailed(Exception):
    """The API server does not answer, or not with what was asked for."""


class Cluster(Protocol):
    """The API server, as kubelet sees it. Both block, and raise ClusterFailed."""

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a ResourceClaim; None if there is none."""

    def wipe(self, driver: str) -> None:
        """Delete the node's ResourceSlices of a driver, or of all if it is empty."""


class HttpCluster:
    """An API server that is asked without credentials, as stand-ins are."""

    def __init__(self, url: str, node: str) -> None:
        self._url = url.rstrip("/")
        self._node = node
        # Whatever proxy the environment names is for others.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def claim(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        path = f"{API}/namespaces/{urllib.parse.quote(namespace)}/resourceclaims/{urllib.parse.quote(name)}"
        return self._ask("GET", path)

    def wipe(self, driver: str) -> None:
        selector = f"spec.nodeName={self._node}" + (f",spec.driver={driver}" if driver else "")
        self._ask("DELETE", f"{API}/resourceslices?" + urllib.parse.urlencode({"fieldSelector": selector}))

    def _ask(self, method: str, path: str) -> Mapping[str, Any] | None:
        request = urllib.request.Request(f"{self._url}/{path}", method=method)
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                document: Mapping[str, Any] = json.loads(answer.read())
                return document
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise ClusterFailed(f"{method} {path}: {error.code} {error.reason}") from error
        except (OSError, ValueError) as error:
            raise ClusterFailed(f"{method} {path}: {error}") from error
