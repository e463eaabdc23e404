"""The image that hack/build-image made: what is in it, what it says of itself, and that it runs with nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import distribution, distributions, version
from pathlib import Path, PurePosixPath

import pytest

from agent.operator import probe
from cni.install.commands import DEFAULT_RELAY
from hack.sim.stage import CONFIG, Stage, wait
from tests import sandbox
from tests.daemonset.image import Image
from tests.daemonset.manifests import FOLDER, REPOSITORY, Document

SITE = "usr/local/lib/python3.11/dist-packages"
SBOM = "usr/share/nodefabric/sbom.spdx.json"
MACHINES = {"amd64": 62, "arm64": 183}
"""e_machine of ELF files: EM_X86_64 and EM_AARCH64."""
MOST_MIB = 150
SIMULATION = Path("/tmp/simulation")
"""In the image, beside what belongs to it: simulated nodes."""
PF = "0000:18:00.0"
"""An adapter of the modelled node."""


@pytest.fixture(scope="module")
def image() -> Image:
    found = Image.find()
    if found is None:
        pytest.skip("needs the image: hack/build-image could not build it")
    if os.geteuid() != 0:
        pytest.skip("looks into the image as root")
    return found


def run(image: Image, *arguments: str, user: str = "root") -> subprocess.CompletedProcess[str]:
    """Run the image's program, with its own files alone to be seen."""
    config = image.told["OCIv1"]["config"]
    command = ["/usr/sbin/chroot", f"--userspec={user}", str(image.root), *config["Entrypoint"], *arguments]
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def elf(path: Path) -> tuple[int, bool] | None:
    """Return an ELF file's machine and whether it asks for an interpreter, as dynamic programs do."""
    content = path.read_bytes()
    if content[:4] != b"\x7fELF":
        return None
    assert content[4:6] == b"\x02\x01"  # 64 bits, little-endian
    offset, size, count = (*struct.unpack_from("<Q", content, 32), *struct.unpack_from("<HH", content, 54))
    kinds = [struct.unpack_from("<I", content, offset + i * size)[0] for i in range(count)]
    return struct.unpack_from("<H", content, 18)[0], 3 in kinds  # PT_INTERP


@pytest.mark.parametrize("user", ["root", "65534:65534"])
def test_it_runs_with_nothing_but_its_own_files(image: Image, user: str) -> None:
    version = re.findall(r'^version = "(.+)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert run(image, "version", user=user).stdout == f"nodefabric {version[0]}\n"


def test_the_probe_runs_with_nothing_but_its_own_files(image: Image) -> None:
    command = ["/usr/sbin/chroot", str(image.root), "/usr/local/bin/nodefabric-probe", "healthz"]
    environment = {probe.SOCKET: "/dev/shm/none.sock"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (
        1,
        "the agent does not answer at /dev/shm/none.sock: [Errno 2] No such file or directory\n",
    )


def test_every_module_that_the_agent_may_import_is_there(image: Image) -> None:
    """What is left out of the image must be what nobody imports, be it late."""
    names = sorted(
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        for package in ("agent", "cni", "deviceplugin")
        for path in (REPOSITORY / package).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    )
    there = [n for n in names if (image.root / SITE / f"{n.replace('.', '/')}.py").exists()]
    assert len(there) > 50
    late = ["kubernetes.client", "kubernetes.config.incluster_config", "kubernetes.config", "kubernetes.watch"]
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    command = ["/usr/sbin/chroot", str(image.root), "/usr/bin/python3.11", "-sP", "-c", script, *there, *late]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def furnished(image: Image, own_network: None) -> Iterator[Image]:
    """The image with what a runtime mounts into every container, and a /tmp of its own."""
    with sandbox.mounts():
        # Pods' namespaces are mounted later, and are to be seen in the image too; nothing goes out of here.
        for how in ("--make-rslave", "--make-rshared"):
            subprocess.run(["mount", how, "/"], check=True)
        for name in ("proc", "sys", "dev"):
            subprocess.run(["mount", "--rbind", f"/{name}", image.root / name], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", image.root / "tmp"], check=True)
        simulation = image.root / SIMULATION.relative_to("/") / "hack"
        shutil.copytree(REPOSITORY / "hack/sim", simulation / "sim")
        shutil.copy(REPOSITORY / "hack/node_file.py", simulation)
        yield image


def test_its_agent_hears_of_a_link_that_goes_down_and_attaches_vfs(furnished: Image) -> None:
    """The image's agent and relay, with the checkout's kubelet; no timer would find the change in time."""
    with tempfile.TemporaryDirectory(prefix="nf-") as folder:
        stage = Stage(Path(folder), furnished.root / DEFAULT_RELAY.relative_to("/"))
        try:
            hardware = stage.build_node("h100-8gpu")
            networks = [{"name": "rails", "mtu": 4200}]  # no IPAM: its plugins are programs of the host
            stage.write_config({**CONFIG, "networks": networks, "rescanSeconds": 3600})
            stage.start_kubelet()
            start_agent_of(furnished, stage)
            stage.await_ready()
            assert stage.status()["obstacles"] == {}
            stage.create_pod("a", {"rdma/vf": 1, "nvidia.com/gpu": 1})
            stage.await_pod("a")
            name = hardware.links.by_device()[PF].name
            for state in ("up", "down"):
                subprocess.run(["ip", "link", "set", name, state], check=True)
                wait(f"{name} to be seen {state}", partial(is_seen, stage, name, state))
            stage.delete_pod("a")
            stage.await_no_pod("a")
            assert stage.end("agent") < 10
        except BaseException:
            print(stage.log_ends())
            raise
        finally:
            stage.close()


def simulating(image: Image) -> dict[str, str]:
    """Return the image's environment, in which the simulated node, which is not of the image, is found too."""
    config = image.told["OCIv1"]["config"]
    return {**dict(entry.split("=", 1) for entry in config["Env"]), "PYTHONPATH": str(SIMULATION)}


def start_agent_of(image: Image, stage: Stage) -> None:
    """Start the image's agent in the image, where the stage's folder is at the same place."""
    place = image.root / stage.folder.relative_to("/")
    place.mkdir(parents=True)
    subprocess.run(["mount", "--rbind", stage.folder, place], check=True)  # with the simulated links' namespace
    config = image.told["OCIv1"]["config"]
    options = ["--config", str(stage.folder / "config.yaml"), *stage.host, "--log-format", "text"]
    program = ["/usr/bin/python3.11", "-sP", "-m", "hack.sim.agent"]
    command = ["/usr/sbin/chroot", str(image.root), *program, *config["Cmd"], *options]
    environment = {**simulating(image), "NODE_NAME": "sim-node"}
    with (stage.folder / "agent.log").open("ab") as log:
        stage.processes["agent"] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def is_seen(stage: Stage, name: str, state: str) -> bool | None:
    """Tell whether the agent shows an interface in a state; None while it does not."""
    shown = [netdev for nic in stage.status()["hardware"]["nics"] for netdev in nic["netdevs"]]
    return any(netdev["name"] == name and netdev["state"] == state for netdev in shown) or None


def test_the_relay_is_static_and_for_both_architectures(image: Image) -> None:
    folder = image.root / DEFAULT_RELAY.parent.relative_to("/")
    for architecture, machine in MACHINES.items():
        assert elf(folder / architecture / DEFAULT_RELAY.name) == (machine, False)
    own = image.told["OCIv1"]["architecture"]
    assert (folder / DEFAULT_RELAY.name).resolve() == folder.resolve() / own / DEFAULT_RELAY.name


def test_all_else_is_for_the_architecture_that_the_image_says(image: Image) -> None:
    machine = MACHINES[image.told["OCIv1"]["architecture"]]
    relays = image.root / DEFAULT_RELAY.parent.relative_to("/")
    found = [
        told[0]
        for path in image.root.rglob("*")
        if path.is_file() and not path.is_symlink() and relays not in path.parents and (told := elf(path)) is not None
    ]
    assert len(found) > 50
    assert set(found) == {machine}


def test_there_is_no_shell_package_manager_or_program_with_rights_of_its_own(image: Image) -> None:
    programs = {p.name for folder in ("bin", "sbin", "usr/bin", "usr/sbin") for p in (image.root / folder).glob("*")}
    assert programs <= {"python3", "python3.11", "py3clean", "py3compile", "py3versions"}
    for path in image.root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert not path.stat().st_mode & 0o6000, path
            assert not path.stat().st_mode & 0o002, path


def test_the_bill_of_materials_names_everything_that_is_installed(image: Image) -> None:
    document: Document = json.loads((image.root / SBOM).read_text())
    assert document["spdxVersion"] == "SPDX-2.3"
    described = {package["SPDXID"]: package for package in document["packages"]}
    assert len(described) == len(document["packages"])
    purls = {p["externalRefs"][0]["referenceLocator"].partition("?")[0] for p in described.values()}
    for found in distributions(path=[str(image.root / SITE)]):
        name = re.sub(r"[-_.]+", "-", found.name).lower()
        kind = "generic" if name == "nodefabric" else "pypi"
        assert f"pkg:{kind}/{name}@{found.version}" in purls
    linked = {package["name"] for ref, package in described.items() if ref.startswith("SPDXRef-relay-")}
    assert linked == {"musl", "zig"}
    wanted = [line for line in (FOLDER / "image/packages").read_text().splitlines() if not line.startswith("#")]
    debian = {package["name"] for ref, package in described.items() if ref.startswith("SPDXRef-deb-")}
    assert debian == {*wanted} == {p.name for p in (image.root / "var/lib/dpkg/status.d").iterdir()}
    ends = {r["relatedSpdxElement"] for r in document["relationships"] if r["relationshipType"] == "DEPENDS_ON"}
    assert ends | {"SPDXRef-python-nodefabric"} == set(described)


def test_the_bill_of_materials_names_the_c_library_that_is_in_the_relay(tmp_path: Path) -> None:
    (tmp_path / "var/lib/dpkg/status.d").mkdir(parents=True)
    about = tmp_path / SITE / "nodefabric-0.1.0.dist-info/METADATA"
    about.parent.mkdir(parents=True)
    about.write_text("Name: nodefabric\nVersion: 0.1.0\n")
    command = [sys.executable, str(FOLDER / "image/make-sbom"), str(tmp_path)]
    document: Document = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    purls = {package["externalRefs"][0]["referenceLocator"] for package in document["packages"]}
    compiler = version("ziglang")
    musl = Path(str(distribution("ziglang").locate_file("ziglang/lib/libc/musl/src/internal/version.h"))).read_text()
    assert f"pkg:generic/zig@{compiler}" in purls
    assert {p.rpartition("@")[2] for p in purls if p.startswith("pkg:generic/musl@")} == {musl.split('"')[1]}


def test_it_holds_the_versions_of_the_lock(image: Image) -> None:
    lock = (REPOSITORY / "requirements/runtime.txt").read_text()
    locked = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+) ", lock, re.MULTILINE))
    installed = {
        re.sub(r"[-_.]+", "-", d.name).lower(): d.version for d in distributions(path=[str(image.root / SITE)])
    }
    del installed["nodefabric"]
    assert installed.items() <= locked.items()
    unused = re.findall(r"^unused='(.+)'$", (FOLDER / "image/install-requirements").read_text(), re.MULTILINE)[0]
    assert locked.keys() - installed.keys() == {*unused.split(), "win-inet-pton"}


def test_it_is_small(image: Image) -> None:
    size = sum(p.lstat().st_size for p in image.root.rglob("*") if not p.is_dir())
    assert size < MOST_MIB << 20
    assert not any(image.root.rglob("kubernetes/client/models/v1_pod.py"))


def test_what_runs_is_compiled_and_says_so_by_hash(image: Image) -> None:
    (compiled,) = (image.root / SITE / "agent/__pycache__").glob("main.*.pyc")
    assert compiled.read_bytes()[4] == 1  # PEP 552: by hash, and nobody looks at the source


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


def test_everything_that_comes_into_the_image_is_pinned() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE=\S+:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)
    days = re.findall(r"snapshot\.debian\.org/archive/debian(?:-security)?/(\d{8})T", dockerfile)
    assert len(days) == 2
    assert set(days) == set(re.findall(r"bookworm-(\d{8})-slim", dockerfile))
    scripts = [
        dockerfile,
        *((FOLDER / "image" / name).read_text() for name in ("install-requirements", "install-agent")),
    ]
    for text in scripts:
        for command in re.findall(r"pip install.*", text.replace("\\\n", "")):
            assert "--require-hashes" in command or "/tmp/wheel" in command, command
