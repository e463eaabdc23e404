from __future__ import annotations

from pathlib import Path

from agent.hardware.sysfs.read import Attributes


def folder(root: Path) -> Path:
    found = root / "sys/class/net/eth0/statistics"
    found.mkdir(parents=True)
    return found


def test_numbers_of_a_folder_are_read_at_once_and_what_is_none_is_left_out(tmp_path: Path) -> None:
    inside = folder(tmp_path)
    for name, text in (("rx_bytes", "18446744073709551615\n"), ("tx_bytes", "0\n"), ("less", "-1\n"), ("empty", "")):
        (inside / name).write_text(text)
    (inside / "odd").write_text("N/A\n")
    (inside / "binary").write_bytes(b"\xff\x00")
    read = Attributes(tmp_path)
    names = ("rx_bytes", "tx_bytes", "less", "empty", "odd", "binary", "absent")
    assert read.wholes("/sys/class/net/eth0/statistics", names) == {"rx_bytes": (1 << 64) - 1, "tx_bytes": 0}
    assert [problem.path.rpartition("/")[2] for problem in read.problems] == ["binary", "odd"]


def test_a_folder_that_is_gone_has_no_numbers_and_is_no_problem(tmp_path: Path) -> None:
    read = Attributes(tmp_path)
    assert read.wholes("/sys/class/net/gone/statistics", ["rx_bytes"]) == {}
    assert read.problems == ()


def test_reading_numbers_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (folder(tmp_path) / "rx_bytes").write_text("1\n")
    read = Attributes(tmp_path)
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        read.wholes("/sys/class/net/eth0/statistics", ["rx_bytes", "absent"])
    assert len(set(Path("/proc/self/fd").iterdir())) == len(before)
