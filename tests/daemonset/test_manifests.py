from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from agent import cdi, config
from agent.__main__ import DEFAULT_CONFIG, _parser
from agent.clients.apiserver import ApiServer
from agent.sim import recorded
from agent.sim.machine import SimulatedMachine
from agent.sim.pods import read_manifest
from agent.startup import check
from cni import netconf
from cni.commands import DEFAULT_CONFIGURATIONS, DEFAULT_RELAY, DEFAULT_TARGET

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "daemonset"
BASE = FOLDER / "base"
MANIFESTS = sorted(p for p in FOLDER.rglob("*.yaml"))
PODS = sorted((FOLDER / "examples").glob("pod-*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d is not None]


def daemonset() -> dict[str, Any]:
    (document,) = documents(BASE / "daemonset.yaml")
    spec: dict[str, Any] = document["spec"]["template"]["spec"]
    return spec


def agent_container() -> dict[str, Any]:
    (container,) = daemonset()["containers"]
    return dict(container)


def base_config() -> config.Config:
    path = BASE / "config.yaml"
    return config.parse(path.read_text(), str(path))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: str(p.relative_to(FOLDER)))
def test_every_file_is_yaml_with_a_kind(path: Path) -> None:
    if path == BASE / "config.yaml":
        return
    for document in documents(path):
        assert {"apiVersion", "kind"} <= set(document)


def test_the_kustomization_names_every_file_of_the_base_and_no_other() -> None:
    (document,) = documents(BASE / "kustomization.yaml")
    named = {*document["resources"], *document["configMapGenerator"][0]["files"], "kustomization.yaml"}
    assert named == {p.name for p in BASE.iterdir()}


@pytest.mark.parametrize("name", [p.stem for p in sorted((REPOSITORY / "tests/nodes").glob("*.json"))])
def test_the_config_is_accepted_on_every_kind_of_node(name: str, tmp_path: Path) -> None:
    SimulatedMachine.create(tmp_path / "node", recorded.load(recorded.find(name)), with_links=False)
    host = SimulatedMachine.open(tmp_path / "node")
    try:
        check(base_config(), host.scan())
    finally:
        host.close()


def test_the_config_is_mounted_where_the_agent_reads_it() -> None:
    (document,) = documents(BASE / "kustomization.yaml")
    (volume,) = [v for v in daemonset()["volumes"] if v["name"] == "config"]
    assert volume["configMap"]["name"] == document["configMapGenerator"][0]["name"]
    (mount,) = [m for m in agent_container()["volumeMounts"] if m["name"] == "config"]
    assert f"{mount['mountPath']}/config.yaml" == str(DEFAULT_CONFIG)


def test_the_arguments_are_understood() -> None:
    (install,) = daemonset()["initContainers"]
    assert _parser().parse_args(agent_container()["args"]).config == DEFAULT_CONFIG
    target = _parser().parse_args(install["args"]).target
    (mount,) = install["volumeMounts"]
    assert str(target) == mount["mountPath"]


def test_every_path_the_config_names_is_a_mount_of_the_same_host_path() -> None:
    conf = base_config()
    needed = {
        conf.kubelet_dir / "device-plugins": True,
        conf.kubelet_dir / "pod-resources": False,
        conf.topology.kubelet_config: False,
        conf.state_dir: True,
        conf.run_dir: True,
        Path("/var/run/netns"): False,
        Path("/opt/cni/bin"): False,
        **dict.fromkeys(cdi.SPEC_FOLDERS, False),
    }
    host_paths = {v["name"]: v["hostPath"]["path"] for v in daemonset()["volumes"] if "hostPath" in v}
    mounts = {m["mountPath"]: m for m in agent_container()["volumeMounts"]}
    for path, writable in needed.items():
        mount = mounts[str(path)]
        assert host_paths[mount["name"]] == str(path)
        assert mount.get("readOnly", False) is not writable


def test_every_volume_is_mounted_and_every_mount_has_a_volume() -> None:
    spec = daemonset()
    mounted = {m["name"] for c in (*spec["containers"], *spec["initContainers"]) for m in c["volumeMounts"]}
    assert mounted == {v["name"] for v in spec["volumes"]}


def test_new_namespaces_of_pods_show_up_in_the_container() -> None:
    (mount,) = [m for m in agent_container()["volumeMounts"] if m["name"] == "netns"]
    assert mount["mountPropagation"] == "HostToContainer"


def test_privileges_are_the_least_that_do() -> None:
    spec = daemonset()
    (install,) = spec["initContainers"]
    assert spec.get("hostPID", False) is False
    assert spec["hostNetwork"] is True
    for container, added in ((agent_container(), ["NET_ADMIN", "SYS_ADMIN"]), (install, ["DAC_OVERRIDE"])):
        context = container["securityContext"]
        assert context.get("privileged", False) is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"], "add": added}
    # The API server refuses the one together with the other.
    assert "allowPrivilegeEscalation" not in agent_container()["securityContext"]


def chain_container() -> dict[str, Any]:
    (component,) = documents(FOLDER / "components/chain/kustomization.yaml")
    (patch,) = component["patches"]
    (document,) = yaml.safe_load_all(patch["patch"])
    assert (
        document["metadata"]["name"]
        == patch["target"]["name"]
        == documents(BASE / "daemonset.yaml")[0]["metadata"]["name"]
    )
    (container,) = document["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_the_component_that_chains_works_on_the_host_paths_of_the_base() -> None:
    container = chain_container()
    options = _parser().parse_args(container["args"])
    host_paths = {v["name"]: v["hostPath"]["path"] for v in daemonset()["volumes"] if "hostPath" in v}
    mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
    for path, host_path in ((options.target, DEFAULT_TARGET), (options.conf_dir, DEFAULT_CONFIGURATIONS)):
        assert host_paths[mounts[str(path)]["name"]] == str(host_path)
        assert not mounts[str(path)].get("readOnly", False)
    assert (options.chain, options.watch) == (True, True)
    assert options.wait_for == base_config().cni_socket
    assert host_paths[mounts[str(options.wait_for.parent)]["name"]] == str(base_config().run_dir)
    assert container["name"] not in {c["name"] for c in daemonset()["containers"]}


def test_the_component_for_writes_to_sysfs_adds_a_volume_to_the_agent_of_the_base() -> None:
    (component,) = documents(FOLDER / "components/sysfs/kustomization.yaml")
    (patch,) = component["patches"]
    (document,) = yaml.safe_load_all(patch["patch"])
    spec = document["spec"]["template"]["spec"]
    (container,), (volume,) = spec["containers"], spec["volumes"]
    assert container["name"] == agent_container()["name"]
    assert volume["name"] not in {v["name"] for v in daemonset()["volumes"]}
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": volume["hostPath"]["path"]}]


def test_what_removes_undoes_what_the_base_and_the_component_did() -> None:
    (kustomization,) = documents(FOLDER / "remove/kustomization.yaml")
    (base,) = documents(BASE / "kustomization.yaml")
    assert kustomization["namespace"] == base["namespace"]
    assert kustomization["images"] == base["images"]
    (document,) = documents(FOLDER / "remove/daemonset.yaml")
    spec = document["spec"]["template"]["spec"]
    (remove,) = spec["initContainers"]
    options, chained = _parser().parse_args(remove["args"]), _parser().parse_args(chain_container()["args"])
    assert (options.target, options.conf_dir) == (chained.target, chained.conf_dir)
    assert {m["name"] for m in remove["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    host_paths = {v["name"]: v["hostPath"]["path"] for v in daemonset()["volumes"] if "hostPath" in v}
    for volume in spec["volumes"]:
        assert host_paths[volume["name"]] == volume["hostPath"]["path"]


def test_all_who_install_or_remove_say_for_whom_alike() -> None:
    (document,) = documents(FOLDER / "remove/daemonset.yaml")
    (remove,) = document["spec"]["template"]["spec"]["initContainers"]
    (install,) = daemonset()["initContainers"]
    assert install["env"] == remove["env"] == chain_container()["env"]
    assert install["env"][0]["name"] == "NODEFABRIC_INSTANCE"


def test_probes_ask_where_the_endpoints_listen() -> None:
    endpoints = base_config().endpoints
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = agent_container()[probe]["httpGet"]
        assert (get["host"], get["port"]) == (endpoints.address, endpoints.port)
        assert get["path"] == ("/readyz" if probe == "readinessProbe" else "/healthz")


def test_an_update_never_runs_two_agents_on_a_node() -> None:
    (document,) = documents(BASE / "daemonset.yaml")
    assert document["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
    assert document["spec"]["template"]["spec"]["priorityClassName"] == "system-node-critical"


@pytest.fixture
def asked() -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """An API server that notes method and path."""
    seen: list[tuple[str, str]] = []

    class Note(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.command, self.path.partition("?")[0]))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.dumps({"metadata": {"uid": "u"}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PATCH = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Note)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server.server_address[1], seen
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_role_allows_what_the_client_calls_and_nothing_else(
    asked: tuple[int, list[tuple[str, str]]], tmp_path: Path
) -> None:
    port, seen = asked
    path = tmp_path / "kubeconfig"
    named = {"name": "x", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
    user: dict[str, Any] = {"name": "x", "user": {}}
    path.write_text(json.dumps({"current-context": "x", "clusters": [named], "contexts": [context], "users": [user]}))
    client = ApiServer.from_kubeconfig(path)
    client.node_uid("n")
    client.apply_topology({"metadata": {"name": "n"}})
    client.close()
    needed: set[tuple[str, str, str]] = set()
    for method, url in seen:
        match = re.fullmatch(r"/(?:api|apis/([^/]+))/[^/]+/([^/]+)/n", url)
        assert match is not None
        # An apply creates the object if there is none, and the API server asks for both verbs.
        for verb in {"GET": ["get"], "PATCH": ["patch", "create"]}[method]:
            needed.add((match[1] or "", match[2], verb))
    role, binding = documents(BASE / "rbac.yaml")
    allowed = {
        (g, r, v) for rule in role["rules"] for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
    }
    assert allowed == needed
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (account,) = documents(BASE / "serviceaccount.yaml")
    assert binding["subjects"][0]["name"] == account["metadata"]["name"] == daemonset()["serviceAccountName"]


@pytest.mark.parametrize("path", PODS, ids=lambda p: p.stem)
def test_an_example_pod_asks_for_resources_of_the_base_config(path: Path) -> None:
    (pod,) = read_manifest(path.read_text(), str(path))
    offered = {resource.name for resource in base_config().resources}
    asked_for = {name for container in pod.containers for name, _ in container.limits}
    assert asked_for
    assert asked_for <= offered


def test_the_example_networks_are_understood_by_the_plugin() -> None:
    chain = json.loads((FOLDER / "examples/cluster.conflist").read_text())
    ours = [{"name": chain["name"], "cniVersion": chain["cniVersion"], **p} for p in chain["plugins"]][-1]
    assert ours["type"] == "nodefabric"
    netconf.from_document(ours)
    (attachment,) = documents(FOLDER / "examples/network-attachment.yaml")
    parsed = netconf.from_document(json.loads(attachment["spec"]["config"]))
    assert (parsed.settings.vlan, parsed.settings.trust, parsed.mtu) == (100, True, 9000)
    resource_name = attachment["metadata"]["annotations"]["k8s.v1.cni.cncf.io/resourceName"]
    assert resource_name in {resource.name for resource in base_config().resources}


def test_the_image_copies_what_is_in_the_repository_and_lets_through_what_it_copies() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    let_through = {
        PurePosixPath(line[1:])
        for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            path = PurePosixPath(source)
            assert (REPOSITORY / path).exists(), source
            assert {path, *path.parents} & let_through, source


def test_the_image_installs_by_hash_only_and_puts_the_relay_where_it_is_looked_for() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", "")
    for line in text.splitlines():
        if "pip " in line and "install" in line:
            assert "--require-hashes" in line or "--no-deps" in line
    assert f"COPY --from=build /opt/relay {DEFAULT_RELAY.parent}" in text
    assert f'ln -s "$(dpkg --print-architecture)/nodefabric-cni" /opt/relay/{DEFAULT_RELAY.name}' in text
    locked = (REPOSITORY / "requirements/dev.txt").read_text()
    for name in re.findall(r"\^\(([^)]+)\)==", text)[0].split("|"):
        assert re.search(rf"^{name}==", locked, re.MULTILINE), name
