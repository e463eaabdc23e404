"""What the commands print that look at a node and end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.__main__ import main
from agent.hardware import recorded
from agent.model.vf_identity import Rail
from hack.sim.agent import main as simulated_main
from hack.sim.machine import SimulatedMachine
from tests.node import open_books

CONFIG = "resources: [{name: rdma/vf, kind: vf}]"


def test_check_config_numbers_rails_by_the_books_of_the_node_or_says_that_there_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, node, state = tmp_path / "config.yaml", tmp_path / "node", tmp_path / "state"
    SimulatedMachine.create(node, recorded.load(recorded.find("h100-8gpu")), with_links=False)
    rails = "networks: [{name: rails, ifName: 'r{rail}'}]"
    path.write_text(f"resources: [{{name: rdma/vf, kind: vf, network: rails}}]\nstateDir: {state}\n{rails}")
    command = ["check-config", "--simulate", str(node), str(path)]
    assert simulated_main(command) == 0
    shown = capsys.readouterr().out
    assert "  rail 0, ens1f0np0: ifName r0\n" in shown
    why = f"{state}/ledger.db is not there"
    assert f"rails are numbered as a first start of the agent would: {why}" in shown
    state.mkdir()
    with open_books(state) as books:
        books.keep_rails([Rail(5, "0000:18:00.0", "", "ens1f0np0"), Rail(6, "0000:ff:00.0", "away", "ens9f0np0")])
    assert simulated_main(command) == 0
    shown = capsys.readouterr().out
    assert "  rail 5, ens1f0np0: ifName r5\n" in shown
    assert "first start" not in shown


SWAPPED = """<system><cpu numaid="0"><pci busid="ffff:ff:01.0">
<pci busid="0001:00:00.0"/><pci busid="0108:00:00.0"/></pci></cpu></system>"""


def test_topology_goes_by_the_topology_file_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "config.yaml", tmp_path / "topo.xml"
    path.write_text(f"placement: {{topologyFile: {file}}}")
    asked = ["topology", "--node", "azure-nd-h100", "--config", str(path)]
    assert main(asked) == 0
    assert "told by Standard_ND96isr_H100_v5" in capsys.readouterr().out, "there is no such file"
    file.write_text(SWAPPED)
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert f"told by {file}" in shown
    assert "GPU0  PIX   NIC7" in shown
    file.write_text("<html>")
    assert main(asked) == 0
    assert capsys.readouterr().err.startswith(f"{file}: is no topology file")


def test_doctor_goes_by_the_topology_file_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "config.yaml", tmp_path / "topo.xml"
    path.write_text(f"placement: {{topologyFile: {file}}}")
    file.write_text('<system><cpu numaid="0"><pci busid="0001:00:00.0"/></cpu></system>')
    node = recorded.load(recorded.named("azure-nd-h100"))
    SimulatedMachine.create(tmp_path / "node", node, with_links=False)
    simulated_main(["doctor", "--simulate", str(tmp_path / "node"), "--config", str(path)])
    assert "shows no PCIe switch that a GPU and a NIC have in common" in capsys.readouterr().out


def test_doctor_looks_at_a_node_file_and_asks_nobody_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("resources: [{name: rdma/vf, kind: vf}]")
    assert main(["doctor", "--node", "gb300-4gpu", "--config", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "the host has no libmlx5.so.1 to look at" in shown
    assert "unseen   agent        the agent is asked only on its own node" in shown


def without_roots_privilege(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that file modes hold for: root's capability to overlook them is taken away."""
    bounded = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    run = [*bounded, sys.executable, "-m", "agent", *command]
    return subprocess.run(run, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["topology", "uninstall"])
def test_who_may_not_look_is_told_where_and_what_to_do(command: str, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    run = without_roots_privilege([command, "--root", str(closed)])
    assert run.returncode == 1
    assert run.stderr.startswith(f"nodefabric: {closed}/")
    assert run.stderr.endswith(": Permission denied: run this as root\n")


def test_doctor_calls_unseen_what_it_may_not_look_at(tmp_path: Path) -> None:
    (tmp_path / "sys").mkdir()
    for folder in ("etc/cni/net.d", "opt/cni", "var/lib/kubelet"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder).chmod(0)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    run = without_roots_privilege(["doctor", "--root", str(tmp_path), "--config", str(path), "-o", "json"])
    assert run.stderr == ""
    found = json.loads(run.stdout)["findings"]
    assert {f["severity"] for f in found if f["check"] in ("cni", "kubelet")} == {"unseen"}


def test_release_leaves_a_host_alone_that_never_had_an_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{{stateDir: {tmp_path}/state, runDir: {tmp_path}/run}}")
    assert main(["release", "0000:00:00.0", "--reason", "a test", "--config", str(path)]) == 1
    assert f"{tmp_path}/state/ledger.db is not there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]
    assert main(["release", "0000:00:00.0", "--reason", " ", "--config", str(path)]) == 2
    assert "reason must say why" in capsys.readouterr().err


def test_an_error_is_one_line_whatever_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text('"a\\nb\\e[2K": 1')
    assert main(["check-config", "--node", "one-nic", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{path}: 'a\\nb\\x1b[2K': is not a known key")
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "name a command, or --help; known are: check-config, completion"),
        ("tolopogy", "tolopogy is not a known command (did you mean 'topology'?); known are: "),
        ("topology --node nowhere", "h100-8gpu"),
        ("topology --root /nowhere", "/nowhere: has no folder sys"),
        (
            "topology --node one-nic --svg --output json",
            "--svg draws the PCIe tree: it goes with neither --output json",
        ),
        ("topology --node one-nic --svg --vfs", "it goes with neither --output json nor --vfs"),
        ("uninstall --root /nowhere", "/nowhere: is no folder"),
        ("uninstall --state-dir var/lib/nodefabric", "is no absolute path of the host"),
        ("uninstall --state-dir /var/lib/../../etc", "is no absolute path of the host"),
        ("run --node one-nic", "unrecognized arguments: --node"),
        ("release 0000:00:00.0 --reason test --node one-nic", "unrecognized arguments: --node"),
    ],
)
def test_what_cannot_be_heeded_ends_with_status_2_and_says_why(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(words.split()))
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
