"""The cluster of pods with claims: an API server in a process of its own, and what the scheduler writes to it.

Source of the claim's status: Kubernetes 1.36, staging/src/k8s.io/api/resource/v1/types.go.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from agent.errors import AgentError
from hack.sim.stage import CONFIG, NODE, Stage, wait

SLICES = f"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.nodeName%3D{NODE}"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
Used = Mapping[str, Sequence[Mapping[str, str]]]
"""Name of a container → the claims, and requests of claims, that it names."""


def start_api_server(stage: Stage) -> int:
    """Start an API server that knows the node, and return its port; its kubeconfig is in the stage's folder."""
    port_file, kubeconfig = stage.folder / "port", stage.folder / "kubeconfig"
    options = ["--port-file", str(port_file), "--kubeconfig", str(kubeconfig), "--node", NODE]
    stage.spawn("apiserver", ["-m", "hack.sim.cluster.apiserver", *options], {})
    wait("the API server", lambda: port_file.exists() or None)
    return int(port_file.read_text())


def kubelet_options(port: int) -> tuple[str, ...]:
    """Say to the kubelet stand-in where the API server is."""
    return "--api-server", f"http://127.0.0.1:{port}", "--node", NODE


def play_claims(stage: Stage, document: Mapping[str, Any] = CONFIG, node: str = "h100-8gpu") -> int:
    """Play a node with its VFs and shares for claims, and an API server, whose port is returned."""
    stage.build_node(node)
    stage.write_config(by_claims(document))
    port = start_api_server(stage)
    stage.start_kubelet(*kubelet_options(port))
    stage.start_agent("--kubeconfig", str(stage.folder / "kubeconfig"))
    return port


def by_claims(document: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with all VFs and shares for claims."""
    resources = [{**r, "offer": "dra"} if r["kind"] in ("vf", "hca") else r for r in document["resources"]]
    return {**document, "resources": resources}


def call(port: int, method: str, path: str, document: Any = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, method=method)
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AgentError(f"{method} {path}: {error.read().decode()}") from error


def devices(port: int) -> list[dict[str, Any]]:
    return [device for found in call(port, "GET", SLICES)["items"] for device in found["spec"].get("devices", ())]


def claim(port: int, name: str, pod: Mapping[str, str], *results: Mapping[str, Any], **meta: Any) -> str:
    """Make a claim, allocate it and reserve it for a pod, as the scheduler does; its UID."""
    names = dict.fromkeys(result["request"] for result in results)
    counts = {name: sum(result["request"] == name for result in results) for name in names}
    requests = [{"name": n, "exactly": {"deviceClassName": "rdma-vf", "count": counts[n]}} for n in names]
    head = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim"}
    meta |= {"name": name, "namespace": "default"}
    made = call(port, "POST", CLAIMS, {**head, "metadata": meta, "spec": {"devices": {"requests": requests}}})
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
    status = {
        "allocation": {
            "devices": {
                "results": [{"driver": "nodefabric.io", "pool": NODE, **result} for result in results],
            },
            "nodeSelector": {"nodeSelectorTerms": [term]},
        },
        "reservedFor": [{"resource": "pods", **pod}],
    }
    call(port, "PUT", f"{CLAIMS}/{name}/status", {**made, "status": status})
    uid: str = made["metadata"]["uid"]
    return uid


def create(stage: Stage, pod: Mapping[str, str], claims: Sequence[str], containers: Used | None = None) -> None:
    """Have kubelet see a pod with claims. Without `containers` it has one, which names them all."""
    used = containers or {"main": [{"name": name} for name in claims]}
    spec = {
        "resourceClaims": [{"name": name, "resourceClaimName": name} for name in claims],
        "containers": [{"name": name, "resources": {"claims": list(named)}} for name, named in used.items()],
    }
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "default", **pod}, "spec": spec}
    (stage.folder / "manifests" / f"{pod['name']}.yaml").write_text(yaml.safe_dump(document))
