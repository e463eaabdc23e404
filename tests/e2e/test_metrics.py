"""What Prometheus gets of a real agent."""

from __future__ import annotations

import subprocess
import urllib.request

import pytest

from hack.sim.stage import Stage, settled
from tests.daemonset.promtool import PROMTOOL, documented

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
ALLOWED = 'use base unit "seconds" instead of "milliseconds"'


def scrape(stage: Stage, accept: str = "") -> str:
    asked = urllib.request.Request(f"http://127.0.0.1:{stage.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return str(answer.read().decode())


def test_a_scrape_is_sound_and_tells_what_a_pod_has(stage: Stage) -> None:
    stage.play()
    stage.run_pod("a", {"rdma/vf": 1, "nvidia.com/gpu": 1})

    def missing() -> list[str]:
        held = [line for line in scrape(stage).splitlines() if line.startswith("nodefabric_allocation_info{")]
        return [] if sum('pod="a"' in line for line in held) == 2 else held or ["nothing is held"]

    assert settled(missing) == []
    text = scrape(stage)
    assert 'nodefabric_cni_duration_milliseconds_count{command="ADD",outcome="ok"} 1.0' in text
    for resource in ("rdma/vf", "nvidia.com/gpu"):
        labels = f'operation="Allocate",outcome="ok",resource="{resource}"'
        assert f"nodefabric_rpc_duration_milliseconds_count{{{labels}}} 1.0" in text
    assert 'nodefabric_adapter_offered{device="' in text
    names = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines() if line.startswith("nodefabric_")}
    assert names - documented() == set()
    assert scrape(stage, OPENMETRICS).endswith("# EOF\n")
    if not PROMTOOL.exists():
        pytest.skip("no promtool: hack/fetch-promtool fetches it")
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    complaints = [line for line in (done.stdout + done.stderr).splitlines() if not line.endswith(ALLOWED)]
    assert complaints == []
