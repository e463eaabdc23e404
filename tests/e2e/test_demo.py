"""The whole demo, as `make demo` plays it."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.e2e.conftest import RELAY


def test_the_demo_shows_pods_by_plugins_and_by_claim_and_leaves_nothing_behind(own_network: None) -> None:
    command = [sys.executable, "-m", "hack.sim.demo", "--inside", "--relay", str(RELAY)]
    played = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert played.returncode == 0, played.stdout + played.stderr
    rows = re.findall(r"^(trainer-\d) .* ([A-Z]+) +(?:hca-.*|net1 *)$", played.stdout, re.MULTILINE)
    assert rows == [(f"trainer-{n}", "PIX") for n in range(4)]
    by_claim = played.stdout.partition("Now by claim (DRA)")[2]
    assert len(re.findall(r"^    slots-rdma-vf-\S+: 8 VFs$", by_claim, re.MULTILINE)) == 8
    assert "    interfaceName: net1\n" in by_claim
    assert played.stdout.count("no attachment is left") == 2
    assert "WRONG" not in played.stdout
