"""What an agent is killed in the midst of: each scenario prepares a node, and says what happens then.

`prepare` runs with an agent that lives; what `act` does next is what meets the fault point. The pods
in `alive` are to end when all is over; until then each promise that they got must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agent.model.unit_id import slot_id
from tests.soak.calls import Call, Pod
from tests.soak.configured import LATE, OF_CLAIMED, OF_GRANTED, OF_LATE, SPECS
from tests.soak.kubelet import Cluster
from tests.soak.node import Node

MAC = "02:00:00:00:00:77"


@dataclass
class Play:
    """A scenario under way."""

    node: Node
    pods: list[tuple[Pod, Mapping[str, Any]]] = field(default_factory=list)
    """Pods that may have something, with their configuration. All get a DEL in the end."""
    call: Call | None = None
    """The relay that waits for the agent."""
    adding: tuple[Pod, Mapping[str, Any]] | None = None
    """Whose ADD that is."""
    claims: dict[str, Pod] = field(default_factory=dict)
    """Claims that kubelet may have had prepared, and their pods. All are unprepared in the end."""


@dataclass(frozen=True)
class Scenario:
    name: str
    prepare: Callable[[Play], object]
    act: Callable[[Play], Call | None] | None
    """None: the points are those of an agent's start."""


def everything(node: Node, device: int = 0) -> dict[str, Any]:
    """Ask for all that can be asked for."""
    return {**plain(node, device), **SETTINGS, "ipam": node.ipam()}


def plain(node: Node, device: int = 0) -> dict[str, Any]:
    """Ask for a VF as it is."""
    return {"deviceID": node.devices[device]}


SETTINGS: Mapping[str, Any] = {
    "vlan": 100,
    "vlanQoS": 3,
    "mac": MAC,
    "mtu": 1400,
    "trust": "on",
    "spoofchk": "off",
    "max_tx_rate": 200,
}
CHAINED: Mapping[str, Any] = {"prevResult": {"cniVersion": "1.1.0", "interfaces": [{"name": "eth0"}]}}
BY_CLAIM: Mapping[str, Any] = {**CHAINED, **OF_CLAIMED}
"""What a pod with claims is set up with comes from the claims; it says here what is promised."""


def _add(play: Play, conf: Mapping[str, Any]) -> Call:
    pod = play.node.make_pod()
    play.pods.append((pod, conf))
    play.adding = (pod, conf)
    return play.node.call("ADD", pod, conf)


def _then(*steps: Callable[[Play], object]) -> Callable[[Play], object]:
    """Take steps one after the other."""
    return lambda play: [step(play) for step in steps]


def _reboot(play: Play) -> None:
    """No process, no namespace and no setting is left then; the leases are, and kubelet has claims prepared again."""
    play.node.reboot()


def _reconcile(play: Play) -> None:
    play.node.running().order("reconcile")


def _prepare_last(play: Play) -> None:
    play.node.claims.prepare(play.node.running(), list(play.claims)[-1])


def _end_first(play: Play) -> None:
    play.node.end_pod(play.pods[0][0])


def _attach(play: Play, conf: Mapping[str, Any] | None = None) -> Pod:
    conf = conf or everything(play.node)
    play.node.running()
    pod = play.node.make_pod()
    play.pods.append((pod, conf))
    answer = play.node.add(pod, conf)
    assert answer.succeeded, answer
    return pod


def _grant_two(play: Play) -> None:
    pod = play.node.make_pod()
    play.node.running().order("grant", devices=play.node.devices[:2])
    play.node.tell_granted({pod.name: play.node.devices[:2]})
    play.pods.append((pod, {**CHAINED, **OF_GRANTED}))


def _add_granted(play: Play) -> Call:
    play.adding = play.pods[0]
    return play.node.call("ADD", *play.adding)


def _give(play: Play) -> Pod:
    """Have kubelet give a pod the first VF, whose grant was answered."""
    pod = play.node.make_pod()
    play.node.tell_granted({pod.name: play.node.devices[:1]})
    play.pods.append((pod, CHAINED))
    play.adding = play.pods[-1]
    return pod


def _granted_to_somebody(play: Play) -> None:
    """A node that knows of all pods what they have, and then a grant."""
    play.node.reconcile()
    play.node.running().order("grant", devices=play.node.devices[:1])
    _give(play)


def _learn_and_add(play: Play) -> Call:
    """The pod starts whatever becomes of the agent: its grant was answered."""
    assert play.adding is not None
    play.node.running().order("reconcile")
    return play.node.call("ADD", *play.adding)


def _had_by_another(play: Play) -> None:
    """A VF that is known to be a pod's which has ended."""
    _granted_to_somebody(play)
    play.node.reconcile()
    (pod, conf) = play.pods.pop()
    assert play.node.add(pod, conf).succeeded
    play.node.delete(pod, conf)
    play.node.until(lambda: not play.node.look().rows)
    play.node.end_pod(pod)
    play.adding = None


def _grant_and_add(play: Play) -> Call | None:
    """kubelet starts a pod once its grant was answered, and else rejects it."""
    agent = play.node.running()
    agent.order("grant", devices=play.node.devices[:1])
    if not agent.lives:
        return None
    _give(play)
    assert play.adding is not None
    return play.node.call("ADD", *play.adding)


def _grant_slots(play: Play) -> None:
    """Give a pod two slots."""
    pod = play.node.make_pod()
    number = len(play.pods) * 2
    mine = [slot_id(LATE.name, -1, number + n) for n in range(2)]
    play.node.running().order("grant slots", slots=mine)
    cluster = Cluster.read(play.node.folder)
    replace(cluster, slots={**cluster.slots, pod.name: mine}).write(play.node.folder)
    play.pods.append((pod, {**CHAINED, **OF_LATE}))


def _slots_attached(play: Play) -> None:
    _grant_slots(play)
    answer = play.node.add(*play.pods[-1])
    assert answer.succeeded, answer


def _slots_left_behind(play: Play) -> None:
    """A pod that lives and whose specs are gone, and stray files of two others."""
    _slots_attached(play)
    play.node.lose_specs()
    folder = play.node.folder / SPECS
    (folder / "nodefabric-slot-late:vf-any-7.json").write_text("{}")
    (folder / ".nodefabric-slot-late:vf-any-8.json.1").write_text("{")


def allocate(play: Play, early: int = 1, late: int = 1) -> str:
    """Give a new pod VFs by a claim, of which some are chosen on the node."""
    pod = play.node.make_pod()
    play.pods.append((pod, BY_CLAIM))
    uid = play.node.claims.allocate(pod, play.node.devices[:early], late)
    play.claims[uid] = pod
    return uid


def _prepared(play: Play) -> None:
    uid = allocate(play)
    assert play.node.claims.prepare(play.node.running(), uid)


def _attached_by_claim(play: Play) -> None:
    _prepared(play)
    answer = play.node.add(*play.pods[-1])
    assert answer.succeeded, answer


def _detached_by_claim(play: Play) -> None:
    _attached_by_claim(play)
    play.node.delete(*play.pods[-1])


def _ended_without_del(play: Play) -> None:
    _attached_by_claim(play)
    play.node.end_pod(play.pods[-1][0])


def _handed_out_again(play: Play) -> None:
    """A pod that was deleted by force, whose devices the scheduler gives to another one while nobody has ended it."""
    _ended_without_del(play)
    play.node.claims.delete(next(iter(play.claims)))
    allocate(play)


def _orphan(play: Play) -> None:
    """A prepared claim that nobody knows any more but the books."""
    _detached_by_claim(play)
    play.node.until(lambda: not play.node.look().rows)
    play.node.claims.delete(next(iter(play.claims)))
    play.node.claims.unlist(play.pods[-1][0])


def _claims_left_behind(play: Play) -> None:
    """A pod that lives and whose claim's specs are gone, one half prepared, and a stray spec."""
    _attached_by_claim(play)
    allocate(play, early=0)
    play.node.lose_specs()
    folder = play.node.folder / SPECS
    (folder / "nodefabric-claim-99999999.json").write_text("{}")
    (folder / ".nodefabric-claim-99999998.json.1").write_text("{")


def _reboot_with_claims(play: Play) -> None:
    """Two pods with claims, and then their devices are at other addresses."""
    _attached_by_claim(play)
    play.node.claims.prepare(play.node.running(), allocate(play, early=0))
    play.node.reboot(renumbers=True)


def _unprepare_first(play: Play) -> None:
    """kubelet asks until the devices are back."""
    agent = play.node.running()
    while play.node.claims.unprepare(agent, next(iter(play.claims))) is False:
        pass


def _add_plain(play: Play) -> Call:
    return _add(play, plain(play.node))


def _add_everything(play: Play) -> Call:
    return _add(play, everything(play.node))


def _delete_first_without_namespace(play: Play) -> Call:
    return play.node.begin_delete(*play.pods[0], netns=False)


def _delete_first(play: Play) -> Call:
    return play.node.begin_delete(*play.pods[0])


def _three_attached(play: Play) -> None:
    for index in range(2):
        _attach(play, {**everything(play.node, index), "mac": f"02:00:00:00:00:7{index}"})
    _attach(play, plain(play.node, 2))


def _collect(play: Play) -> Call:
    return play.node.collect([(play.pods[0][0].container_id, "net1")])


def _left_behind(play: Play) -> None:
    """A half ADD, a pod that ended without DEL, and a DEL that waits in the spool."""
    node = play.node
    _attach(play)
    _attach(play, {**everything(node, 1), "mac": "02:00:00:00:00:78"})
    half = node.make_pod()
    conf = {**everything(node, 2), "mac": "02:00:00:00:00:79"}
    play.pods.append((half, conf))
    hangs = node.folder / "ipam-hangs"
    hangs.touch()
    call = node.call("ADD", half, conf)
    node.until(lambda: (node.folder / "ipam-calls").read_text().count(half.container_id) > 0)
    node.kill_agent()
    call.process.kill()
    call.finish()
    hangs.unlink()
    node.end_orphans()
    node.end_pod(play.pods[0][0])
    node.delete(*play.pods[1])


def _owed(play: Play) -> None:
    """One lease is owed, and a pod has ended."""
    node = play.node
    _attach(play)
    fails = node.folder / "ipam-fails-DEL"
    fails.touch()
    node.delete(*play.pods[0])
    node.until(lambda: bool(node.look().owed))
    fails.unlink()
    node.end_pod(_attach(play, {**everything(node, 1), "mac": "02:00:00:00:00:78"}))


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("first start", lambda play: None, None),
    Scenario("ADD", lambda play: None, _add_plain),
    Scenario("ADD with settings and addresses", lambda play: None, _add_everything),
    Scenario("ADD of two granted VFs", _grant_two, _add_granted),
    Scenario("grant of a VF that another pod had, then ADD", _had_by_another, _grant_and_add),
    Scenario("reconcile that learns whose a VF is, then ADD", _granted_to_somebody, _learn_and_add),
    Scenario("ADD of two slots", _grant_slots, _add_granted),
    Scenario("DEL of two slots", _slots_attached, _delete_first),
    Scenario("start with slots whose specs are gone", _slots_left_behind, None),
    Scenario("Prepare of a claim", allocate, _prepare_last),
    Scenario("Prepare once more", _prepared, _prepare_last),
    Scenario("Prepare after a reboot", _then(_prepared, _reboot), _prepare_last),
    Scenario("Prepare of what another claim had", _handed_out_again, _prepare_last),
    Scenario("ADD by claim", _prepared, _add_granted),
    Scenario("DEL by claim", _attached_by_claim, _delete_first),
    Scenario("Unprepare of a claim", _detached_by_claim, _unprepare_first),
    Scenario("Unprepare for a pod that ended without DEL", _ended_without_del, _unprepare_first),
    Scenario("reconcile that ends a claim of nobody", _orphan, _reconcile),
    Scenario("start with claims whose specs are gone", _claims_left_behind, None),
    Scenario("start after a reboot that moves the devices of claims", _reboot_with_claims, None),
    Scenario("start after the books were lost", _then(_prepared, lambda play: play.node.lose_books()), None),
    Scenario("ADD whose addresses fail", lambda play: (play.node.folder / "ipam-fails-ADD").touch(), _add_everything),
    Scenario("ADD after an owner that ended", _then(_attach, _end_first), _add_plain),
    Scenario("DEL", _attach, _delete_first),
    Scenario("DEL without a namespace", _then(_attach, _end_first), _delete_first_without_namespace),
    Scenario("GC", _three_attached, _collect),
    Scenario("start after a crash", _left_behind, None),
    Scenario("start after a reboot", _then(_three_attached, _reboot), None),
    Scenario("reconcile", _owed, _reconcile),
)
