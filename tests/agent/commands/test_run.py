"""The agent's end by an error of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HANGS = """
import asyncio, logging, time
from agent.commands.run import run_bounded
from agent.errors import AgentError
logging.basicConfig(format="%(message)s")
async def work():
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)  # as in a driver that never answers
    await asyncio.sleep(0.1)
    raise {error}("0000:3b:00.2")
run_bounded(work())
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("AgentError", []),
        ("ValueError", ["the agent ends by an error that nobody expected", "ValueError: 0000:3b:00.2"]),
    ],
)
def test_a_thread_that_hangs_holds_up_no_end_and_an_error_that_nobody_expected_is_said(
    error: str, said: list[str]
) -> None:
    script = [sys.executable, "-c", HANGS.format(error=error)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert [each for each in said if each not in done.stderr] == []


FORKS = """
import asyncio, os
from agent.commands.run import settle_grpc
settle_grpc(os.environ)
import grpc.aio

def threads():
    return set(os.listdir("/proc/self/task"))

async def work():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    before = threads()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    print(len(before), len(before - threads()))
    await server.stop(None)

asyncio.run(work())
"""


def test_a_fork_takes_no_thread_from_grpc() -> None:
    """It would need new ones then, and abort the agent on a node that has run out of threads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    threads, ended = map(int, done.stdout.split())
    assert threads > 1
    assert ended == 0
