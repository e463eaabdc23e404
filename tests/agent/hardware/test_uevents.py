"""Real kernel events about real links, in a network namespace of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.hardware.uevents import Uevents

WATCHER = """
import json, subprocess, sys, threading
from agent.hardware.uevents import Uevents

wanted = set(json.loads(sys.argv[2]))
seen, all_seen = set(), threading.Event()

def note(what):
    seen.add(what)
    if wanted <= seen:
        all_seen.set()

watch = Uevents(note, virtual_links=json.loads(sys.argv[1]))
for command in sys.argv[3:]:
    subprocess.run(command.split(), check=True)
if wanted:
    all_seen.wait(20)
else:
    all_seen.wait(0.3)
watch.close()
left = [t.name for t in threading.enumerate() if t.name == "uevents"]
print(json.dumps({"seen": sorted(seen), "threads": left}))
"""


@pytest.fixture(scope="session")
def unshare() -> list[str]:
    """Give the command that starts another in a network namespace of its own."""
    for command in (["unshare", "-n"], ["unshare", "-Urn"]):
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    if os.environ.get("CI") == "true":
        pytest.fail("this machine lets nobody make network namespaces")
    pytest.skip("network namespaces cannot be made here: needs root or user namespaces")


def watched(unshare: list[str], virtual_links: bool, wanted: list[str], *commands: str) -> list[str]:
    run = subprocess.run(
        [*unshare, sys.executable, "-c", WATCHER, json.dumps(virtual_links), json.dumps(wanted), *commands],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["threads"] == []
    seen: list[str] = answer["seen"]
    return seen


def test_links_that_come_change_and_go_are_seen(unshare: list[str]) -> None:
    wanted = ["net add nf0", "link nf0 changed", "net remove nf0", "link nf0 gone"]
    commands = ("ip link add nf0 type veth peer name nf1", "ip link set nf0 up", "ip link del nf0")
    assert set(wanted) <= set(watched(unshare, True, wanted, *commands))


def test_links_without_hardware_are_passed_over(unshare: list[str]) -> None:
    commands = ("ip link add nf0 type veth peer name nf1", "ip link set nf0 up", "ip link del nf0")
    seen = watched(unshare, False, [], *commands)
    assert [what for what in seen if "nf0" in what or "nf1" in what] == []


def test_closing_ends_the_thread_at_once_and_may_be_repeated() -> None:
    before = threading.active_count()
    watch = Uevents(lambda what: None)
    assert threading.active_count() == before + 1
    watch.close()
    watch.close()
    assert threading.active_count() == before
