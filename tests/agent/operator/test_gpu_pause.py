from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agent.errors import RequestInvalid
from agent.model.device import Gpu, Snapshot
from agent.operator.gpu_pause import answering
from agent.state import Latest

SNAPSHOT = Snapshot(gpus=(Gpu("GPU-a", 0, 0, "0000:1b:00.0", "H100", 1), Gpu("GPU-b", 1, 1, "0000:3d:00.0", "H100", 1)))


class Driver:
    """The part of a host that lets go."""

    def __init__(self, is_free: bool = True) -> None:
        self.is_free = is_free
        self.asked: list[tuple[float, list[str]]] = []

    def pause_gpus(self, seconds: float, addresses: Sequence[str]) -> bool:
        self.asked.append((seconds, list(addresses)))
        return self.is_free


def ask(driver: Driver, request: Mapping[str, Any]) -> str:
    return answering(driver.pause_gpus, Latest(SNAPSHOT))(request)


@pytest.mark.parametrize("name", ["GPU-b", "0000:3d:00.0", "GPU1", "1", "GPU-b::3"])
def test_a_gpu_is_named_as_other_commands_name_it(name: str) -> None:
    driver = Driver()
    assert "reset GPU-b now" in ask(driver, {"gpus": [name], "seconds": 30})
    assert driver.asked == [(30, ["0000:3d:00.0"])]


def test_what_was_not_let_go_is_said() -> None:
    assert "still open" in ask(Driver(is_free=False), {"gpus": ["0"], "seconds": 30})
    assert "read again" in ask(Driver(), {"gpus": ["0"], "seconds": 0})


@pytest.mark.parametrize(
    "request_",
    [
        {"gpus": [], "seconds": 1},
        {"gpus": "GPU-a", "seconds": 1},
        {"gpus": [1], "seconds": 1},
        {"gpus": ["GPU-c"], "seconds": 1},
        {"gpus": ["GPU-a"]},
        {"gpus": ["GPU-a"], "seconds": -1},
        {"gpus": ["GPU-a"], "seconds": 1e9},
        {"gpus": ["GPU-a"], "seconds": True},
        {"gpus": ["GPU-a"], "seconds": float("nan")},
    ],
)
def test_a_wrong_request_lets_nothing_go(request_: dict[str, Any]) -> None:
    driver = Driver()
    with pytest.raises(RequestInvalid):
        ask(driver, request_)
    assert driver.asked == []
