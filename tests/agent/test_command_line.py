"""What the commands print that look at a node and end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.__main__ import main

CONFIG = "resources: [{name: rdma/vf, kind: vf}]"


def test_check_config_names_some_of_many_devices_and_counts_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert main(["check-config", "--node", "h100-8gpu", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "rdma/vf (vf): 64 of 64" in shown
    assert shown.rstrip().endswith("0000:18:01.0, and 56 more")


def test_check_config_names_all_devices_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    assert main(["check-config", "--node", "h100-8gpu", "--output", "json", str(path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["resources"][0]["devices"]) == 64


def test_check_config_says_that_a_file_offers_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("")
    assert main(["check-config", "--node", "one-nic", str(path)]) == 0
    assert "no resources" in capsys.readouterr().out


def test_a_wrong_config_ends_with_status_2_and_every_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("resources: [{name: RDMA, kind: hcas}]")
    assert main(["check-config", "--node", "one-nic", str(path)]) == 2
    problems = capsys.readouterr().err
    assert f"{path}: resources[0].name: must be" in problems
    assert f"{path}: resources[0].kind: must be" in problems


def test_an_unknown_node_ends_with_status_2_and_the_names_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--node", "nowhere"]) == 2
    assert "h100-8gpu" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--root", "--simulate"])
def test_a_folder_that_is_no_host_ends_with_status_2(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", option, "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("/nowhere: ")


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
