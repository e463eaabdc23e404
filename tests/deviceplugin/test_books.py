"""What is read of the books for the lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.model.allocation import Undo
from deviceplugin.books import read
from tests.agent.books import open_books, owner


@pytest.mark.parametrize(("mode", "expected"), [("nic", {"0000:3b:00.0"}), ("vf", set())])
def test_adapters_that_are_in_pods_are_told_from_vfs(tmp_path: Path, mode: str, expected: set[str]) -> None:
    device, undo = "0000:3b:00.0", Undo("ens1f0", "02:00:00:00:01:00", 1500, False, mode=mode)
    with open_books(tmp_path) as books:
        books.begin_attach(
            owner(),
            ifname="net1",
            device=device,
            resource_name="",
            undo=undo,
            netns_path="/nowhere",
            request={"name": "net", "network": None},
        )
        assert read(books, with_names=False, with_slots=False).rulers == expected
