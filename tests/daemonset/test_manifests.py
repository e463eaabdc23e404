from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.__main__ import DEFAULT_CONFIG, _parser
from agent.edits.cdi import SPEC_FOLDERS
from agent.hardware import recorded
from agent.process.startup import check
from cni.install.commands import DEFAULT_CONFIGURATIONS, DEFAULT_TARGET
from hack.sim.machine import SimulatedMachine
from tests.daemonset.manifests import (
    BASE,
    CHART,
    FOLDER,
    REPOSITORY,
    agent_container,
    base_config,
    container,
    daemonset,
    documents,
    host_paths,
)

MANIFESTS = sorted(
    p for p in FOLDER.rglob("*.yaml") if {CHART, FOLDER / "monitoring", FOLDER / "examples"}.isdisjoint(p.parents)
)


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
        **dict(zip(SPEC_FOLDERS, (False, True), strict=True)),
    }
    shown = host_paths(daemonset())
    mounts = {m["mountPath"]: m for m in agent_container()["volumeMounts"]}
    for path, writable in needed.items():
        mount = mounts[str(path)]
        assert shown[mount["name"]] == str(path)
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
    for either, added in ((agent_container(), ["NET_ADMIN", "SYS_ADMIN"]), (install, ["DAC_OVERRIDE"])):
        context = either["securityContext"]
        assert context.get("privileged", False) is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"], "add": added}
    # The API server refuses the one together with the other.
    assert "allowPrivilegeEscalation" not in agent_container()["securityContext"]


def chain_spec() -> dict[str, Any]:
    (component,) = documents(FOLDER / "components/chain/kustomization.yaml")
    (patch,) = component["patches"]
    (document,) = yaml.safe_load_all(patch["patch"])
    assert (
        document["metadata"]["name"]
        == patch["target"]["name"]
        == documents(BASE / "daemonset.yaml")[0]["metadata"]["name"]
    )
    return dict(document["spec"]["template"]["spec"])


def chain_container() -> dict[str, Any]:
    (found,) = chain_spec()["containers"]
    return dict(found)


def test_the_component_that_chains_works_on_the_host_paths_of_the_base() -> None:
    chain = chain_container()
    options = _parser().parse_args(chain["args"])
    shown = host_paths(daemonset()) | host_paths(chain_spec())
    mounts = {m["mountPath"]: m for m in chain["volumeMounts"]}
    for path, host_path in ((options.target, DEFAULT_TARGET), (options.conf_dir, DEFAULT_CONFIGURATIONS)):
        assert shown[mounts[str(path)]["name"]] == str(host_path)
        assert not mounts[str(path)].get("readOnly", False)
    assert (options.chain, options.watch) == (True, True)
    assert options.wait_for == base_config().cni_socket
    assert shown[mounts[str(options.wait_for.parent)]["name"]] == str(base_config().run_dir)
    assert chain["name"] not in {c["name"] for c in daemonset()["containers"]}


def test_the_component_for_writes_to_sysfs_adds_a_volume_to_the_agent_of_the_base() -> None:
    (component,) = documents(FOLDER / "components/sysfs/kustomization.yaml")
    (patch,) = component["patches"]
    (document,) = yaml.safe_load_all(patch["patch"])
    spec = document["spec"]["template"]["spec"]
    (agent,), (volume,) = spec["containers"], spec["volumes"]
    assert agent["name"] == agent_container()["name"]
    assert volume["name"] not in {v["name"] for v in daemonset()["volumes"]}
    assert agent["volumeMounts"] == [{"name": volume["name"], "mountPath": volume["hostPath"]["path"]}]


def removing() -> dict[str, Any]:
    (document,) = documents(FOLDER / "remove/daemonset.yaml")
    spec: dict[str, Any] = document["spec"]["template"]["spec"]
    return spec


def test_what_removes_looks_where_the_base_and_its_component_put_things() -> None:
    assert {c["image"] for c in (*removing()["containers"], *removing()["initContainers"])} == {
        agent_container()["image"]
    }
    remove = container(removing(), "uninstall")
    options, conf = _parser().parse_args(remove["args"]), base_config()
    assert (options.target, options.conf_dir) == (DEFAULT_TARGET, DEFAULT_CONFIGURATIONS)
    assert (options.kubelet_dir, options.state_dir, options.run_dir) == (
        conf.kubelet_dir,
        conf.state_dir,
        conf.run_dir,
    )
    assert options.cdi_dir in SPEC_FOLDERS
    assert options.nfd_file == conf.topology.labels.nfd_file
    assert options.dra_driver == conf.dra.driver
    (mount,) = remove["volumeMounts"]
    assert (mount["mountPath"], host_paths(removing())[mount["name"]]) == (str(options.root), "/")


def test_what_removes_sits_still_with_no_right_at_all_afterwards() -> None:
    done = container(removing(), "done")
    assert done["securityContext"] == {
        "runAsUser": 65534,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert removing()["automountServiceAccountToken"] is False


def test_all_who_install_or_remove_say_for_whom_alike() -> None:
    remove = container(removing(), "uninstall")
    (install,) = daemonset()["initContainers"]
    assert install["env"] == remove["env"] == chain_container()["env"]
    assert install["env"][0]["name"] == "NODEFABRIC_INSTANCE"


def test_an_update_starts_the_next_agent_beside_the_one_that_serves() -> None:
    (document,) = documents(BASE / "daemonset.yaml")
    assert document["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": "10%", "maxUnavailable": 0}
    spec = document["spec"]["template"]["spec"]
    assert spec["priorityClassName"] == "system-node-critical"
    # With the host's network a named port is the node's: the scheduler would not place a second pod there.
    assert spec["hostNetwork"] is True
    assert not any(one.get("ports") for one in (*spec["containers"], *spec["initContainers"]))
