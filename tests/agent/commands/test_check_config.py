"""What `check-config` shows of the configurations in check_config.yaml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from agent.__main__ import main
from agent.hardware.host import Host
from agent.model.device import Snapshot

Check = Callable[[str, str], tuple[int, str]]

CASES = yaml.safe_load(Path(__file__).with_name("check_config.yaml").read_text())


class Looked:
    """A modelled node that was scanned before: laying it out takes longer than all else."""

    def __init__(self, root: Path, snapshot: Snapshot) -> None:
        self.root, self.snapshot = root, snapshot

    def scan(self) -> Snapshot:
        return self.snapshot

    def close(self) -> None:
        pass


@pytest.fixture
def check(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    node_root: Callable[[str], Path],
    node_snapshot: Callable[[str], Snapshot],
) -> Check:
    """Check a configuration on a modelled node, and return the status and what is said."""

    def checked(node: str, text: str) -> tuple[int, str]:
        path, host = tmp_path / "config.yaml", cast(Host, Looked(node_root(node), node_snapshot(node)))
        path.write_text(text)
        status = main(["check-config", "--root", str(node_root(node)), str(path)], lambda: host)
        return status, "".join(capsys.readouterr())

    return checked


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["about"])
def test_a_configuration_is_told_with_its_faults_and_what_to_do(check: Check, case: dict[str, Any]) -> None:
    status, shown = check(case["node"], case["config"])
    assert status == case["status"]
    for part in case["shows"]:
        assert part in shown
    assert "hides" not in case or case["hides"] not in shown
