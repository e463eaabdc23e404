from __future__ import annotations

import asyncio

from agent.cluster.apiserver import ApiServer
from agent.cluster.node_events import NodeEvents, Saying, Times, of_health
from agent.config.files import WAITS
from agent.model.health import HEALTHY, Health, Reason, unhealthy
from agent.offer.offer import Offer, Unit, Units, health_changes
from agent.process.backoff import Backoff
from agent.process.conditions import Conditions
from agent.state import Latest
from hack.sim.cluster.apiserver import ApiServerStandIn, Fault
from tests.awaiting import until

DEADLINE = 30.0
QUICK = Times(look=0.01, retry=Backoff(0.05, 0.05))


def offered(unit_id: str, health: Health = HEALTHY, device: str = "") -> Unit:
    return Unit(unit_id, "rdma/vf", "vf", device, health, 0)


def offer(*healths: Health) -> Units:
    return {"rdma/vf": [offered(f"0000:3b:00.{n}", health) for n, health in enumerate(healths)]}


LINK, QUARANTINED = unhealthy(Reason.LINK_DOWN), unhealthy(Reason.QUARANTINED)


def changes(before: Units, after: Units) -> list[Saying]:
    return [of_health(change) for change in health_changes(before, after)]


def test_one_sentence_tells_of_all_units_that_share_a_reason() -> None:
    told = changes(offer(*[HEALTHY] * 6), offer(*[LINK] * 5, QUARANTINED))
    assert told == [
        Saying(
            "LinkDown",
            "5 units of rdma/vf are unhealthy: its link, or that of its PF, has no carrier:"
            " 0000:3b:00.0, 0000:3b:00.1, 0000:3b:00.2 and 2 more",
            True,
        ),
        Saying(
            "Quarantined",
            f"1 unit of rdma/vf is unhealthy: {Reason.QUARANTINED.text}: 0000:3b:00.5",
            True,
        ),
    ]


def test_recovery_names_what_is_over_and_shares_of_one_hca_are_named_once() -> None:
    (told,) = changes(offer(LINK), offer(HEALTHY))
    assert told == Saying("DeviceHealthy", "1 unit of rdma/vf is healthy again, after LinkDown: 0000:3b:00.0", False)
    (told,) = changes({}, {"rdma/hca": [offered(f"hca-1-{n}", LINK, device="0000:3b:00.0") for n in range(63)]})
    assert told.message.startswith("63 units of rdma/hca are unhealthy")
    assert told.message.endswith(": 0000:3b:00.0")


class Node:
    def __init__(self, api: ApiServer, units: Units | None = None, times: Times = QUICK) -> None:
        self.offer = Latest(Offer())
        self.conditions = Conditions()
        self.have(units or offer(HEALTHY))
        self.events = NodeEvents(api, "worker-1", self.offer, self.conditions, times)

    def have(self, units: Units) -> None:
        self.offer.set(Offer(units={name: tuple(found) for name, found in units.items()}))

    async def __aenter__(self) -> Node:
        self.task = asyncio.create_task(self.events.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_faults_and_their_ends_become_events_of_the_node(server: ApiServerStandIn, api: ApiServer) -> None:
    posted = server.state.created
    async with Node(api) as node:
        await asyncio.sleep(0.05)
        node.have(offer(LINK))
        await until(lambda: len(posted) == 1)
        node.have(offer(HEALTHY))
        await until(lambda: len(posted) == 2)
        node.conditions.set("config", "resources[0]: selects nothing")
        await until(lambda: len(posted) == 3)
        node.conditions.set("config", f"{WAITS} endpoints")
        await until(lambda: len(posted) == 4)
        node.conditions.set("config", None)
        await until(lambda: len(posted) == 5)
    assert [(e["type"], e["reason"]) for e in posted] == [
        ("Warning", "LinkDown"),
        ("Normal", "DeviceHealthy"),
        ("Warning", "ConfigRefused"),
        ("Warning", "ConfigWaits"),
        ("Normal", "ConfigTaken"),
    ]
    about = {"apiVersion": "v1", "kind": "Node", "name": "worker-1", "uid": "worker-1"}
    assert posted[0]["involvedObject"] == about
    assert "resources[0]" in posted[2]["message"]
    assert len({e["metadata"]["name"] for e in posted}) == 5


async def test_what_could_not_be_sent_is_sent_later_and_counted(server: ApiServerStandIn, api: ApiServer) -> None:
    posted = server.state.created
    server.state.set_fault(Fault(status=503, times=1_000_000))
    node = Node(api)
    for before, after in ((HEALTHY, LINK), (LINK, HEALTHY)) * 2:
        for saying in changes(offer(before), offer(after)):
            node.events.note(saying)
    async with node:
        await until(lambda: server.state.counts.failures >= 2)
        assert posted == []
        server.state.set_fault(None)
        await until(lambda: len(posted) == 2)
    assert [(e["reason"], e["count"]) for e in posted] == [("LinkDown", 2), ("DeviceHealthy", 2)]


async def test_a_flood_is_held_back(server: ApiServerStandIn, api: ApiServer) -> None:
    node = Node(api, times=Times(look=0.01, refill=3600, burst=3))
    for number in range(200):
        node.events.note(Saying("LinkDown", f"number {number}", True))
    async with node:
        await until(lambda: len(server.state.created) == 3)
        await asyncio.sleep(0.1)
    assert [e["message"] for e in server.state.created] == ["number 150", "number 151", "number 152"]


async def test_an_api_server_that_refuses_events_does_not_hold_up_the_others(
    server: ApiServerStandIn, api: ApiServer
) -> None:
    node = Node(api)
    server.state.set_fault(Fault(status=403, times=1))
    node.events.note(Saying("LinkDown", "first", True))
    node.events.note(Saying("LinkDown", "x" * 5000, True))
    async with node:
        await until(lambda: len(server.state.created) == 1)
    assert len(server.state.created[0]["message"]) == 1024
