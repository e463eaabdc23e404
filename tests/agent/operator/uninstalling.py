"""A host's files with what an agent leaves among them, and what takes it away again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agent.__main__ import main
from agent.edits.device_info import FOLDER, GrantedFiles
from agent.edits.specs import Specs, file_of_claim
from agent.ledger.database import lock_folder
from agent.model.allocation import Claim, ClaimRef, ClaimState
from cni.install import chain
from cni.install import installation as install
from cni.install.installation import Installation
from tests.node import VF, claimed, granted, open_books

CLAIM = Claim(
    ClaimRef("c1", "default", "rails"),
    ClaimState.PREPARING,
    (claimed("nic", "n", "vf-1", "rdma/vf", "vf", VF, "c1-0-vf-1", edits={"env": ["A=1"]}),),
)
CONFLIST = json.dumps({"cniVersion": "1.0.0", "name": "cluster", "plugins": [{"type": "ptp"}]}, indent=2) + "\n"


class Host:
    """A host's / with a cluster network, kubelet and other programs' files, and what installs and runs there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in (
            "opt/cni/bin",
            "etc/cni/net.d",
            "etc/kubernetes/node-feature-discovery",
            "var/lib/kubelet/device-plugins",
            "var/lib/kubelet/plugins/other.io",
            "var/lib/kubelet/plugins_registry",
            "var/lib/calico",
            "run",
        ):
            (root / folder).mkdir(parents=True)
        (root / "var/run").symlink_to("/run")  # as old hosts have it: followed, it leads out of the root
        for name, text in (
            ("etc/cni/net.d/10-cluster.conflist", CONFLIST),
            ("opt/cni/bin/sriov", "#!/bin/sh\n"),
            ("var/lib/kubelet/device-plugins/kubelet.sock", ""),
            ("var/lib/kubelet/device-plugins/other.sock", ""),
            ("var/lib/kubelet/plugins_registry/other.io-0a1b2c3d-reg.sock", ""),
            ("run/other.pid", "1"),
        ):
            (root / name).write_text(text)
        (root / "relay").write_bytes(b"\x7fELF")
        self.state, self.run = root / "var/lib/nodefabric", root / "run/nodefabric"

    def install(self) -> None:
        """Do what the DaemonSet's containers do to a host's files."""
        bin_folder, networks = self.root / "opt/cni/bin", self.root / "etc/cni/net.d"
        install.install(Installation(self.root / "relay", bin_folder, ("sriov",), force=True))
        chain.chain(networks)
        for mounted in (
            "etc/cdi",
            "run/cdi",
            "run/cni",
            "var/lib/cni",
            "etc/kubernetes/node-feature-discovery/features.d",
        ):
            (self.root / mounted).mkdir(parents=True)
        os.close(lock_folder(self.state))
        (self.state / "spool").mkdir()
        with open_books(self.state) as books:
            cdi = self.root / "run/cdi"
            specs = Specs(books, cdi)
            books.prepare_claim(CLAIM)
            specs.sync([file_of_claim(CLAIM.ref.uid)])
            specs.metadata.write(CLAIM.ref.uid, "nic", {"metadata": {}})
            books.remove_claim(CLAIM.ref.uid)
            books.grant(granted("rdma/vf", {VF: VF}))
        self.run.mkdir()
        kubelet = self.root / "var/lib/kubelet"
        (kubelet / "plugins/nodefabric.io").mkdir()
        for socket in (
            self.run / "cni.sock",
            kubelet / "device-plugins/nodefabric-rdma-vf-0a1b2c3d.sock",
            kubelet / "plugins/nodefabric.io/dra-0a1b2c3d.sock",
            kubelet / "plugins_registry/nodefabric.io-0a1b2c3d-reg.sock",
        ):
            socket.touch()
        (self.root / "etc/kubernetes/node-feature-discovery/features.d/nodefabric").write_text("example.com/rails=8\n")
        (self.root / "etc/kubernetes/node-feature-discovery/features.d/.nodefabric.new").write_text("example.com/r")
        (self.root / "run/cdi/nodefabric-slot-1.json").write_text("{}")
        GrantedFiles(self.root / "run" / FOLDER.relative_to("/var/run")).write("rdma/vf", VF, {"type": "pci"})

    def files(self) -> dict[str, str]:
        """Return everything below the root: its kind and content."""
        return {
            str(path.relative_to(self.root)): str(path.readlink())
            if path.is_symlink()
            else "folder"
            if path.is_dir()
            else f"{path.stat().st_mode:o} {path.read_text(errors='replace')}"
            for path in sorted(self.root.rglob("*"))
        }

    def uninstall(self, *more: str) -> int:
        return main(["uninstall", "--root", str(self.root), *more])


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


@pytest.fixture
def clean(host: Host) -> dict[str, str]:
    """Return the host's files before anything is installed."""
    return host.files()
