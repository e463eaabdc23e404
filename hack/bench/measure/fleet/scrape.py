"""How long a scrape of a real agent takes on the node with 1,024 VFs, and what that agent weighs."""

from __future__ import annotations

import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from measure.agent_process import running_agent
from measure.figures import Figures
from measure.footprint import resident_mib


def measure(relay: Path, scrapes: int, say: Callable[[str], None]) -> Figures:
    """Scrape an agent that publishes its topology so many times, one after the other."""
    with running_agent(relay, publish=True, say=say) as stage:
        url = f"http://127.0.0.1:{stage.port}/metrics"
        taken = [_scrape(url) for _ in range(scrapes)]
        milliseconds = [each for each, _ in taken]
        return {
            "scrape_1024_vf_ms": statistics.median(milliseconds),
            "scrape_1024_vf_max_ms": max(milliseconds),
            "scrape_1024_vf_kib": taken[-1][1] / 1024,
            "agent_process_rss_mib": resident_mib(stage.processes["agent"].pid),
        }


def _scrape(url: str) -> tuple[float, int]:
    began = time.perf_counter()
    with urllib.request.urlopen(url, timeout=30) as answer:
        size = len(answer.read())
    return (time.perf_counter() - began) * 1000, size
