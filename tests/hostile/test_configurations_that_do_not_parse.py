"""Somebody breaks the file of the configuration: `nodefabric status` shows how the node is, besides the error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from agent.__main__ import main
from tests import sandbox
from tests.node import VF, attach, open_books, owner

BROKEN = "resources: [\n\t*b"
WRONG = "resources: 7"


def test_the_books_are_shown_besides_the_error_while_no_agent_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"stateDir: {tmp_path}\nrunDir: {tmp_path}/run\nendpoints: {{port: 1}}\n{WRONG}\n")
    with open_books(tmp_path) as books:
        attach(books, VF, owner())
    assert main(["status", "--config", str(path)]) == 3
    out, err = capsys.readouterr()
    assert VF in out
    assert "does not run; this is what its ledger holds" in out
    assert "resources: must be a list, is 7" in err
    assert main(["status", "--config", str(path), "-o", "json"]) == 3
    out, err = capsys.readouterr()
    assert [row["device"] for row in json.loads(out)["attachments"]] == [VF]
    assert "resources: must be a list, is 7" in err


def test_of_a_file_that_is_no_yaml_the_books_are_looked_for_where_they_are_by_default(
    own_network: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(BROKEN)
    (tmp_path / "lib/nodefabric").mkdir(parents=True)
    with open_books(tmp_path / "lib/nodefabric") as books:
        attach(books, VF, owner())
    with sandbox.mounts():
        subprocess.run(["mount", "--bind", tmp_path / "lib", "/var/lib"], check=True)
        assert main(["status", "--config", str(path)]) == 3
    out, err = capsys.readouterr()
    assert VF in out
    assert f"{path}: " in err
