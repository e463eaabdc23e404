"""What doctor sees: files below a root, sockets, and what agent and runtime tell; what is not there is unseen."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from agent.__main__ import main
from agent.config import Config, Endpoints, Resource, Topology
from agent.model.device import Snapshot
from agent.report.doctor.collect import acs_control, claims, collect, data_direct, modules, networks, runtime
from agent.report.doctor.facts import UNLIMITED, DataDirectFacts, NetworkFile
from agent.report.endpoints import Check, EndpointServer, Pages
from agent.report.status import served
from proto.cri.v1 import api_pb2


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_modules_are_loaded_or_built_in(tmp_path: Path) -> None:
    assert modules(tmp_path) is None
    write(
        tmp_path,
        {
            "proc/modules": "ib_uverbs 200704 2 mlx5_ib, Live 0x0\nvfio_pci 16384 0 - Live 0x0\n",
            "proc/sys/kernel/osrelease": "6.1.0-x\n",
            "lib/modules/6.1.0-x/modules.builtin": "kernel/drivers/infiniband/core/rdma_ucm.ko\nkernel/a/b-c.ko\n",
            "sys/module/mlx5_core/version": "1\n",
        },
    )
    assert modules(tmp_path) == frozenset({"ib_uverbs", "vfio_pci", "rdma_ucm", "b_c", "mlx5_core"})


def test_kubelets_policy_is_that_of_its_drop_ins_and_of_the_file_that_is_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "var/lib/kubelet/config.yaml": "topologyManagerPolicy: none\n",
            "etc/kubelet.yaml": "topologyManagerPolicy: best-effort\n",
            "etc/kubelet.d/90-numa.conf": "topologyManagerPolicy: restricted\n",
        },
    )
    named = Topology(kubelet_config=Path("/etc/kubelet.yaml"))
    with_drop_ins = replace(named, kubelet_config_dir=Path("/etc/kubelet.d"))
    found = [
        collect(tmp_path, Snapshot(), Config(topology=topology), Path("c"), ask_agent=False).topology_policy
        for topology in (Topology(), named, with_drop_ins)
    ]
    assert found == ["none", "best-effort", "restricted"]


@contextmanager
def answering(path: Path, config: str | None = None) -> Iterator[None]:
    """A runtime that describes itself, with its configuration if that is given."""
    path.parent.mkdir(parents=True)
    server = grpc.server(ThreadPoolExecutor(1))
    version = api_pb2.VersionResponse(runtime_name="containerd", runtime_version="v2.1.4")
    answers = {"Version": version, "Status": api_pb2.StatusResponse(info={"config": config} if config else {})}
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            lambda request, context, answer=answer: answer, response_serializer=type(answer).SerializeToString
        )
        for name, answer in answers.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", handlers)])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


CONTAINERD, CRIO, K3S = "run/containerd/containerd.sock", "run/crio/crio.sock", "run/k3s/containerd/containerd.sock"


@pytest.mark.parametrize(
    ("socket", "named", "config", "name", "resolves", "file"),
    [
        (CONTAINERD, None, '{"containerd": {}, "enableCDI": false}', "containerd", False, True),
        (CONTAINERD, f"/var/{CONTAINERD}", '{"containerd": {}, "enableCDI": true}', "containerd", True, True),
        (K3S, f"/{K3S}", '{"containerd": {}, "cdiSpecDirs": ["/var/run/cdi"]}', "containerd", True, False),
        (CONTAINERD, f"/{CONTAINERD}", None, "containerd", None, True),
        (CRIO, f"/{CRIO}", None, "cri-o", True, True),
        (CRIO, None, None, "cri-o", True, True),
    ],
)
def test_the_runtime_that_is_kubelets_is_asked_for_its_version_and_configuration(
    short_folder: Path, socket: str, named: str | None, config: str | None, name: str, resolves: bool, file: bool
) -> None:
    limits = "Max cpu time     unlimited  unlimited  seconds\nMax locked memory  8388608  8388608  bytes\n"
    write(short_folder, {"proc/77/comm": "containerd\n", "proc/77/limits": limits})
    limits = "Max locked memory  unlimited  unlimited  bytes\n"
    write(short_folder, {"proc/78/comm": "crio\n", "proc/78/limits": limits})
    (short_folder / "var").mkdir()
    (short_folder / "var/run").symlink_to("../run")
    ours = Config(runtime_socket=Path(named) if named is not None else None)
    assert runtime(short_folder, ours) is None
    with answering(short_folder / socket, config):
        found = runtime(short_folder, ours)
    assert found is not None
    assert (found.name, found.version, found.resolves_cdi, found.problem) == (name, "v2.1.4", resolves, "")
    assert (found.memlock_bytes, bool(found.config_file)) == (8388608 if name == "containerd" else UNLIMITED, file)


def test_a_runtime_that_does_not_answer_is_told_with_its_socket(short_folder: Path) -> None:
    write(short_folder, {CONTAINERD: ""})
    found = runtime(short_folder, Config(runtime_socket=Path(f"/{CONTAINERD}")))
    assert found is not None
    assert (found.version, found.resolves_cdi) == ("", None)
    assert f"{short_folder}/{CONTAINERD}" in found.problem


def test_networks_are_read_in_the_runtimes_order_and_damaged_ones_left_out(tmp_path: Path) -> None:
    assert networks(tmp_path / "none") is None
    assert networks(tmp_path) == ()
    (tmp_path / "whereabouts.d").mkdir()
    assert networks(tmp_path) is None  # as in the agent's container
    chained = {"cniVersion": "1.0.0", "name": "c", "plugins": [{"type": "ptp"}, {"type": "nodefabric"}]}
    write(
        tmp_path,
        {
            "20-b.conflist": json.dumps(chained),
            "10-a.conf": '{"type": "multus"}',
            "05-broken.conf": "{",
            "06-list.json": "[1]",
            "07-odd.conflist": '{"plugins": 3}',
            "README": "no network",
        },
    )
    assert networks(tmp_path) == (
        NetworkFile("07-odd.conflist", ()),
        NetworkFile("10-a.conf", ("multus",)),
        NetworkFile("20-b.conflist", ("ptp", "nodefabric")),
    )


def test_the_agent_is_asked_for_its_status_and_says_what_is_wrong_if_it_is_not_alive(short_folder: Path) -> None:
    config = Config(endpoints=Endpoints(port=1), kubelet_dir=short_folder)

    def asked(health: dict[str, Check], document: dict[str, object]) -> object:
        pages = Pages(lambda _: ("", b""), lambda: served(document), health)
        with closing(EndpointServer.open("127.0.0.1", 0, pages)) as server:
            ours = replace(config, endpoints=Endpoints(port=server.port))
            return collect(short_folder, Snapshot(), ours, Path("c")).agent

    document = {"format": 2, "obstacles": {"kernel-events": "uevents cannot be heard: no"}}
    assert asked({"loop": lambda: None}, document) == document
    assert asked({"loop": lambda: "stands still"}, document) == {"obstacles": {"agent": "loop: stands still"}}
    away = collect(short_folder, Snapshot(), config, Path("c")).agent
    assert "does not answer at http://127.0.0.1:1/" in away["obstacles"]["agent"]
    assert collect(short_folder, Snapshot(), config, Path("c"), ask_agent=False).agent == {}


def test_a_whole_root_is_collected(short_folder: Path) -> None:
    write(
        short_folder,
        {
            "proc/cmdline": "ro iommu=pt quiet\n",
            "var/lib/kubelet/config.yaml": "topologyManagerPolicy: best-effort\n",
            "sys/class/iommu/dmar0": "",
            "etc/cni/net.d/10-a.conf": '{"type": "ptp"}',
        },
    )
    plugin = short_folder / "opt/cni/bin/nodefabric"
    plugin.parent.mkdir(parents=True)
    plugin.touch(mode=0o755)
    (plugin.parent / "notes.txt").touch(mode=0o644)
    facts = collect(short_folder, Snapshot(), None, Path("/c.yaml"), ("is bad",))
    assert facts.command_line == ("ro", "iommu=pt", "quiet")
    assert facts.has_iommu
    assert facts.topology_policy == "best-effort"
    assert facts.plugins == frozenset({"nodefabric"})
    assert facts.networks == (NetworkFile("10-a.conf", ("ptp",)),)
    assert [wrong for _, wrong in facts.kubelet_sockets] == ["No such file or directory"] * 2
    assert (facts.config_problems, facts.config_path, facts.agent) == (("is bad",), "/c.yaml", {})
    elsewhere = collect(short_folder, Snapshot(), None, Path("/c.yaml"), ask_agent=False)
    assert elsewhere.rails_unknown == "/var/lib/nodefabric/ledger.db is not there"


@pytest.mark.parametrize("library", [b"\x7fELF mlx5dv_get_data_direct_sysfs_path\0", b"\x7fELF", None])
def test_kernel_and_library_are_looked_at_where_an_adapter_has_a_data_direct_function(
    tmp_path: Path, node_snapshot: Callable[[str], Snapshot], library: bytes | None
) -> None:
    path = "usr/lib/aarch64-linux-gnu/libmlx5.so.1"
    write(tmp_path, {"proc/sys/kernel/osrelease": "6.8.0-64k\n", f"{path}.0": ""})
    if library is not None:
        (tmp_path / path).write_bytes(library)
    found = data_direct(tmp_path, node_snapshot("gb300-4gpu"))
    assert found == DataDirectFacts(
        "6.8.0-64k", f"/{path}" if library else "", library is not None and len(library) > 9
    )
    assert data_direct(tmp_path, node_snapshot("h100-8gpu")) is None


def config_space(control: int | None) -> bytes:
    """A configuration space with the AER capability, and behind it ACS."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x148 << 20 | 2 << 16 | 0x0001).to_bytes(4, "little")
    if control is not None:
        space[0x148:0x14C] = (1 << 16 | 0x000D).to_bytes(4, "little")
        space[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.mark.parametrize(
    ("config", "control"),
    [
        (config_space(0b11101), 0b11101),
        (config_space(None), None),
        (config_space(0b11101)[:64], None),  # all that others than root may read
        (config_space(0b11101)[:0x14A], None),
        (b"\xff" * 4096, None),
        ((0x100 << 20 | 1).to_bytes(4, "little").rjust(0x104, b"\0") + bytes(64), None),
    ],
)
def test_the_acs_register_is_found_behind_other_capabilities(config: bytes, control: int | None) -> None:
    assert acs_control(config) == control


def test_acs_is_looked_at_where_functions_and_gpus_meet_in_an_adapters_switch(
    tmp_path: Path, node_snapshot: Callable[[str], Snapshot]
) -> None:
    snapshot = node_snapshot("gb300-4gpu")
    ports = sorted({part for device in snapshot.devices for part in device.path})
    for port in ports:
        folder = tmp_path / "sys/bus/pci/devices" / port
        write(folder, {"vendor": "0x15b3\n", "device": "0x197c\n"})
        (folder / "config").write_bytes(config_space(0b11101))
    seen = data_direct(tmp_path, snapshot)
    assert seen is not None
    assert [port.rule.words for port in seen.ports] == ["xx110x1", "xx101x1"] * 4
    assert {port.control for port in seen.ports} == {0b11101}
    for port in ports:
        write(tmp_path / "sys/bus/pci/devices" / port, {"device": "0xc030\n"})
    seen = data_direct(tmp_path, snapshot)
    assert seen is not None
    assert seen.ports == ()


def test_doctor_ends_with_status_1_if_it_finds_something(
    short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (short_folder / "sys").mkdir()
    missing = short_folder / "none.yaml"
    assert main(["doctor", "--root", str(short_folder), "--config", str(missing)]) == 1
    assert f"error    config       {missing}: cannot be read" in capsys.readouterr().out
    assert main(["doctor", "--root", str(short_folder), "--config", str(missing), "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["sound"] is False


OFFERED = Config((Resource("rdma/vf", "vf", offer="dra"),), kubelet_dir=Path("/k"))


def test_sockets_of_the_driver_are_tried_and_those_of_others_are_not(short_folder: Path) -> None:
    registry = short_folder / "k/plugins_registry"
    registry.mkdir(parents=True)
    (registry / "gpu.example-1-reg.sock").touch()
    (registry / "nodefabric.io-0-reg.sock").touch()
    living = registry / "nodefabric.io-1-reg.sock"
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(living))
        server.listen()
        found = claims(short_folder, OFFERED, "v1.36.2")
    assert found is not None
    assert found.folders == ((str(registry), None),)
    assert found.sockets == ((f"{registry}/nodefabric.io-0-reg.sock", "Connection refused"), (str(living), None))


def test_doctor_says_what_claims_lack_without_a_cluster_to_ask(
    short_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    path = short_folder / "config.yaml"
    path.write_text(
        f"{{kubeletDir: {short_folder}/k, endpoints: {{port: 1}}, stateDir: {short_folder}/s,"
        f" runDir: {short_folder}/r, resources: [{{name: rdma/vf, kind: vf, offer: dra}}]}}"
    )
    assert main(["doctor", "--config", str(path)]) == 1
    told = capsys.readouterr().out
    assert f"error    claims       {short_folder}/k/plugins_registry, which kubelet" in told
