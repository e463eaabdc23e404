"""How long a scrape of a real agent takes on the node with 1,024 VFs, and what that agent weighs.

The modelled node has no kernel behind its VFs that would count, so each VF gets the eight files that a driver makes:
to read these takes longer than the other way, rtnetlink.
"""

from __future__ import annotations

import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from agent.hardware.sysfs import scan as sysfs
from agent.model.counters import VF_KINDS
from measure.agent_process import running_agent
from measure.figures import Figures
from measure.footprint import resident_mib
from measure.former import Version


def measure(relay: Path, scrapes: int, say: Callable[[str], None]) -> Figures:
    """Scrape an agent that publishes its topology so many times, one after the other."""
    with running_agent(Version(relay), publish=True, say=say) as stage:
        vfs = _let_vfs_count(stage.folder / "node/root")
        url = f"http://127.0.0.1:{stage.port}/metrics"
        taken = [_scrape(url) for _ in range(scrapes)]
        if (told := taken[-1][1].count(b"nodefabric_vf_receive_bytes_total{")) != vfs:
            raise RuntimeError(f"the scrape tells of {told} VFs, not of {vfs}")
        milliseconds = [each for each, _ in taken]
        return {
            "scrape_1024_vf_ms": statistics.median(milliseconds),
            "scrape_1024_vf_max_ms": max(milliseconds),
            "scrape_1024_vf_kib": len(taken[-1][1]) / 1024,
            "agent_process_rss_mib": resident_mib(stage.processes["agent"].pid),
        }


def _let_vfs_count(root: Path) -> int:
    """Give each VF of a node files of its own, and return how many VFs there are."""
    snapshot = sysfs.scan(root)
    count = 0
    for vf in snapshot.devices:
        pf = snapshot.parent(vf)
        if pf is not None and pf.netdev is not None:
            folder = root / f"sys/class/net/{pf.netdev.name}/device/sriov/{vf.vf_index}/stats"
            folder.mkdir(parents=True)
            for field in VF_KINDS:
                (folder / field).write_text("123456789012\n")
            count += 1
    return count


def _scrape(url: str) -> tuple[float, bytes]:
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=30) as answer:
        page: bytes = answer.read()
    return (time.perf_counter() - began) * 1000, page
