"""The file in which some drivers keep what VLANs a VF may send: two dialects, and what is done about refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import HardwareError
from agent.hardware.sysfs import trunk
from tests.vf_trunk import TrunkDriver

PF = "ens1f0"


@pytest.fixture(params=["mlx5_core", "i40e", "ice"])
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> TrunkDriver:
    """A PF's driver, of either dialect, with an empty list for VF 0."""
    return made(tmp_path, request.param)


def made(root: Path, name: str) -> TrunkDriver:
    driver = TrunkDriver(has_dashes=name != "mlx5_core")
    path = driver.create(trunk.path_of(root, PF, 0))
    path.parents[2].joinpath("driver").symlink_to(f"../../../../bus/pci/drivers/{name}")
    return driver


def change(root: Path, driver: TrunkDriver, wanted: str) -> None:
    with trunk.changing(root, PF, 0, wanted, driver.write):
        pass


def test_a_list_becomes_what_is_wanted_in_both_dialects(driver: TrunkDriver, tmp_path: Path) -> None:
    assert (trunk.read(tmp_path, PF, 0), trunk.problem(tmp_path, PF, 0)) == ("", "")
    for wanted in ("100,200-210", "100,205-220", "4094", "", "1-4094", "0,5"):
        change(tmp_path, driver, wanted)
        change(tmp_path, driver, wanted)
    assert trunk.read(tmp_path, PF, 0) == "0,5"
    assert driver.list_in(trunk.path_of(tmp_path, PF, 0)) == {0, 5}


def test_no_more_is_written_than_what_differs(tmp_path: Path) -> None:
    driver = made(tmp_path, "mlx5_core")
    change(tmp_path, driver, "100,200-210")
    change(tmp_path, driver, "100,205-220")
    assert driver.said == ["add 100 100", "add 200 210", "rem 200 204", "add 211 220"]
    intel = made(tmp_path / "other", "i40e")
    change(tmp_path / "other", intel, "100,200-210")
    assert intel.said == ["add 100-100", "add 200-210"]


def test_what_is_not_wanted_goes_first_and_what_is_missing_comes_last(tmp_path: Path) -> None:
    driver = made(tmp_path, "mlx5_core")
    change(tmp_path, driver, "5")
    with trunk.changing(tmp_path, PF, 0, "6", driver.write):
        assert trunk.read(tmp_path, PF, 0) == ""
    assert trunk.read(tmp_path, PF, 0) == "6"


def test_of_a_list_that_cannot_be_shown_whole_what_is_shown_must_be_right(tmp_path: Path) -> None:
    driver = made(tmp_path, "mlx5_core")
    change(tmp_path, driver, "1000-2000")
    driver.is_deaf = True
    with pytest.raises(HardwareError, match="trunk was set to '1001-2000' without an error but is '1000-18"):
        change(tmp_path, driver, "1001-2000")


@pytest.mark.parametrize(("wanted", "found"), [("5", "''"), ("", "'7'")])
def test_what_a_driver_does_not_do_is_told_with_what_is_instead(tmp_path: Path, wanted: str, found: str) -> None:
    driver = made(tmp_path, "mlx5_core")
    if not wanted:
        change(tmp_path, driver, "7")
    driver.is_deaf = True
    with pytest.raises(
        HardwareError, match=f"VF 0 of ens1f0: trunk was set to '{wanted}' without an error but is {found}"
    ):
        change(tmp_path, driver, wanted)


def test_a_driver_without_a_list_is_named_with_what_helps(tmp_path: Path) -> None:
    driver, path = made(tmp_path, "mlx5_core"), trunk.path_of(tmp_path, PF, 0)
    path.unlink()
    assert (trunk.exists(tmp_path, PF, 0), trunk.read(tmp_path, PF, 0)) == (False, None)
    found = trunk.problem(tmp_path, PF, 0)
    assert found.startswith(f"the driver mlx5_core has no {path}: ")
    assert found.endswith("; install one on the node, or leave trunk out")
    with pytest.raises(HardwareError, match=f"the driver has no {path}"):
        change(tmp_path, driver, "5")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Allowed 802.1Q VLANs: 2-10, 100\n", "2-10,100"),
        ("Allowed 802.1Q VLANs: 2 3 4 100\n", "2-4,100"),
        ("Allowed 802.1Q VLANs:\n", ""),
        ("2-10,100\n", "2-10,100"),
        ("\n", ""),
        ("", ""),
        ("0 4095", "0,4095"),
    ],
)
def test_lists_are_read_in_every_spelling(tmp_path: Path, text: str, expected: str) -> None:
    made(tmp_path, "mlx5_core")
    trunk.path_of(tmp_path, PF, 0).write_text(text)
    assert trunk.read(tmp_path, PF, 0) == expected


def test_what_is_no_list_counts_as_unknown_and_is_told_to_who_would_change_it(tmp_path: Path) -> None:
    driver, path = made(tmp_path, "mlx5_core"), trunk.path_of(tmp_path, PF, 0)
    path.write_text("on\n")
    assert trunk.read(tmp_path, PF, 0) is None
    assert trunk.problem(tmp_path, PF, 0) == f"{path} shows 'on\\n', which is no list of VLANs"
    with pytest.raises(HardwareError, match="which is no list of VLANs"):
        change(tmp_path, driver, "5")
    path.unlink()
    path.mkdir()
    assert trunk.problem(tmp_path, PF, 0) == f"{path} cannot be read: Is a directory"
