"""The page of a real agent, while kubelet starts and stops a pod on its simulated node."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from hack.sim.stage import Stage
from tests.browser.chromium import opened, started
from tests.browser.conftest import find_browser
from tests.e2e.conftest import RELAY


def test_the_page_follows_a_pod_on_a_real_agent(own_network: None, short_folder: Path) -> None:
    program = find_browser()
    with closing(Stage(short_folder, RELAY)) as stage:
        stage.play()
        # A browser of its own: it must be in this test's network namespace.
        with started(program) as browser, opened(browser, f"http://127.0.0.1:{stage.port}/") as page:
            page.until("document.querySelectorAll('.cell[data-state=free]').length === 64")
            stage.run_pod("trainer-0", {"rdma/hca": 1, "rdma/vf": 1, "nvidia.com/gpu": 1})
            page.until("document.querySelectorAll('.cell[data-state=attached]').length === 1")
            held = "[...document.querySelectorAll('#held tbody tr')].filter(r => r.textContent.includes('trainer-0'))"
            page.until(f"{held}.length === 3")
            page.until("document.querySelector('#events').textContent.includes('is net1 of default/trainer-0')")
            stage.end_pods("trainer-0")
            page.until("document.querySelectorAll('.cell[data-state=attached]').length === 0")
            assert page.complaints == []
