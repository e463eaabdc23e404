"""`make demo`: the main job, shown on a simulated node.

The agent and the kubelet stand-in run as processes of their own, in network and mount namespaces
made for the demo, so that nothing of the machine is touched. An ordinary user gets a user namespace
around them. What is shown is read back from where it counts: the pods' namespaces, the agent's
status and metrics, the kernel's links.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.errors import AgentError
from agent.hardware import recorded
from agent.hardware.adapter_ids import with_adapter_ids
from agent.hardware.host import Link
from agent.model.device import Snapshot
from agent.placement import Distances
from agent.report import status_text
from hack.sim import demo_claims, scheduler
from hack.sim.machine import SimulatedMachine
from hack.sim.stage import CNI_FOLDERS, Stage, in_pod, manifest, settled

UNSHARE = "/usr/bin/unshare"
RELAY = Path(__file__).parents[2] / "build/shim/native/nodefabric-cni"
PODS = ("trainer-0", "trainer-1", "trainer-2")
LIMITS = {"rdma/hca": 1, "rdma/vf": 1, "nvidia.com/gpu": 1}
LONGEST_SOCKET = "kubelet/device-plugins/nodefabric-nvidia-com-gpu-00000000.sock"
MAX_SOCKET_PATH = 107
"""sun_path of sockaddr_un is 108 bytes, with a zero at the end (unix(7))."""
SHOWN_METRICS = ("nodefabric_units{", "nodefabric_attachments{", "nodefabric_cni_duration_milliseconds_count")


def main(words: Sequence[str]) -> int:
    """Play the demo in namespaces of its own, and return its exit status."""
    parser = argparse.ArgumentParser(prog="demo", description="Show the main job on a simulated node.")
    text = "modelled or recorded node with GPUs and VFs: its name, or a file (default: %(default)s)"
    parser.add_argument("--node", default="h100-8gpu", metavar="NODE", help=text)
    text = "the CNI relay (default: %(default)s)"
    parser.add_argument("--relay", type=Path, default=RELAY, metavar="FILE", help=text)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    try:
        if not os.access(options.relay, os.X_OK):
            raise AgentError(f"{options.relay}: is no program: hack/build-shim native makes the CNI relay")
        if not options.inside:
            enter_namespaces(["--node", options.node, "--relay", str(options.relay)])
        return run(options.node, options.relay)
    except AgentError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def enter_namespaces(arguments: Sequence[str]) -> None:
    """Become the same command in fresh namespaces. Does not return.

    Raises AgentError where the kernel does not let this user have them.
    """
    command = [UNSHARE, "--net", "--mount", "--propagation", "private"]
    root = os.geteuid() == 0
    if not root:
        command += ["--user", "--map-root-user"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        raise AgentError(
            "root may not make namespaces here: in a container, give it CAP_SYS_ADMIN and CAP_NET_ADMIN"
            if root
            else "this kernel gives no network namespace to an ordinary user: run the demo as root"
        )
    os.execv(UNSHARE, [*command, sys.executable, "-m", "hack.sim.demo", "--inside", *arguments])


def run(node: str, relay: Path) -> int:
    """Play the demo and return 0 if all that it showed was as it must be."""
    for name in ("ptp", "host-local"):
        if not any((folder / name).is_file() for folder in CNI_FOLDERS):
            raise AgentError(f"the CNI plugin {name} is missing: install containernetworking-plugins")
    file = recorded.named(node)
    with tempfile.TemporaryDirectory(prefix="nodefabric-demo-") as folder:
        refuse_long(Path(folder))
        stage = Stage(Path(folder), relay)
        try:
            return _play(stage, file)
        except BaseException:
            if logs := stage.log_ends():
                say(logs)
            raise
        finally:
            stage.close()


def refuse_long(folder: Path) -> None:
    """Raise AgentError if the paths of sockets would be longer in this folder than the kernel takes."""
    excess = len(os.fsencode(folder / LONGEST_SOCKET)) - MAX_SOCKET_PATH
    if excess > 0:
        raise AgentError(
            f"{folder.parent}: is too long a name by {excess} bytes: paths of sockets may have {MAX_SOCKET_PATH}. "
            "Name a shorter folder in the environment: TMPDIR=/tmp"
        )


def _play(stage: Stage, file: Path) -> int:
    started = time.monotonic()
    say(f"A simulated node: {file.stem}")
    machine = stage.build_node(file)
    before = machine.links.by_device()
    snapshot = with_adapter_ids(machine.scan(), machine.root)
    say(f"  {len(snapshot.gpus)} GPUs, {sum(d.is_pf for d in snapshot.devices)} SR-IOV adapters,")
    say(f"  {sum(d.is_vf for d in snapshot.devices)} VFs, each a real kernel link in a namespace of its own")
    if min(len(snapshot.gpus), sum(d.is_vf for d in snapshot.devices)) < len(PODS):
        raise AgentError(
            f"{file.stem} is too small: each of the {len(PODS)} pods asks for a GPU and a VF. Try h100-8gpu"
        )
    say("Starting stand-ins for the API server and kubelet, and the agent, as three processes")
    port = scheduler.start_api_server(stage)
    stage.start_kubelet(*scheduler.kubelet_options(port))
    stage.start_agent("--kubeconfig", str(stage.folder / "kubeconfig"))
    stage.await_ready()
    _by_plugins(stage, snapshot)
    is_well = _is_back(stage, machine, before)
    for line in demo_claims.play(stage, port, snapshot):
        say(line)
    is_well &= _is_back(stage, machine, before)
    stopped = stage.end("agent")
    say(f"The agent ended {stopped * 1000:.0f} ms after SIGTERM. All in all {time.monotonic() - started:.1f} s.")
    return 0 if is_well else 1


def _by_plugins(stage: Stage, snapshot: Snapshot) -> None:
    """Show pods that get all their devices by device plugins, from their YAML to their end."""
    say(f"Creating the pods {', '.join(PODS)}, each from YAML such as\n")
    say(manifest(PODS[0], LIMITS))
    for name in PODS:
        stage.create_pod(name, LIMITS)
    pods = [stage.await_pod(name) for name in PODS]
    for line in what_each_got(stage, pods, snapshot):
        say(line)
    for line in inside(pods):
        say(line)
    say("The node's books (nodefabric status)\n")
    say(status_text.text(stage.status(), time.time()))
    say("\nSome of its metrics\n")
    say("\n".join(line for line in stage.fetch("/metrics").splitlines() if line.startswith(SHOWN_METRICS)))
    say("\nDeleting the pods")
    for name in PODS:
        stage.delete_pod(name)
    stage.await_no_pod(*PODS)


def _is_back(stage: Stage, machine: SimulatedMachine, before: Mapping[str, Link]) -> bool:
    """Tell, after some time to settle, whether all devices are back and in no pod; say which are not."""

    def what_is_wrong() -> list[str]:
        return [*not_back(machine, before), *still_attached(stage)]

    wrong = settled(what_is_wrong)
    for line in wrong:
        say(f"  WRONG: {line}")
    if not wrong:
        say(f"  {len(before)} links are where they were, with name, MAC and MTU; no attachment is left")
    return not wrong


def what_each_got(stage: Stage, pods: Sequence[Mapping[str, Any]], snapshot: Snapshot) -> list[str]:
    """Lay out each pod's devices, and how near its VF is to its GPU."""
    rows = []
    for pod in pods:
        held = {name: ids for c in pod["containers"] for name, ids in c["devices"].items()}
        gpu = snapshot.gpu_by_uuid[held["nvidia.com/gpu"][0]]
        vf = snapshot.by_address[held["rdma/vf"][0]]
        nodes = [path for c in pod["containers"] for path in stage.files_of(c) if "uverbs" in path]
        near = Distances(snapshot).distance(gpu.uuid, vf.address).name
        rows.append(
            (pod["name"], f"GPU{gpu.index} {gpu.pci_address}", vf.address, near, held["rdma/hca"][0], " ".join(nodes))
        )
    return status_text.table(("POD", "GPU", "VF", "GPU-VF", "HCA SHARE", "CHARACTER DEVICES"), rows)


def inside(pods: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Show the interfaces inside the first pod's namespace, and a ping to the second pod over the VFs."""
    first, second = pods[0], pods[1]
    yield f"\nInside {first['name']}: ip -brief address\n"
    yield in_pod(first, "ip", "-brief", "address")
    address = next(ip["address"] for ip in second["cni_result"]["ips"] if ip["address"].startswith("192.168.100."))
    target = address.partition("/")[0]
    yield f"{first['name']} to {second['name']} over the VFs: ping {target}\n"
    yield in_pod(first, "ping", "-c", "3", "-i", "0.2", "-q", target)


def not_back(machine: SimulatedMachine, before: Mapping[str, Link]) -> list[str]:
    """Tell which links are not as they were."""
    now = machine.links.by_device()
    return [
        f"{device} was {_shape(link)}, is {_shape(now[device]) if device in now else 'not in the host'}"
        for device, link in before.items()
        if device not in now or _shape(now[device]) != _shape(link)
    ]


def still_attached(stage: Stage) -> list[str]:
    """Tell which devices the agent still counts as being in pods."""
    return [f"{row['device']} is {row['state']}" for row in stage.status()["attachments"]]


def _shape(link: Link) -> tuple[str, str, int, bool]:
    return link.name, link.mac, link.mtu, link.up


def say(text: str) -> None:
    """Show a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
