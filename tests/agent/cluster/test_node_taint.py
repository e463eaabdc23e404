"""The taint of the own Node, at a stand-in for the API server over real HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from agent.cluster.apiserver import ApiServer
from agent.cluster.node_taint import DAEMON_SET, KEY, NodeTaint, Times
from agent.config import Restart
from agent.errors import ConfigError
from agent.process.backoff import Backoff
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault
from tests.awaiting import until

NODE = "n"
MINE = {"key": KEY, "effect": "NoSchedule"}
OTHER = {"key": "example.com/maintenance", "effect": "PreferNoSchedule", "value": "disk"}
QUICK = Times(put=1.0, longest=0.2, retry=Backoff(0.05, 0.05), refused=Backoff(0.05, 0.05))
ON = Restart(taint=True, wait_seconds=0.1)


def taints(server: ApiServerStandIn) -> list[dict[str, Any]]:
    node = server.state.get("Node", NODE)
    assert node is not None
    return list(node["spec"].get("taints", []))


def set_taints(server: ApiServerStandIn, *found: dict[str, str]) -> None:
    node = server.state.get("Node", NODE)
    assert node is not None
    server.state.write("Node", NODE, {**node, "spec": {"taints": list(found), "podCIDR": "10.0.0.0/24"}}, "kubectl")


def registered(taint: NodeTaint, settings: Restart = ON) -> NodeTaint:
    taint.settings = settings
    taint.registered.set()
    return taint


@pytest.mark.parametrize("others", [(OTHER,), ()])
async def test_the_taint_comes_before_the_end_and_goes_when_kubelet_has_the_lists(
    server: ApiServerStandIn, open_api: Callable[[], ApiServer], others: tuple[dict[str, str], ...]
) -> None:
    set_taints(server, *others)
    await registered(NodeTaint(open_api, NODE)).leave()
    assert taints(server) == [*others, MINE]
    following = NodeTaint(open_api, NODE)
    lifting = asyncio.create_task(following.lift())
    await asyncio.sleep(0.1)
    assert taints(server) == [*others, MINE]
    following.registered.set()
    await lifting
    node = server.state.get("Node", NODE)
    assert node is not None
    assert node["spec"] == {"podCIDR": "10.0.0.0/24"} | ({"taints": [OTHER]} if others else {})


@pytest.mark.parametrize("settings", [Restart(), ON])
async def test_who_does_not_want_it_or_was_not_registered_ends_at_once(
    server: ApiServerStandIn, open_api: Callable[[], ApiServer], settings: Restart
) -> None:
    taint = NodeTaint(open_api, NODE)
    taint.settings = settings
    if not settings.taint:
        taint.registered.set()
    assert taint.leave_seconds == 0
    await taint.leave()
    assert taints(server) == []
    assert server.state.counts.merges == 0


def at_the_patch(server: ApiServerStandIn, do: Callable[[], object]) -> None:
    """Do something once an agent has read the Node and before what it writes arrives."""
    requests = count(1)
    server.state.before = lambda: do() if next(requests) == 2 else None


async def test_a_taint_that_somebody_else_puts_meanwhile_is_not_lost(
    server: ApiServerStandIn, open_api: Callable[[], ApiServer]
) -> None:
    """The list of taints is replaced as a whole: only the version of the object tells that it is another by now."""
    at_the_patch(server, lambda: set_taints(server, OTHER))
    await registered(NodeTaint(open_api, NODE)).leave()
    assert taints(server) == [OTHER, MINE]
    assert server.state.counts.conflicts == 1


@pytest.mark.parametrize("fault", [Fault(delay_seconds=30), Fault(drop=True), Fault(status=403), Fault(status=500)])
async def test_an_api_server_that_is_away_holds_up_the_end_for_a_bounded_time(
    server: ApiServerStandIn,
    open_api: Callable[[], ApiServer],
    fault: Fault,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.state.set_fault(fault)
    await registered(NodeTaint(open_api, NODE, times=QUICK), Restart(taint=True, wait_seconds=30)).leave()
    assert "the Node gets no taint: " in caplog.text
    assert taints(server) == []


async def test_where_there_is_no_account_the_agent_ends_and_starts_anyway(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> ApiServer:
        raise ConfigError("API server", ["no account"])

    await registered(NodeTaint(refuse, NODE)).leave()
    await registered(NodeTaint(refuse, NODE)).lift()
    assert "the Node gets no taint: " in caplog.text


@pytest.mark.parametrize(("status", "said"), [(503, 0), (403, 1)])
async def test_an_api_server_that_is_away_or_refuses_at_the_start_is_asked_again(
    server: ApiServerStandIn,
    open_api: Callable[[], ApiServer],
    status: int,
    said: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that starts refuses what it will allow a moment later."""
    set_taints(server, MINE, OTHER)
    server.state.set_fault(Fault(status=status))
    lifting = asyncio.create_task(registered(NodeTaint(open_api, NODE, times=QUICK)).lift())
    await until(lambda: server.state.counts.failures >= 3)
    server.state.set_fault(None)
    await lifting
    assert taints(server) == [OTHER]
    assert caplog.text.count("stays on the Node") == said


async def test_a_node_whose_agent_cannot_register_gets_its_pods_back(
    server: ApiServerStandIn, open_api: Callable[[], ApiServer]
) -> None:
    """With a wrong configuration, say: pods that need nothing of ours must not wait for its repair.

    Or while another agent has the books: it puts the taint at its end, and then it is this one's turn.
    """
    set_taints(server, MINE)

    taint = NodeTaint(open_api, NODE, times=QUICK)
    lifting = asyncio.create_task(taint.lift())
    await until(lambda: not taints(server))
    set_taints(server, MINE)
    taint.registered.set()
    await lifting
    assert taints(server) == []


def daemon_set(*names: str, **more: Any) -> dict[str, Any]:
    """One whose agent has these variables."""
    containers = [{"name": "probe"}, {"name": "agent", "env": [{"name": name} for name in names]}]
    return {"metadata": {}, "spec": {"template": {"spec": {"containers": containers, **more}}}}


LEAVES = daemon_set(DAEMON_SET) | {"metadata": {"deletionTimestamp": "2026-11-22T00:00:00Z"}}


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (daemon_set("NODE_NAME", DAEMON_SET), None),
        (daemon_set(DAEMON_SET, nodeSelector={"kubernetes.io/hostname": "n"}), None),
        (None, "is removed"),
        (LEAVES, "is being removed"),
        (daemon_set("NODE_NAME"), "starts agents that take no taint away any more"),
        (daemon_set(DAEMON_SET, nodeSelector={"kubernetes.io/hostname": "n", "pool": "gpu"}), "by its nodeSelector"),
    ],
)
async def test_an_agent_leaves_no_taint_that_nobody_would_take_away(
    server: ApiServerStandIn,
    open_api: Callable[[], ApiServer],
    found: dict[str, Any] | None,
    why: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The DaemonSet is removed, the option switched off, or the Node's label gone."""
    caplog.set_level("INFO")
    if found is not None:
        server.state.write("DaemonSet", "nodefabric/agent", found, "kubectl")
    await registered(NodeTaint(open_api, NODE, "nodefabric/agent")).leave()
    assert taints(server) == ([MINE] if why is None else [])
    assert f"{why}" in caplog.text or why is None


async def test_what_is_put_for_the_end_is_not_taken_away_by_a_start_that_is_not_over(
    server: ApiServerStandIn, open_api: Callable[[], ApiServer]
) -> None:
    """The agent is asked to end while it still takes an older taint away."""
    set_taints(server, MINE)
    halted, goes_on = threading.Event(), threading.Event()

    def halt() -> None:
        halted.set()
        assert goes_on.wait(30)

    at_the_patch(server, halt)
    taint = registered(NodeTaint(open_api, NODE))
    lifting = asyncio.create_task(taint.lift())
    await until(halted.is_set)
    leaving = asyncio.create_task(taint.leave())
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.gather(lifting, leaving)
    assert taints(server) == [MINE]
