from __future__ import annotations

import pytest

from agent.model.counters import (
    PortCount,
    annotation,
    in_steps,
    loads,
    parse_annotation,
    rates,
)

SPEED = 50e9


def count(received: int, transmitted: int, *, traffic: str = "rdma", port: int = 1) -> PortCount:
    return PortCount("0000:3b:00.0", "mlx5_0", port, traffic, received, transmitted, SPEED)


def test_counters_that_were_set_back_and_ports_that_are_new_have_no_rate() -> None:
    assert rates([count(100, 200)], [count(50, 300)], 1.0) == ()
    assert rates([], [count(50, 300)], 1.0) == ()
    assert rates([count(1, 1)], [count(2, 2)], 0.0) == ()


def test_the_load_is_the_busier_direction_of_all_traffic_of_the_busiest_port() -> None:
    before = [count(0, 0), count(0, 0, traffic="netdev"), count(0, 0, port=2)]
    now = [count(int(SPEED / 2), 0), count(int(SPEED / 2), 0, traffic="netdev"), count(0, int(SPEED / 4), port=2)]
    assert loads(rates(before, now, 2.0)) == {"mlx5_0": 50.0}


def test_a_port_without_a_speed_has_no_load() -> None:
    down = PortCount("0000:3b:00.0", "mlx5_0", 1, "rdma", 0, 0, None)
    assert loads(rates([down], [down], 1.0)) == {}


@pytest.mark.parametrize(
    ("load", "told", "step"),
    [(12, None, 0), (13, None, 25), (99, None, 100), (17, 0, 0), (18, 0, 25), (20, 25, 25), (7, 25, 0), (100, 0, 100)],
)
def test_a_load_is_told_as_another_step_only_when_it_is_clearly_nearer(
    load: float, told: int | None, step: int
) -> None:
    assert in_steps({"mlx5_0": load}, {} if told is None else {"mlx5_0": told}) == {"mlx5_0": step}


def test_the_annotation_reads_back_and_nonsense_is_nothing() -> None:
    steps = {"mlx5_1": 25, "mlx5_0": 0}
    assert annotation(steps) == '{"mlx5_0":0,"mlx5_1":25}'
    assert parse_annotation(annotation(steps)) == steps
    assert parse_annotation("x") == parse_annotation("[1]") == parse_annotation('{"a":"b"}') == {}
