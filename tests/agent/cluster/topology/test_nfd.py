from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cluster.topology.nfd import FeatureFile, parse, render
from agent.errors import HardwareError

LABELS = {"example.com/rails": "8", "volcano.sh/tor": "leaf-r17-a"}


def test_the_file_has_a_line_for_each_label_and_is_written_when_it_says_something_new(tmp_path: Path) -> None:
    path = tmp_path / "nodefabric"
    file = FeatureFile(path)
    assert file.write(LABELS)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines == ["example.com/rails=8", "volcano.sh/tor=leaf-r17-a"]
    before = path.stat().st_ino
    assert not file.write(LABELS)
    assert path.stat().st_ino == before
    assert file.write({"example.com/rails": "4"})
    assert file.read() == {"example.com/rails": "4"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["nodefabric"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_last_label_goes_away_too_and_no_file_is_made_for_none(tmp_path: Path) -> None:
    file = FeatureFile(tmp_path / "nodefabric")
    assert not file.write({})
    assert not (tmp_path / "nodefabric").exists()
    file.write(LABELS)
    assert file.write({})
    assert file.read() == {}
    assert not file.write({})  # each time it would wake nfd's worker


def test_what_was_written_is_withdrawn_and_nothing_else(tmp_path: Path) -> None:
    file = FeatureFile(tmp_path / "nodefabric")
    assert not file.withdraw()
    file.write(LABELS)
    assert file.withdraw()
    assert not (tmp_path / "nodefabric").exists()
    (tmp_path / "nodefabric").write_text("# mine\nexample.com/rails=8\n")
    assert not file.withdraw()
    assert (tmp_path / "nodefabric").read_text() == "# mine\nexample.com/rails=8\n"
    assert not FeatureFile(tmp_path / "nodefabric" / "no").withdraw()


def test_a_folder_that_is_missing_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        HardwareError, match=r"features.d/nodefabric cannot be written \(No such file.*mount the folder"
    ):
        FeatureFile(tmp_path / "features.d/nodefabric").write(LABELS)


def test_more_than_the_worker_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="do not fit"):
        FeatureFile(tmp_path / "nodefabric").write({f"example.com/{n}": "x" * 60 for n in range(2000)})


keys = st.from_regex(r"[a-z]{1,8}\.[a-z]{1,8}/[a-z0-9.-]{1,20}", fullmatch=True)


@given(st.dictionaries(keys, st.from_regex(r"[A-Za-z0-9._-]{0,30}", fullmatch=True)))
def test_what_is_written_reads_back(labels: dict[str, str]) -> None:
    assert parse(render(labels)) == labels
