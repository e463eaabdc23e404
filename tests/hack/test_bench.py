"""The arithmetic and the stop-watch of the benchmarks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from measure import former
from measure.breakdown import breakdown
from measure.figures import exceeded, quantile, ratios, table
from measure.markdown import BEGIN, END, put_into, section
from measure.program import Program


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1, 100), (0, 1)])
def test_a_quantile_is_a_value_of_the_sample(share: float, value: int) -> None:
    assert quantile(range(100, 0, -1), share) == value


def test_a_figure_above_its_limit_is_named_with_the_limit() -> None:
    [line] = exceeded({"allocate_p99_ms": 5.1})
    assert line.startswith("allocate_p99_ms is 5.1, must be at most 5")
    [row] = table({"allocate_p99_ms": 5.1})
    assert "OVER at most 5" in row


def test_a_median_is_compared_with_the_former_version_where_that_was_measured() -> None:
    figures = {"add_p50_ms": 3.0, "former_add_p50_ms": 2.0, "del_p50_ms": 1.0}
    assert ratios(figures, "add", "del") == {"add_ratio_former": 1.5}


def test_a_former_version_that_is_no_commit_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--against no-such-commit: "):
        former.build("no-such-commit", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_program_gets_each_run_s_input_and_gives_its_output_and_status() -> None:
    with closing(Program(Path("/bin/cat"))) as cat:
        assert [cat.run({}, text).output for text in (b"a longer text", b"short")] == [b"a longer text", b"short"]
    with closing(Program(Path("/bin/false"))) as false:
        run = false.run({}, b"")
        assert (run.status, run.output) == (1, b"")
        assert run.milliseconds > 0


def test_a_breakdown_leaves_the_relay_what_the_agent_does_not_see() -> None:
    whole = 'nodefabric_cni_duration_milliseconds_sum{command="ADD",outcome="ok"} '
    step = 'nodefabric_cni_step_duration_milliseconds_sum{step="device"} '
    kinds = "".join(f"# TYPE nodefabric_cni_{k}duration_milliseconds histogram\n" for k in ("", "step_"))
    figures = breakdown("add", f"{kinds}{whole}10\n", f"{kinds}{whole}50\n{step}30\n", [21.0, 23.0])
    assert figures["add_device_mean_ms"] == 15
    assert figures["add_ipam_mean_ms"] == 0
    assert figures["add_rest_of_agent_mean_ms"] == 5
    assert figures["add_relay_mean_ms"] == 2


def test_the_readme_gets_the_figures_between_its_marks() -> None:
    class Measured(dict[str, float]):
        def __missing__(self, name: str) -> float:
            return 12.345

    text = f"before\n{BEGIN}old\n{END}after\n"
    counts = {"links": 75, "podded_links": 185, "crowded_links": 1099, "leased_links": 75}
    measured = Measured(add_ratio_host_device=0.75, podded_add_ratio_host_device=0.5, **counts)
    new = put_into(text, section(measured))
    assert new.startswith(f"before\n{BEGIN}\n| p50 / p99 |")
    assert new.endswith(f"\n\n{END}after\n")
    assert "| ADD on a host with 75 interfaces | 12.3 / 12.3 ms | 12.3 / 12.3 ms | 0.75 |" in new
    assert "| ADD on a host with 185 interfaces, as full of pods as kubelet's default allows | 12.3 / 12.3 ms |" in new
    assert "| ADD on a host with 1,099 interfaces, as with 1,024 VFs more | 12.3 / 12.3 ms |" in new
    assert "| ADD on a host with 75 interfaces, addresses from host-local | 12.3 / 12.3 ms |" in new
    assert "| from the agent's start until kubelet has all its lists, p50 / p99 | 12 / 12 ms |" in new
    assert put_into(new, section(measured)) == new
