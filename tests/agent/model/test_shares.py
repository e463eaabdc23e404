"""Shares are known by their names, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from agent.model.shares import is_share_id


@pytest.mark.parametrize("text", ["hca-0c42a10300651234-0", "hca-0000:3b:00.0-62", "hca-0000:3b:00.0-1-62"])
def test_a_share_is_known_however_its_adapter_is_named(text: str) -> None:
    assert is_share_id(text)


@pytest.mark.parametrize(
    "text", ["", "17", "hca-17", "hca-mlx5_0-1", "0000:3b:00.0", "slot-rdma:hca-0-3", "hca-0c42a10300651234-0\n"]
)
def test_nothing_else_is_one(text: str) -> None:
    assert not is_share_id(text)
