"""The configuration file: what is read from it, and what is said about one that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from agent import config
from agent.config import Config, PfSelector
from agent.errors import ConfigError
from agent.model.device import LinkLayer
from tests.agent.config.refused import problems_of

FULL = """
resources:
  - {name: rdma/hca, kind: hca, shares: 10, management: true, select: {linkLayer: [InfiniBand, Ethernet]}}
  - name: rdma/vf
    kind: vf
    network: rails
    select:
      vendors: ["15b3", "0x8086"]
      devices: ["101e"]
      drivers: [mlx5_core]
      pciAddresses: ["0000:3B:00.2"]
      pf: ["ens1f0#0-2,7", "ens2f0"]
      netdevs: [ens1f0v0]
      rdmaDevices: [mlx5_2]
  - {name: nvidia.com/gpu, kind: gpu}
networks:
  - {name: rails, mode: vf, mtu: 9000, ipam: {type: host-local}}
endpoints: {address: "::", port: 0, status: everywhere}
topology: {publish: true, settleSeconds: 1, heartbeatSeconds: 60.5, kubeletConfig: /etc/kubelet.yaml}
kubeletDir: /k
stateDir: /s
runDir: /r
runtimeSocket: /run/containerd/containerd.sock
rescanSeconds: 5
"""


def test_every_key_is_read() -> None:
    read = config.parse(FULL, "test.yaml")
    hca, vf, gpu = read.resources
    assert (hca.name, hca.kind, hca.shares, hca.management) == ("rdma/hca", "hca", 10, True)
    assert hca.select.link_layers == (LinkLayer.INFINIBAND, LinkLayer.ETHERNET)
    assert vf.select.vendors == (0x15B3, 0x8086)
    assert vf.select.devices == (0x101E,)
    assert vf.select.drivers == ("mlx5_core",)
    assert vf.select.pci_addresses == ("0000:3b:00.2",)
    assert vf.select.pf == (PfSelector("ens1f0", frozenset({0, 1, 2, 7})), PfSelector("ens2f0"))
    assert vf.select.netdevs == ("ens1f0v0",)
    assert vf.select.rdma_devices == ("mlx5_2",)
    assert (vf.network, gpu.network) == ("rails", None)
    network = read.network_of("rdma/vf")
    assert network is not None
    assert (network.name, network.setup.mode, network.setup.mtu) == ("rails", "vf", 9000)
    assert network.setup.ipam == {"type": "host-local"}
    assert (read.endpoints.address, read.endpoints.port, read.endpoints.status) == ("::", 0, "everywhere")
    assert read.topology.publish
    assert (read.topology.settle_seconds, read.topology.heartbeat_seconds) == (1.0, 60.5)
    assert read.topology.kubelet_config == Path("/etc/kubelet.yaml")
    assert (read.kubelet_dir, read.ledger_path) == (Path("/k"), Path("/s/ledger.db"))
    assert (read.spool_dir, read.cni_socket) == (Path("/s/spool"), Path("/r/cni.sock"))
    assert read.runtime_socket == Path("/run/containerd/containerd.sock")
    assert read.rescan_seconds == 5.0
    assert read.source == "test.yaml"


@pytest.mark.parametrize("text", ["", "{}", "# nothing\n", "---\n", "null"])
def test_an_empty_document_means_the_defaults(text: str) -> None:
    assert config.parse(text, "empty.yaml") == Config()


def test_json_is_read_as_the_yaml_that_it_is() -> None:
    document = {
        "resources": [{"name": "rdma/hca", "kind": "hca", "network": "pods"}],
        "networks": [{"name": "pods", "mode": "macvlan"}],
    }
    assert config.parse(json.dumps(document), "file") == config.parse(yaml.safe_dump(document), "file")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("port: 1", "port"),
        ("endpoints: {prot: 1}", "endpoints.prot"),
        ("topology: {enabled: true}", "topology.enabled"),
        ("resources: [{name: a/b, kind: vf, selector: {}}]", "resources[0].selector"),
        ("resources: [{name: a/b, kind: vf, select: {pfs: [x]}}]", "resources[0].select.pfs"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_known_ones(text: str, path: str) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith(f"{path}: is not a known key here")
    assert "; known are: " in problem


def test_a_key_that_is_nearly_right_is_named() -> None:
    (problem,) = problems_of("resources: [{name: a/b, kind: vf, selct: {}}]")
    assert problem.startswith("resources[0].selct: is not a known key here (did you mean 'select'?); known are: ")


@pytest.mark.parametrize(
    ("kind", "key", "text"),
    [
        (
            "gpu",
            "spread: false",
            "is for vf, hca, not gpu: GPUs are always taken so that switches and NUMA nodes stay whole",
        ),
        ("vf", "shares: 3", "is for hca, not vf: leave it out"),
        ("gpu", "management: true", "is for vf, hca, nic, rail, not gpu: leave it out"),
        ("gpu", "network: n", "is for vf, hca, nic, rail, not gpu: leave it out"),
    ],
)
def test_a_key_of_another_kind_is_refused_with_the_kinds_that_have_it(kind: str, key: str, text: str) -> None:
    (problem,) = problems_of(f"resources: [{{name: a/b, kind: {kind}, {key}}}]")
    assert problem.startswith(f"resources[0].{key.partition(':')[0]}: {text}")


@pytest.mark.parametrize(
    "value",
    ["2026-01-01", "!!binary aGVsbG8=", "!!set {a}", "{1: x}", ".nan", "&b {x: *b}"],
)
def test_a_network_must_be_expressible_in_json(value: str) -> None:
    """It goes to the IPAM plugin as JSON."""
    (problem,) = problems_of(f"networks: [{{name: n, ipam: {{type: host-local, x: {value}}}}}]")
    assert problem.startswith("networks[0]")


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        ("endpoints.port", 0, 65535),
        ("topology.settleSeconds", 0, 600),
        ("topology.heartbeatSeconds", 10, 86400),
        ("rescanSeconds", 1, 3600),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(key: str, low: int, high: int) -> None:
    outer, _, inner = key.partition(".")

    def text(value: object) -> str:
        return f"{outer}: {{{inner}: {value}}}" if inner else f"{outer}: {value}"

    for fine in (low, high):
        config.parse(text(fine), "test.yaml")
    for wrong in (low - 1, high + 1, "true", "'5'", ".nan", ".inf", "-.inf", "null"):
        (problem,) = problems_of(text(wrong))
        assert problem.startswith(f"{key}: must be a")
        assert f"from {low} to {high}" in problem


@pytest.mark.parametrize("key", ["kubeletDir", "stateDir", "runDir", "runtimeSocket"])
@pytest.mark.parametrize("value", ["relative", "/..", "/../etc", "/a/../b", "/a/..", "5", '"/a\\0b"', '"/a\\nb"', "''"])
def test_a_folder_must_be_an_absolute_path_without_dots(key: str, value: str) -> None:
    (problem,) = problems_of(f"{key}: {value}")
    assert problem.startswith(f"{key}: must be an absolute path")


@pytest.mark.parametrize("value", ["/", "/a", "/a/b..c/..d", "/var/lib/node fabric"])
def test_an_ordinary_path_is_fine(value: str) -> None:
    assert config.parse(f"stateDir: {value}", "test.yaml").state_dir == Path(value)


@pytest.mark.parametrize("value", ["localhost", "dead", "1.2.3", "1.2.3.4:80", "':::'", "''"])
def test_the_address_to_listen_on_must_be_an_ip_address(value: str) -> None:
    (problem,) = problems_of(f"endpoints: {{address: {value}}}")
    assert problem.startswith("endpoints.address: must be an IP address")


@pytest.mark.parametrize(
    "name", ["hca", "rdma/", "/hca", "RDMA/hca", "a/b/c", "rdma/-x", "-a/b", "a..b/c", "a/" + "x" * 64]
)
def test_a_resource_name_must_be_one_that_kubelet_accepts(name: str) -> None:
    (problem,) = problems_of(f"resources: [{{name: {name!r}, kind: gpu}}]")
    assert problem.startswith("resources[0].name: must be domain/name")


@pytest.mark.parametrize("domain", ["kubernetes.io", "vfs.kubernetes.io", "requests.example.com"])
def test_a_resource_name_that_kubelet_keeps_for_itself_is_refused(domain: str) -> None:
    """It answers Register with `the ResourceName … is invalid`, each time (devicemanager/plugin/v1beta1)."""
    (problem,) = problems_of(f"resources: [{{name: {domain}/vf, kind: vf}}]")
    assert problem == (
        f"resources[0].name: {domain}/vf is a name of Kubernetes' own, which kubelet refuses: take a domain of yours"
    )


def test_a_name_used_twice_is_refused() -> None:
    found = problems_of(
        "resources: [{name: a/b, kind: gpu}, {name: a/b, kind: vf}]\nnetworks: [{name: n}, {name: m}, {name: n}]"
    )
    assert found == (
        "networks[2].name: 'n' is used by networks[0] already",
        "resources[1].name: 'a/b' is used by resources[0] already",
    )


@pytest.mark.parametrize(
    "text", ["", "#", "x#", "x#a", "x#1-", "x#-1", "x#2-1", "x#65536", "x#1,,2", "a b", "a/b", "..", "x#\uff11"]
)
def test_a_pf_selector_that_is_wrong_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^"):
        config.parse_pf(text)


# fmt: off
# fmt: on


@pytest.mark.parametrize(
    ("kind", "mode", "wrong"),
    [
        ("hca", "macvlan", None),
        ("hca", "ipoib", None),
        ("vf", "vf", None),
        ("hca", "vf", "has mode vf, which takes the adapter from the others that share it"),
        ("hca", "nic", "has mode nic"),
        ("vf", "macvlan", "has mode macvlan, which is for kind hca, not vf"),
    ],
)
def test_a_network_must_suit_its_resource(kind: str, mode: str, wrong: str | None) -> None:
    text = f"resources: [{{name: a/b, kind: {kind}, network: n}}]\nnetworks: [{{name: n, mode: {mode}}}]"
    if wrong is None:
        assert config.parse(text, "file").resources[0].network == "n"
    else:
        (problem,) = problems_of(text)
        assert problem.startswith("resources[0].network: 'n' has mode")
        assert wrong in problem


@pytest.mark.parametrize(
    ("drivers", "rdma", "is_wrong"),
    [
        ("[vfio-pci]", "true", True),
        ("[vfio-pci, igb_uio]", "true", True),
        ("[vfio-pci, mlx5_core]", "true", False),
        ("[vfio-pci]", "false", False),
        ("[]", "true", False),
    ],
)
@pytest.mark.parametrize("shape", ["{{kind: vf, {}}}", "{{kind: rail, nic: {{kind: vf, {}}}}}"])
def test_devices_for_programs_cannot_bring_an_rdma_device(shape: str, drivers: str, rdma: str, is_wrong: bool) -> None:
    resource = shape.format(f"select: {{drivers: {drivers}}}").replace("{kind", "{name: a/b, network: n, kind", 1)
    text = f"resources: [{resource}]\nnetworks: [{{name: n, rdma: {rdma}}}]"
    if not is_wrong:
        assert config.parse(text, "file").resources[0].network == "n"
        return
    (problem,) = problems_of(text)
    assert problem.startswith("resources[0].network: 'n' says rdma: true, and the resource selects devices of vfio-pci")


def test_a_rail_may_have_several_nics() -> None:
    text = "resources: [{{name: a/b, kind: rail, nic: {{kind: {}, {}}}}}]"
    assert config.parse(text.format("vf", "select: {}"), "file").resources[0].nic.count == 1
    assert config.parse(text.format("hca", "count: 4"), "file").resources[0].nic.count == 4
    assert config.parse(text.format("vf", "count: planes"), "file").resources[0].nic.count == "planes"
    for wrong in ("0", "-1", "1.5", "four", "65", "true"):
        (problem,) = problems_of(text.format("nic", f"count: {wrong}"))
        assert problem.startswith("resources[0].nic.count: ")
        assert "1" in problem
    (problem,) = problems_of("resources: [{name: a/b, kind: vf, count: 2}]")
    assert problem.startswith("resources[0].count: ")


def test_errors_of_gpus_are_ignored_or_fatal_by_number_or_all_at_once() -> None:
    health = config.parse("health: {ignoredXids: [all], fatalXids: [48, 79]}", "test").health
    assert [health.gpu_policy.classify(xid).value for xid in (48, 74, 13)] == ["fatal", "application", "application"]
    with pytest.raises(ConfigError) as caught:
        config.parse("health: {fatalXids: [none, -1]}", "test")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "health.fatalXids[0]",
        "health.fatalXids[1]",
    ]
