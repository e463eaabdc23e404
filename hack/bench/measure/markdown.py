"""Figures to the section that hack/bench/results.md shows of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from measure.figures import Figures

BEGIN, END = "<!-- figures: hack/bench/run --document hack/bench/results.md -->\n", "<!-- end of figures -->\n"


class SectionMissing(Exception):
    """The file has no place for figures."""


def put_into(text: str, lines: Iterable[str], mark: str = BEGIN) -> str:
    """Replace what stands between the marks. Raises SectionMissing."""
    before, begin, rest = text.partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SectionMissing(f"there must be the lines {mark.strip()} and {END.strip()}")
    return before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after


def section(figures: Figures) -> Iterator[str]:
    """Write the tables. Raises KeyError for a figure not measured."""

    def ms(name: str) -> str:
        return f"{figures[name]:.1f} ms"

    def both(name: str) -> str:
        return f"{figures[f'{name}_p50_ms']:.1f} / {figures[f'{name}_p99_ms']:.1f} ms"

    def beside(what: str, ours: str, theirs: str, ratio: str) -> str:
        return f"| {what} | {both(ours)} | {both(theirs)} | {figures[ratio]:.2f} |"

    yield "| p50 / p99 | nodefabric | host-device | ratio of p50 |"
    yield "|---|---|---|---|"
    for kind, more in (
        ("", ""),
        ("podded_", ", as full of pods as kubelet's default allows"),
        ("crowded_", ", as with 1,024 VFs more"),
        ("leased_", ", addresses from host-local"),
    ):
        what = f"ADD on a host with {figures[f'{kind}links']:,.0f} interfaces{more}"
        yield beside(what, f"{kind}add", f"{kind}host_device_add", f"{kind}add_ratio_host_device")
    yield beside("ADD, each of 16 at once", "add_16", "host_device_add_16", "add_16_ratio_host_device")
    yield beside("DEL until it is answered", "del", "host_device_del", "del_ratio_host_device")
    yield beside("DEL until the VF is back", "del_back", "host_device_del", "del_back_ratio_host_device")
    yield beside(
        "DEL of 16 at once until all are back",
        "del_16_all_back",
        "host_device_del_16_all_back",
        "del_16_all_back_ratio_host_device",
    )
    yield ""
    yield "Where an ADD's time goes, mean:"
    yield ""
    yield "| | relay | reading the call | finding the device | ledger | kernel | IPAM plugin | addresses, routes |"
    yield "|---|---|---|---|---|---|---|---|"
    for what, kind in (("without IPAM", ""), ("with host-local", "leased_")):
        steps = ("relay", "rest_of_agent", "plan", "books", "device", "ipam", "addresses")
        cells = (ms(f"{kind}add_{step}_mean_ms") for step in steps)
        yield f"| {what} | {' | '.join(cells)} |"
    yield ""
    yield "| the node with 16 PFs and 1,024 VFs | |"
    yield "|---|---|"
    yield f"| discovery | {figures['discovery_1024_vf_ms']:.0f} ms |"
    registered = f"{figures['start_to_registered_ms']:.0f} / {figures['start_to_registered_p99_ms']:.0f} ms"
    yield f"| from the agent's start until kubelet has all its lists, p50 / p99 | {registered} |"
    yield f"| Allocate over its socket, p50 / p99 | {both('allocate')} |"
    yield f"| GetPreferredAllocation, p50 / p99 | {both('preferred')} |"
    nothing = f"where `/bin/true` takes {ms('bin_true_p50_ms')}"
    yield f"| ADD for a pod with nothing of ours, whole, {nothing}, p50 / p99 | {both('passthrough_total')} |"
    yield f"| the same while the agent is away, p50 / p99 | {both('passthrough_away_add')} |"
    yield f"| DEL of such a pod while the agent is away, p50 / p99 | {both('passthrough_away_del')} |"
    memory = f"{figures['agent_rss_mib']:.0f} / {figures['agent_rss_no_publish_mib']:.0f} MiB"
    yield f"| memory, with / without publishing the topology | {memory} |"
    yield f"| processor time when idle | {figures['idle_cpu_pct']:.1f} % |"
    yield ""
    yield f"A bare move of a link to another namespace takes the kernel {both('kernel_move')} here, most of it in"
    yield f"`rcu_barrier()`; with a program started for it that does nothing, {both('program_move')}: no plugin can be"
    yield "faster. The wait ends on timer ticks: medians jump between one and two grace periods from run to run."
