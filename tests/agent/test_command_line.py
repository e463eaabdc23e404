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


def test_check_config_names_vfs_by_pf_and_range(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert main(["check-config", "--node", "h100-8gpu", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "rdma/vf (vf): 64 of 64" in shown
    assert "ens7f0np0, ens8f0np0: VFs 0–7 each\n" in shown


def test_check_config_names_all_devices_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert main(["check-config", "--node", "h100-8gpu", "--output", "json", str(path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["resources"][0]["devices"]) == 64


def test_check_config_names_the_devices_that_the_scheduler_would_see(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    late = "{name: rdma/vf, kind: vf, offer: dra, binding: late}"
    path.write_text(f"resources: [{late}, {{name: rdma/hca, kind: hca, offer: dra}}]")
    assert main(["check-config", "--node", "h100-8gpu", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "rdma/vf (vf): 64 of 64 devices, 8 devices in slices\n" in shown
    assert "  the scheduler sees slots-rdma-vf-gpu-0000-1b-00-0, " in shown
    assert "  the scheduler sees hca-946dae0300000000, " in shown


def test_check_config_says_what_is_protected_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text('{cni: {protect: ["0000:18:00.0", typo0]}, resources: [{name: rdma/hca, kind: hca}]}')
    assert main(["check-config", "--node", "h100-8gpu", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "takes 0000:3a:00.0 (mlx5_1)" in shown
    assert "cni.protect 0000:18:00.0: 0000:18:00.0\n" in shown
    assert "cni.protect typo0: no adapter of this node" in shown


def test_check_config_warns_of_what_surprises_on_this_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{CONFIG}\ntopology: {{rails: [ens1f0np0, gone0]}}")
    assert main(["check-config", "--node", "h100-8gpu", str(path)]) == 0
    assert "warning: topology.rails[1]: no adapter here is called gone0: plug" in capsys.readouterr().out


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


def test_check_config_shows_the_network_of_each_plane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    nic = "nic: {kind: nic, count: planes, select: {vendors: ['15b3']}}"
    path.write_text(
        f"resources: [{{name: rdma/rail, kind: rail, {nic}, network: rails}}]\n"
        "networks: [{name: rails, ifName: 'rail{rail}p{plane}'}]"
    )
    assert main(["check-config", "--node", "gb200-cx8-4gpu", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "rdma/rail (rail): 12 of 12 devices, 4 units" in shown
    assert (
        "network rails: 8 networks\n  rail 0, enp3s0f0np0: ifName rail0p0\n  rail 0, enp3s0f1np1: ifName rail0p1"
        in shown
    )
    assert "  rail 3, enP18p3s0f1np1: ifName rail3p1\n" in shown
    assert "warning" not in shown


@pytest.mark.parametrize(
    ("keys", "alike", "listed"),
    [
        (
            "ifName: 'rail{rail}', ipam: {type: whereabouts, range: '10.{rail}.0.0/16'}",
            "ifName: 'rail{rail}'",
            "rail 0, planes 0 enp3s0f0np0 and 1 enp3s0f1np1: ifName rail0, ipam.range 10.0.0.0/16",
        ),
        (
            "ifName: 'r{rail}p{plane}', ipam: {type: whereabouts, range: '10.{rail}.0.0/16'}",
            "ipam.range: '10.{rail}.0.0/16'",
            "rail 0, enp3s0f1np1: ifName r0p1, ipam.range 10.0.0.0/16",
        ),
        (
            "ifName: '{pf}', ipam: {type: whereabouts, range: '10.{rail}.{plane}.0/24'}",
            "",
            "rail 0, enp3s0f1np1: ifName enp3s0f1np1, ipam.range 10.0.1.0/24",
        ),
    ],
)
def test_check_config_says_where_planes_of_a_rail_have_the_same_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: str, alike: str, listed: str
) -> None:
    path = tmp_path / "config.yaml"
    nics = "{name: rdma/nic, kind: nic, select: {vendors: ['15b3']}, network: rails}"
    path.write_text(f"{{resources: [{nics}], networks: [{{name: rails, {keys}}}]}}")
    assert main(["check-config", "--node", "gb200-cx8-4gpu", str(path)]) == 0
    shown = capsys.readouterr().out
    warnings = [line for line in shown.splitlines() if line.startswith("warning: networks[0].")]
    are = "is the same for enp3s0f0np0 and enp3s0f1np1, which are planes of rail 0: add {plane}"
    assert warnings == ([f"warning: networks[0].{alike} {are}, so that each plane has its own"] if alike else [])
    assert f"  {listed}\n" in shown


def test_check_config_says_that_a_file_offers_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("")
    assert main(["check-config", "--node", "one-nic", str(path)]) == 0
    assert "no resources" in capsys.readouterr().out


def test_gpus_without_a_nic_are_no_rail_and_end_with_status_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("resources: [{name: rdma/rail, kind: rail, nic: {kind: vf, select: {pf: [ens1f0]}}}]")
    assert main(["check-config", "--node", "h100-8gpu", str(path)]) == 5
    assert "rdma/rail (rail): 0 of 72 devices, 0 units" in capsys.readouterr().out


def test_a_wrong_config_ends_with_status_2_and_every_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("resources: [{name: RDMA, kind: hcas}]")
    assert main(["check-config", "--node", "one-nic", str(path)]) == 2
    problems = capsys.readouterr().err
    assert f"{path}: resources[0].name: must be" in problems
    assert f"{path}: resources[0].kind: must be" in problems


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
    assert "the ACS settings of 0008:02:00.0, " in shown
    assert "unseen   agent        the agent is asked only on its own node" in shown


def test_an_unknown_node_ends_with_status_2_and_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--node", "nowhere"]) == 2
    assert "h100-8gpu" in capsys.readouterr().err


def test_a_folder_that_is_no_host_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--root", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("/nowhere: ")


@pytest.mark.parametrize("other", [["--output", "json"], ["--vfs"]])
def test_a_drawing_goes_with_no_option_that_it_could_not_heed(
    other: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["topology", "--node", "one-nic", "--svg", *other]) == 2
    assert (
        capsys.readouterr().err
        == "command line: --svg draws the PCIe tree: it goes with neither --output json nor --vfs\n"
    )


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


@pytest.mark.parametrize("command", [["run"], ["release", "0000:00:00.0", "--reason", "a test"]])
def test_what_changes_a_host_takes_no_recorded_one(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--node", "one-nic"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --node" in capsys.readouterr().err


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


def test_a_command_that_is_nearly_right_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tolopogy"])
    assert ended.value.code == 2
    assert "tolopogy is not a known command (did you mean 'topology'?); known are: " in capsys.readouterr().err
