"""What the chart installs, on a real runtime: the image, with the rights and mounts of the manifest and no others.

helm renders the DaemonSet for this node; what kubelet would do with it is done by `ManifestPod`. The image is the one
of hack/build-image, the runtime's seccomp profile and capabilities are real, and so are the links of the node.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.errors import AgentError
from hack.sim.stage import CONFIG, Stage, wait
from tests.containerd.conftest import CNI_VERSIONS
from tests.containerd.cri import RuntimeRefused
from tests.containerd.manifest import SECCOMP, ContainerFailed, ManifestPod
from tests.containerd.node import Node, make_devices
from tests.containerd.runtime import Containerd
from tests.daemonset.image import Image
from tests.daemonset.manifests import Document, Kube, container

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OF_ARM = {"arm_fadvise64_64", "arm_sync_file_range", "sync_file_range2", "breakpoint", "cacheflush", "set_tls"}
"""Calls that the runtime's own profile has on that architecture."""
HOST_FOLDERS = (Path("/etc"), Path("/var/lib"))
"""In which kubelet makes folders for mounts; the test sees what is changed there, and the machine does not."""
ROOT = Path(__file__).parents[2]
SIMULATION = "/opt/simulation"
PROGRAM = f"""#!/usr/bin/python3.11 -sP
import sys

sys.path.append("{SIMULATION}")
from hack.sim.agent import main

sys.exit(main(sys.argv[1:]))
"""
"""In place of the image's program: the image has no simulated nodes."""


class Cluster:
    """One node of a cluster, with a chart to install."""

    def __init__(self, node: Node, kube: Kube, image: str, simulated: Path, changed: Mapping[Path, Path]) -> None:
        self.node, self.kube, self.image, self.changed = node, kube, image, changed
        self._simulated = simulated
        self._stack = ExitStack()

    @property
    def values(self) -> Document:
        """What this cluster's owner writes down: its image, its paths, its resources."""
        repository, _, tag = self.image.rpartition(":")
        stage, runtime = self.node.stage, self.node.runtime
        rails = {"name": "rails", "mtu": 4200, "ipam": {"type": "host-local", "subnet": "192.168.100.0/24"}}
        return {
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "config": {
                **CONFIG,
                "networks": [rails],
                "endpoints": {"port": stage.port},
                "kubeletDir": str(stage.folder / "kubelet"),
                "stateDir": str(stage.folder / "state"),
                "runDir": str(stage.folder / "run"),
                "topology": {"publish": False, "kubeletConfig": str(stage.folder / "kubelet/config.yaml")},
            },
            "cni": {"binDir": str(runtime.plugins), "confDir": str(runtime.net_d), "chain": True},
        }

    def pod(self, name: str, more: Document | None = None) -> tuple[ManifestPod, Document]:
        """Render the chart and make the sandbox of its pod. Returns it and the pod's spec."""
        found = self.kube.template({**self.values, **(more or {})})
        (daemonset,) = [d for d in found if d["kind"] == "DaemonSet"]
        spec: Document = daemonset["spec"]["template"]["spec"]
        folder = self.node.stage.folder / name
        files = {}
        for config_map in (d for d in found if d["kind"] == "ConfigMap"):
            files["config"] = self.node.stage.folder / f"{name}-config"
            files["config"].mkdir()
            for key, text in config_map["data"].items():
                (files["config"] / key).write_text(text)
        cgroup = f"/{self.node.runtime.cgroups.name}"
        made = ManifestPod(self.node.runtime.cri, spec, folder, cgroup, files)
        self._stack.callback(made.end)
        return made, spec

    def start_agent(self, pod: ManifestPod, agent: Document) -> None:
        """Start the agent's container and wait for its readiness probe. Only where its hardware is, is not the
        manifest's."""
        program = self.node.stage.folder / "nodefabric"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        more = {
            str(self._simulated): self._simulated,
            "/usr/local/bin/nodefabric": program,
            f"{SIMULATION}/hack": ROOT / "hack",
        }
        self.agent = pod.start(agent, "--simulate", str(self._simulated), more_mounts=more)
        command = agent["readinessProbe"]["exec"]["command"]
        try:
            wait("the agent to be ready", lambda: self.passes(command) or None)
        except AgentError:
            print(pod.log("agent"))
            raise

    def passes(self, command: Sequence[str]) -> bool:
        """Probe as kubelet does."""
        return self.node.runtime.cri.execute(self.agent, *command).status == 0

    def install(self) -> ManifestPod:
        """Install as kubelet does it, and wait until the node is ready and its network joined."""
        pod, spec = self.pod("nodefabric-a")
        pod.run_init_containers()
        self.start_agent(pod, container(spec, "agent"))
        pod.start(container(spec, "cni-chain"))
        wait("the plugin to be in the network", lambda: '"nodefabric"' in self.network.read_text() or None)
        return pod

    @property
    def network(self) -> Path:
        return self.node.runtime.net_d / "10-cluster.conflist"

    def close(self) -> None:
        self._stack.close()

    def left(self) -> list[str]:
        """List what the node's folders hold now."""
        stage, runtime = self.node.stage.folder, self.node.runtime
        places = [*self.changed.values(), stage / "kubelet", stage / "state", stage / "run", runtime.plugins]
        found = [str(path) for place in places for path in place.rglob("*") if not path.name.startswith("kubelet")]
        run = [str(p) for p in Path("/run").rglob("*") if "containerd" not in str(p) and "netns/" not in str(p)]
        return sorted([*found, *run, self.network.read_text()])


@pytest.fixture
def snapshotter() -> str:
    """The image has 6,000 files, which nobody wants to copy for each container."""
    return "overlayfs"


@pytest.fixture
def cluster(stage: Stage, containerd: Containerd, suite: str, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    kube, image = Kube.find(), Image.find()
    if kube is None:
        pytest.skip("needs helm: hack/fetch-kube could not have it")
    if image is None:
        pytest.skip("needs the image: hack/build-image could not build it")
    with ExitStack() as stack:
        changed = {}
        for folder in HOST_FOLDERS:
            changed[folder] = covered_by(stage.folder, folder, stack)
        share(Path("/run/netns"))
        simulated = stage.build_node("h100-8gpu")
        make_devices(simulated.scan(), simulated.root)
        # Who uninstalls asks the machine which boot this is, and not the simulated node.
        (simulated.root / BOOT_ID.relative_to("/")).write_text(BOOT_ID.read_text())
        (stage.folder / "kubelet/config.yaml").write_text("{}")
        for plugin in ("host-local", "ptp"):  # links lead out of what the agent's container is shown
            copied = containerd.plugins / plugin
            content = copied.read_bytes()
            copied.unlink()
            copied.write_bytes(content)
            copied.chmod(0o755)
        containerd.take_images(image.folder / "image.tar", image.name)
        node = Node(stage, containerd)
        network = {"type": "ptp", "ipam": stage.ipam("cluster", "10.244.0.0/24")}
        document = {"cniVersion": CNI_VERSIONS[suite], "name": "cluster", "plugins": [network]}
        (containerd.net_d / "10-cluster.conflist").write_text(json.dumps(document, indent=2) + "\n")
        node.start_kubelet()
        made = Cluster(node, kube, image.name, stage.folder / "node", changed)
        failed_before = request.session.testsfailed
        try:
            yield made
        finally:
            if request.session.testsfailed > failed_before:
                print(stage.log_ends(), containerd.log_end(), sep="\n")
            made.close()


def share(folder: Path) -> None:
    """Make a folder of /run a mount that shows new ones to containers, as it is on a host where `ip netns` has run."""
    folder.mkdir(exist_ok=True)
    for how in (("--bind", folder, folder), ("--make-rshared", folder)):
        subprocess.run(["mount", *how], check=True)


def covered_by(place: Path, folder: Path, stack: ExitStack) -> Path:
    """Have changes of a folder of the machine's kept aside, and return where."""
    upper, work = (place / f"{kind}-{folder.name}" for kind in ("upper", "work"))
    upper.mkdir()
    work.mkdir()
    options = f"lowerdir={folder},upperdir={upper},workdir={work}"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", folder], check=True)
    stack.callback(lambda: subprocess.run(["umount", "--lazy", folder], check=True))
    return upper


def attach(cluster: Cluster, name: str = "a") -> tuple[Any, str]:
    pod = cluster.node.admit(name, {"rdma/hca": 1, "rdma/vf": 1})
    return pod, cluster.node.run(pod)


def rights(cluster: Cluster) -> Document:
    """Have a process in the agent's container look at what it may do."""
    look = (
        "import json, os, pathlib\n"
        "status = dict(l.split(':', 1) for l in pathlib.Path('/proc/self/status').read_text().splitlines())\n"
        "def denied(path):\n"
        "    try: open(path, 'w')\n"
        "    except OSError as error: return os.strerror(error.errno)\n"
        "print(json.dumps({'effective': status['CapEff'].strip(), 'bounding': status['CapBnd'].strip(),\n"
        "  'seccomp': status['Seccomp'].strip(),\n"
        "  'pid1': pathlib.Path('/proc/1/cmdline').read_text().split(chr(0))[1:3],\n"
        "  'denied': [denied(p) for p in ('/usr/x', '/etc/nodefabric/x', '/sys/kernel/x')],\n"
        "  'filters': {p: pathlib.Path(p, 'status').read_text().split('Seccomp_filters:')[1].split()[0]\n"
        "    for p in ('/proc/1', '/proc/self')},\n"
        "  'devices': sorted(os.listdir('/dev'))}))\n"
    )
    found: Document = looked(cluster, look)
    return found


def looked(cluster: Cluster, script: str) -> Any:
    """Run a script in the agent's container, beside the agent. Returns the document that it prints."""
    told = cluster.node.runtime.cri.execute(cluster.agent, "python3", "-c", script)
    assert told.status == 0, told.stderr
    return json.loads(told.stdout)


def powers(cluster: Cluster) -> Document:
    """Have a process in the agent's container try what CAP_SYS_ADMIN allows, in mounts of its own if it gets any."""
    script = (
        "import ctypes, errno, json, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(name, *arguments):\n"
        "    done = getattr(libc, name)(*arguments) == 0\n"
        "    return 'done' if done else errno.errorcode[ctypes.get_errno()]\n"
        "print(json.dumps({'unshare': call('unshare', 0x20000),\n"
        "  'mount': call('mount', b'none', b'/dev/shm', b'proc', 0, None),\n"
        "  'umount': call('umount2', b'/dev/shm', 2),\n"
        "  'other mounts': call('setns', os.open('/proc/self/ns/mnt', 0), 0x20000),\n"
        "  'other network': call('setns', os.open('/proc/self/ns/net', 0), 0x40000000)}))\n"
    )
    found: Document = looked(cluster, script)
    return found


def test_an_agent_with_the_rights_of_the_manifest_serves_pods_and_leaves_the_node_as_it_was(cluster: Cluster) -> None:
    before = cluster.left()
    agent = cluster.install()

    found = rights(cluster)
    net_admin, sys_admin = 12, 21  # include/uapi/linux/capability.h
    assert int(found["bounding"], 16) == int(found["effective"], 16) == 1 << net_admin | 1 << sys_admin
    assert found["seccomp"] == "2"  # a filter
    assert found["filters"] == {"/proc/1": "2", "/proc/self": "1"}  # the agent has one more than who only looks
    assert found["pid1"] == ["-sP", "/usr/local/bin/nodefabric"]  # no process of the host's is to be seen
    assert found["denied"] == ["Read-only file system"] * 3
    assert not {"infiniband", "nvidia0"} & {*found["devices"]}

    pod, sandbox = attach(cluster)
    link = cluster.node.links(sandbox)["net1"]
    assert link["mtu"] == 4200
    assert [a["local"].startswith("192.168.100.") for a in link["addr_info"] if a["family"] == "inet"] == [True]
    told = cluster.node.runtime.cri.execute(cluster.agent, "nodefabric", "status", "--output", "json")
    assert told.status == 0, told.stderr
    (row,) = json.loads(told.stdout)["attachments"]
    assert (row["pod"], row["device"]) == ("default/a", pod.units("rdma/vf")[0])
    assert [word for word in ("Traceback", '"ERROR"') if word in agent.log("agent")] == []

    agent.end()
    removing, _ = cluster.pod("nodefabric-remove-a", {"remove": True})
    with pytest.raises(ContainerFailed, match=r"uninstall: 4: .*: .* is granted to default/a"):
        removing.run_init_containers()
    assert (cluster.node.runtime.plugins / "nodefabric").exists()

    agent, spec = cluster.pod("nodefabric-b")
    cluster.start_agent(agent, container(spec, "agent"))
    cluster.node.end(sandbox)
    cluster.node.forget(pod)
    agent.end()
    removing, spec = cluster.pod("nodefabric-remove-b", {"remove": True})
    removing.run_init_containers()
    removing.start(container(spec, "done"))
    # What the IPAM plugin notes for itself is not ours to remove.
    leases = str(cluster.changed[Path("/var/lib")] / "cni")
    assert [line for line in cluster.left() if not line.startswith(leases)] == before


def test_with_the_profile_on_the_node_nothing_in_the_container_can_mount_and_pods_are_served(cluster: Cluster) -> None:
    pod, spec = cluster.pod("nodefabric-a", {"localhostSeccompProfile": SECCOMP.name})
    pod.run_init_containers()
    cluster.start_agent(pod, container(spec, "agent"))
    assert powers(cluster) == {
        **dict.fromkeys(("unshare", "mount", "umount", "other mounts"), "EPERM"),
        "other network": "done",
    }
    pod.start(container(spec, "cni-chain"))
    wait("the plugin to be in the network", lambda: '"nodefabric"' in cluster.network.read_text() or None)
    _, sandbox = attach(cluster)
    assert cluster.node.links(sandbox)["net1"]["mtu"] == 4200
    assert [word for word in ("Traceback", '"ERROR"') if word in pod.log("agent")] == []


def test_the_profile_allows_nothing_that_the_runtimes_own_does_not(cluster: Cluster) -> None:
    """But what the agent needs: network namespaces, and to ask for tcx programs."""
    pod, spec = cluster.pod("nodefabric-a")
    (agent,) = [c for c in spec["containers"] if c["name"] == "agent"]
    told = cluster.node.runtime.cri.sandbox_info(pod.sandbox)["runtimeSpec"]["linux"]["seccomp"]
    assert agent["securityContext"].get("seccompProfile") is None
    default = {name for rule in told["syscalls"] for name in rule["names"]}
    ours = {name for rule in json.loads(SECCOMP.read_text())["syscalls"] for name in rule["names"]}
    assert ours - default - OF_ARM == {"bpf", "setns"}


@pytest.mark.parametrize("missing", ["NET_ADMIN", "SYS_ADMIN"])
def test_without_one_of_its_capabilities_it_could_not_attach(cluster: Cluster, missing: str) -> None:
    pod, spec = cluster.pod("nodefabric-a")
    pod.run_init_containers()
    agent = container(spec, "agent")
    agent["securityContext"]["capabilities"]["add"].remove(missing)
    cluster.start_agent(pod, agent)
    document = json.loads(cluster.network.read_text())
    document["plugins"].append({"type": "nodefabric"})
    cluster.network.write_text(json.dumps(document))
    wait("the runtime to read it", cluster.node._knows_network)
    with pytest.raises(RuntimeRefused, match=r"(?i)not permitted|permission"):
        attach(cluster)
