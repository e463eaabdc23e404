"""Facts are read from files below a root, and from sockets; what is not there is unseen."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from agent.__main__ import main
from agent.config import Config, Endpoints, Topology
from agent.model.device import Snapshot
from agent.report.doctor.collect import agent_answers, collect, memlock, modules, networks, runtime
from agent.report.doctor.facts import UNLIMITED, NetworkFile
from agent.report.doctor.looking import listens
from agent.report.endpoints import EndpointServer
from agent.report.replies import Pages
from agent.report.status.cached import served
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


@pytest.mark.parametrize(
    ("text", "version", "enabled"),
    [
        ("version = 2\n", 2, None),
        ('version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n', 2, True),
        ('version = 3\n[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = false\n', 3, False),
        ('[plugins.cri]\nenable_cdi = "yes"\n', 1, None),
        ("version = 2\nplugins = 3\n", 2, None),
        ("version = inf\n", None, None),
    ],
)
def test_the_runtimes_configuration_tells_of_cdi(tmp_path: Path, text: str, version: int, enabled: bool | None) -> None:
    found = runtime(write(tmp_path, {"etc/containerd/config.toml": text}), None)
    assert found is not None
    assert (found.name, found.config_version, found.enable_cdi, found.problem) == ("containerd", version, enabled, "")


def test_a_broken_configuration_of_the_runtime_is_told(tmp_path: Path) -> None:
    found = runtime(write(tmp_path, {"etc/containerd/config.toml": "version = \n"}), None)
    assert found is not None
    assert "config.toml" in found.problem
    assert runtime(tmp_path / "nothing", None) is None


@pytest.mark.parametrize("text", ["topologyManagerPolicy: !!timestamp no", "[" * 20_000, "- a list"])
def test_a_broken_configuration_of_kubelet_is_passed_over(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"var/lib/kubelet/config.yaml": text})
    assert collect(tmp_path, Snapshot(), None, Path("c")).topology_policy is None


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


def test_the_runtime_that_is_configured_is_kubelets(tmp_path: Path) -> None:
    write(tmp_path, {"etc/containerd/config.toml": "version = 2\n", "run/crio/crio.sock": ""})
    names = {path: runtime(tmp_path, Config(runtime_socket=path)) for path in (None, Path("/run/crio/crio.sock"))}
    assert [found.name if found is not None else "" for found in names.values()] == ["containerd", "cri-o"]


def test_the_runtime_is_looked_for_where_the_configuration_says(short_folder: Path) -> None:
    write(short_folder, {"etc/containerd/config.toml": "version = 2\n", "proc/7/comm": "containerd\n"})
    (short_folder / "proc/7/limits").write_text("Max locked memory  8388608  8388608  bytes\n")
    of_k3s = Config(runtime_socket=Path("/run/k3s/containerd/containerd.sock"))
    assert runtime(short_folder, of_k3s) is None  # and not the containerd that is there for Docker
    with answering(short_folder / "run/k3s/containerd/containerd.sock"):
        found = runtime(short_folder, of_k3s)
    assert found is not None
    assert (found.name, found.version, found.memlock_bytes) == ("containerd", "v2.1.4", 8388608)
    assert (found.config_version, found.cdi_file) == (None, "")
    usual = runtime(short_folder, Config(runtime_socket=Path("/var/run/containerd/containerd.sock")))
    assert usual is not None
    assert (usual.config_version, usual.cdi_file) == (2, "/etc/containerd/config.toml")


@contextmanager
def answering(path: Path) -> Iterator[None]:
    """A runtime that tells its version."""
    path.parent.mkdir(parents=True)
    server = grpc.server(ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(
        answer_version, api_pb2.VersionRequest.FromString, api_pb2.VersionResponse.SerializeToString
    )
    handlers = {"Version": handler}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", handlers)])
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def answer_version(request: api_pb2.VersionRequest, context: object) -> api_pb2.VersionResponse:
    return api_pb2.VersionResponse(runtime_name="containerd", runtime_version="v2.1.4")


def test_a_running_runtime_tells_its_version(short_folder: Path) -> None:
    assert runtime(short_folder, None) is None
    with answering(short_folder / "run/containerd/containerd.sock"):
        found = runtime(short_folder, None)
        assert found is not None
        assert (found.name, found.version, found.config_version) == ("containerd", "v2.1.4", None)
        assert runtime(short_folder, Config(runtime_socket=Path("/run/containerd/containerd.sock"))) == found
    found = runtime(short_folder, None)
    assert found is None or found.version == ""


def test_locked_memory_is_that_of_the_process_or_else_of_its_unit(tmp_path: Path) -> None:
    unit = "usr/lib/systemd/system/containerd.service"
    write(tmp_path, {unit: "[Service]\nLimitMEMLOCK=64M\n"})
    assert memlock(tmp_path, "containerd") == 64 << 20
    write(tmp_path, {"etc/systemd/system/containerd.service.d/rdma.conf": "[Service]\nLimitMEMLOCK=infinity\n"})
    assert memlock(tmp_path, "containerd") == UNLIMITED
    limits = "Max cpu time     unlimited  unlimited  seconds\nMax locked memory  8388608  8388608  bytes\n"
    write(tmp_path, {"proc/77/comm": "containerd\n", "proc/77/limits": limits})
    assert memlock(tmp_path, "containerd") == 8388608
    assert memlock(tmp_path, "crio") is None


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


def test_a_socket_answers_or_says_why_not(short_folder: Path) -> None:
    path = short_folder / "s"
    assert listens(path) == "No such file or directory"
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(str(path))
        assert listens(path) == "Connection refused"
        server.listen()
        assert listens(path) is None


def test_the_agent_is_asked_for_what_is_in_its_way() -> None:
    pages = Pages(
        lambda _: ("", b""), lambda: served({}), {"loop": lambda: None}, {"agent": lambda: "kubelet: is away"}
    )
    server = EndpointServer.open("127.0.0.1", 0, pages)
    port = server.port
    try:
        assert agent_answers(Endpoints(port=port)) == (("healthz", None), ("readyz", "agent: kubelet: is away"))
    finally:
        server.close()
    ((path, wrong),) = agent_answers(Endpoints(port=port))
    assert path == "healthz"
    assert wrong is not None
    assert "nobody answers" in wrong


def test_an_agent_that_is_ready_tells_what_it_cannot_hear() -> None:
    known = {"kernel-events": "uevents cannot be heard: no"}
    pages = Pages(lambda _: ("", b""), lambda: served({}), {}, {"agent": lambda: None}, known=lambda: known)
    server = EndpointServer.open("127.0.0.1", 0, pages)
    try:
        answers = agent_answers(Endpoints(port=server.port))
    finally:
        server.close()
    assert answers == (("healthz", None), ("readyz", "kernel-events: uevents cannot be heard: no"))


def test_a_whole_root_is_collected(short_folder: Path, node_root: Callable[[str], Path]) -> None:
    write(
        short_folder,
        {
            "proc/cmdline": "ro iommu=pt quiet\n",
            "var/lib/kubelet/config.yaml": "topologyManagerPolicy: best-effort\n",
            "sys/class/iommu/dmar0": "",
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
    assert [wrong for _, wrong in facts.kubelet_sockets] == ["No such file or directory"] * 2
    assert (facts.config_problems, facts.config_path, facts.agent) == (("is bad",), "/c.yaml", ())


def test_a_folder_for_cdi_specs_that_is_mounted_read_only_is_seen(own_network: None, short_folder: Path) -> None:
    """With own_network the mounts are the test's own too."""
    root, config = short_folder / "root", Config(cdi_dir=Path("/cdi"))
    assert not collect(root, Snapshot(), config, Path("c"), ask_agent=False).cdi_read_only
    (root / "cdi").mkdir(parents=True)
    assert not collect(root, Snapshot(), config, Path("c"), ask_agent=False).cdi_read_only
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", root / "cdi"], check=True)
    try:
        assert collect(root, Snapshot(), config, Path("c"), ask_agent=False).cdi_read_only
    finally:
        subprocess.run(["umount", root / "cdi"], check=True)


def test_doctor_ends_with_status_1_if_it_finds_something(
    short_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (short_folder / "sys").mkdir()
    missing = short_folder / "none.yaml"
    assert main(["doctor", "--root", str(short_folder), "--config", str(missing)]) == 1
    assert f"error    config       {missing}: cannot be read" in capsys.readouterr().out
    assert main(["doctor", "--root", str(short_folder), "--config", str(missing), "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["sound"] is False
