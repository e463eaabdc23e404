"""Figures to the section that hack/bench/dra-results.md shows of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from measure.figures import Figures

BEGIN = "<!-- figures: hack/bench/dra --document hack/bench/dra-results.md -->\n"
WAYS: Mapping[str, str] = {
    "near_gpu": "a constraint on the nearest GPU's UUID",
    "near_address": "a constraint on its PCI address, also with AMD's GPUs",
    "late_dra": "bound late",
    "pcie_root": "a constraint on the PCIe root; a pair that it cannot place counts as missed",
    "numa": "a constraint on the NUMA node, likewise",
    "first_fit": "no constraint",
}


def section(figures: Figures) -> Iterator[str]:
    """Write the tables. Raises KeyError for a figure not measured."""

    def ms(name: str) -> str:
        return f"{figures[name]:,.1f} ms"

    def both(name: str) -> str:
        return f"{figures[f'{name}_p50_ms']:.1f} / {figures[f'{name}_p99_ms']:.1f} ms"

    yield "| a node with 1,024 VFs, p50 / p99 | bound early | bound late |"
    yield "|---|---|---|"
    for what, name in (
        ("NodePrepareResources", "prepare"),
        ("the same again for a claim that is prepared", "prepared_again"),
        ("of 16 claims at once, each", "prepare_16"),
        ("NodeUnprepareResources, of a device that is back", "unprepare"),
    ):
        yield f"| {what} | {both(name)} | {both(f'late_{name}')} |"
    yield f"| all slices, bytes | {figures['slice_bytes_1024_vf']:,} | {figures['slice_bytes_1024_vf_late']:,} |"
    yield ""
    yield "| | |"
    yield "|---|---|"
    more = f"{figures['pod_start_claim_more_ms']:.0f} ms"
    yield f"| a pod's start by claim takes longer than by device plugin, p50 | {more} |"
    yield f"| a pod's end until its VF is unprepared and back, p50 / p99 | {both('del_unprepare_home')} |"
    writes = f"{figures['slice_writes_per_pod']:.0f} / {figures['status_writes_per_pod']:.0f}"
    yield f"| slices / claims written for a pod | {writes} |"
    yield f"| writes in an hour in which nothing happens | {figures['steady_writes_per_hour']:.0f} |"
    for what, name in (
        ("until the slices are back after kubelet has wiped them", "slices_back_after_wipe"),
        (
            "from the agent's start until kubelet has registered it, which looks once a second",
            "registered_after_restart",
        ),
    ):
        yield f"| {what}, p50 / p99 | {figures[f'{name}_s']:.2f} / {figures[f'{name}_p99_s']:.2f} s |"
    yield f"| memory of the agent with 1,024 VFs for claims | {figures['agent_rss_mib']:.0f} MiB |"
    yield f"| memory for claims where nothing is offered to them | {figures['rss_without_dra_extra_mib']:.1f} MiB |"
    yield ""
    yield "| NICs as near to their GPU as any choice makes them, on all modelled GPU hosts | |"
    yield "|---|---|"
    for name, what in WAYS.items():
        yield f"| {what} | {figures[f'{name}_attained_pct']:.1f} % |"
    yield ""
    yield "| until a pod that does not fit any more is told so | bound late | a device for each VF |"
    yield "|---|---|---|"
    for name, pairs in (("1_pair", "1 GPU–NIC pair"), ("4_pairs", "4 pairs"), ("8_pairs", "8 pairs")):
        late, early = ms(f"unsatisfiable_{name}_ms"), ms(f"unsatisfiable_{name}_device_per_vf_ms")
        yield f"| {pairs} | {late} | {early} |"
