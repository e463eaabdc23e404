"""The checker finds what is planted, and says what it found and what happened before."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.calls import Pod
from tests.soak.invariants import violations
from tests.soak.node import Node
from tests.soak.scenarios import everything, plain
from tests.soak.world import HOST, Expected, Hold, Lease, Promise, Row, Seen, Shape, World

VF, OTHER, NETNS = "0000:3b:00.2", "0000:3b:00.3", "/pods/c1.netns"
SHAPE = Shape("ens1f0v0", "02:00:00:00:01:00", 1500, False)
OTHER_SHAPE = replace(SHAPE, name="ens1f0v1", mac="02:00:00:00:01:01")
FREE = {"vlan": 0, "mac": "00:00:00:00:00:00"}
ROW = Row(VF, "c1", "net1", "net1", "attached", 77, "boot")
IN_POD = Shape("net1", "02:00:00:00:00:77", 1400, True)
PROMISE = Promise(VF, "c1", "net1", "net1", NETNS, "02:00:00:00:00:77", 1400, {"vlan": 100}, addresses=("10.9.0.2",))
LEASE = Lease("10.9.0.2", "c1", "net1")
WORLD = World(
    links={VF: (Seen(NETNS, IN_POD),), OTHER: (Seen(HOST, OTHER_SHAPE),)},
    settings={VF: {"vlan": 100, "mac": "02:00:00:00:00:77"}, OTHER: FREE},
    pods={NETNS: 77},
    rows=(ROW,),
    leases=(LEASE,),
)
EXPECTED = Expected(shapes={VF: SHAPE, OTHER: OTHER_SHAPE}, settings={VF: FREE, OTHER: FREE}, promises=(PROMISE,))


def found(world: World, expected: Expected = EXPECTED, *, settled: bool = True) -> list[str]:
    return [str(violation) for violation in violations(world, expected, settled=settled)]


def test_nothing_is_wrong_with_a_node_that_keeps_its_promises() -> None:
    assert found(WORLD) == []


CLAIM = Hold("claim", "uid-1", VF, "", "uid-1-0-vf", "prepared", frozenset({"pod-of-c1"}))
FILE, OTHERS = "nodefabric-claim-uid-1.vf.metadata", "nodefabric-claim-uid-2.vf.metadata"
TOLD = json.dumps({"metadata": {"uid": "uid-1"}, "requests": [{"name": "vf"}]})
EDITS = {"env": [f"PCIDEVICE_CLAIMED_VF={VF}"], "mounts": [{"hostPath": f"/var/run/cdi/{FILE}", "containerPath": "/x"}]}
SPEC = json.dumps({"devices": [{"name": "uid-1-0-vf", "containerEdits": EDITS}]})
BY_CLAIM = replace(
    WORLD,
    rows=(replace(ROW, claim_uid="uid-1"),),
    holds=(CLAIM,),
    specs={"uid-1": SPEC},
    files={FILE: TOLD},
)
PREPARED = replace(EXPECTED, prepared={"uid-1": ("uid-1-0-vf",)})


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (replace(BY_CLAIM, holds=(CLAIM, replace(CLAIM, key="uid-2"))), f"{VF}: is in claim uid-1, and claim uid-2"),
        (replace(BY_CLAIM, holds=(CLAIM, Hold("unit", "a/vf", VF))), f"{VF}: is in claim uid-1, and unit a/vf has it"),
        (replace(BY_CLAIM, holds=(CLAIM, Hold("slot", "slot-1", VF, "c2"))), f"{VF}: is in claim uid-1, and slot"),
        (replace(BY_CLAIM, holds=()), f"{VF}: is attached by claim uid-1, which is not in the books with it"),
        (replace(BY_CLAIM, holds=()), "uid-1: was told to be prepared, and is not in the books"),
        (replace(BY_CLAIM, holds=()), "uid-1: has a CDI spec, and is not in the books"),
        (replace(BY_CLAIM, holds=(replace(CLAIM, state="preparing"),)), "uid-1: was told to be prepared, and is prep"),
        (replace(BY_CLAIM, specs={}), "uid-1: was told to be prepared with ('uid-1-0-vf',), which no CDI spec"),
        (replace(BY_CLAIM, specs={"uid-1": SPEC.replace("0-vf", "1-vf")}), "uid-1: has the CDI devices ("),
        (replace(BY_CLAIM, specs={"uid-1": SPEC.replace(VF, OTHER)}), f"uid-1: has {VF}, and its CDI spec does"),
        (replace(BY_CLAIM, files={}), f"uid-1: was told to be prepared, and {FILE} tells its containers nothing"),
        (replace(BY_CLAIM, files={FILE: TOLD[:9]}), f"uid-1: was told to be prepared, and {FILE} tells its"),
        (
            replace(BY_CLAIM, files={FILE: TOLD.replace("uid-1", "uid-2")}),
            f"uid-1: was told to be prepared, and {FILE}",
        ),
        (replace(BY_CLAIM, files={FILE: TOLD, OTHERS: TOLD}), f"{OTHERS}: tells of a claim that is not in"),
        (
            replace(BY_CLAIM, rows=(ROW,), holds=(replace(CLAIM, pods=frozenset()),)),
            f"{VF}: is in claim uid-1, and att",
        ),
    ],
)
def test_a_broken_promise_about_a_claim_is_found(world: World, text: str) -> None:
    assert found(BY_CLAIM, PREPARED) == []
    assert any(line.startswith(text) for line in found(world, PREPARED)), found(world, PREPARED)


def test_a_claim_that_was_unprepared_and_is_there_all_the_same_is_found() -> None:
    ended = replace(EXPECTED, unprepared=frozenset({"uid-1"}))
    assert "uid-1: was told to be unprepared, and is prepared in the books" in found(BY_CLAIM, ended)
    assert f"uid-1: still has {VF} for its claim, and nobody has it" in found(BY_CLAIM, ended)


SLOT, OTHER_SLOT = "slot-late:vf-0-0", "slot-late:vf-0-1"
LATE = replace(WORLD, holds=(Hold("slot", SLOT, VF, "c1"),), specs={SLOT: f"PCIDEVICE_LATE_VF={VF}"})


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (replace(LATE, specs={SLOT: OTHER}), f"{SLOT}: stands for {VF} of container c1 net1, and its spec says"),
        (replace(LATE, holds=(Hold("slot", SLOT, OTHER, "c1"),)), f"{VF}: was promised to container c1 net1, whose"),
        (replace(LATE, specs={}), f"{SLOT}: has {VF}, and its CDI spec does not say so"),
        (replace(LATE, specs={**LATE.specs, OTHER_SLOT: ""}), f"{OTHER_SLOT}: has a spec, and nobody has it"),
        (replace(LATE, holds=(Hold("slot", OTHER_SLOT, OTHER, "c2"),)), f"{OTHER_SLOT}: still has {OTHER} for c2"),
    ],
)
def test_what_is_wrong_with_a_slot_is_found(world: World, text: str) -> None:
    assert found(LATE) == []
    assert any(line.startswith(text) for line in found(world)), found(world)


def test_a_pod_that_was_let_through_without_its_device_is_found() -> None:
    text = f"{VF}: was given to the pod of container c1, which has started without it"
    assert found(WORLD, replace(EXPECTED, left_out=((VF, "c1"),)), settled=False) == [text]


def with_link(device: str, *places: Seen) -> World:
    return replace(WORLD, links={**WORLD.links, device: places})


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (with_link(VF), f"{VF}: is lost"),
        (with_link(OTHER), f"{OTHER}: is lost"),
        (with_link(VF, Seen(NETNS, IN_POD), Seen(HOST, SHAPE)), f"{VF}: is in several places"),
        (with_link(VF, Seen(HOST, SHAPE)), f"{VF}: was taken from under container c1 net1"),
        (with_link(VF, Seen(NETNS, replace(IN_POD, name="eth9"))), f"{VF}: has name 'eth9'"),
        (with_link(VF, Seen(NETNS, replace(IN_POD, mac=SHAPE.mac))), f"{VF}: has mac '{SHAPE.mac}'"),
        (with_link(VF, Seen(NETNS, replace(IN_POD, mtu=1500))), f"{VF}: has mtu 1500"),
        (with_link(VF, Seen(NETNS, replace(IN_POD, up=False))), f"{VF}: is down"),
        (with_link(OTHER, Seen(NETNS, OTHER_SHAPE)), f"{OTHER}: is in {NETNS}, and nothing in the ledger"),
        (with_link(OTHER, Seen(HOST, replace(OTHER_SHAPE, name="net1"))), f"{OTHER}: came back as"),
        (replace(WORLD, settings={**WORLD.settings, OTHER: {**FREE, "vlan": 5}}), f"{OTHER}: has vlan 5 left behind"),
        (replace(WORLD, settings={**WORLD.settings, VF: FREE}), f"{VF}: has vlan 0 on its PF, and container c1"),
        (replace(WORLD, rows=(ROW, replace(ROW, container_id="c2"))), f"{VF}: has two owners in the ledger"),
        (replace(WORLD, rows=()), f"{VF}: was promised to container c1 net1 and is not in the ledger"),
        (replace(WORLD, rows=(replace(ROW, container_id="c2"),)), f"{VF}: was promised to container c1 net1 and"),
        (replace(WORLD, rows=(replace(ROW, netns_inode=5),)), f"{VF}: is in {NETNS}, and the ledger gives it"),
        (replace(WORLD, rows=(replace(ROW, state="detaching"),)), f"{VF}: was promised to container c1 net1 and is"),
        (replace(WORLD, rows=(ROW, replace(ROW, device="0000:99:00.0"))), "0000:99:00.0: is in the ledger"),
        (replace(WORLD, leases=()), "10.9.0.2: was given to container c1 net1, which lives, and is leased"),
        (replace(WORLD, leases=(LEASE, Lease("10.9.0.3", "c0", "net1"))), "10.9.0.3: is leased to c0 net1, and nobody"),
        (replace(WORLD, damage="malformed"), "ledger: is damaged"),
    ],
)
def test_what_must_never_be_is_found_at_any_moment(world: World, text: str) -> None:
    assert any(line.startswith(text) for line in found(world, settled=False)), found(world, settled=False)


@pytest.mark.parametrize(
    ("world", "expected", "text"),
    [
        (WORLD, replace(EXPECTED, promises=()), f"{VF}: is still attached for container c1"),
        (replace(WORLD, quarantine={OTHER: "stuck"}), EXPECTED, f"{OTHER}: is in quarantine for ever: stuck"),
        (replace(WORLD, owed=(("c0", "net1"),)), EXPECTED, "c0 net1: has leases that are still owed"),
        (replace(WORLD, spool=("1.del",)), EXPECTED, "1.del: is still in the spool"),
        (replace(WORLD, leases=(LEASE, Lease("10.9.0.3", "c1", "net1"))), EXPECTED, "10.9.0.3: is leased to c1"),
    ],
)
def test_what_may_be_for_a_while_is_found_when_all_is_at_rest(world: World, expected: Expected, text: str) -> None:
    assert any(line.startswith(text) for line in found(world, expected)), found(world, expected)
    assert found(world, expected, settled=False) == []


def test_a_device_and_an_address_are_promised_to_one_pod_only() -> None:
    twice = replace(EXPECTED, promises=(PROMISE, replace(PROMISE, container_id="c2")))
    lines = found(WORLD, twice, settled=False)
    assert any(line.startswith(f"{VF}: was promised to container c1 net1 and to container c2 net1") for line in lines)
    assert any(line.startswith("10.9.0.2: was given to container c1 net1 and to container c2") for line in lines)


def test_what_happened_to_the_device_is_told() -> None:
    (lost,) = violations(with_link(OTHER), EXPECTED, settled=False, history=lambda what: (f"something with {what}",))
    assert str(lost).splitlines()[1:] == [f"    something with {OTHER}"]


# ------------------------------------------------------------- on a real node


@pytest.fixture
def node(own_network: None) -> Iterator[Node]:
    with closing(Node(Path(tempfile.mkdtemp(prefix="nf-")))) as made:
        yield made


@pytest.fixture
def pod(node: Node) -> Pod:
    """A pod that has the first VF with all settings, and addresses."""
    node.running()
    made = node.make_pod()
    assert node.add(made, everything(node)).succeeded
    assert node.wrong(settled=True) == ()
    node.kill_agent()
    return made


def in_pod(pod: Pod, *words: str) -> None:
    subprocess.run(["nsenter", f"--net={pod.netns}", "ip", "link", *words], check=True)


def in_host(*words: str) -> None:
    subprocess.run(["ip", "link", *words], check=True)


def write(node: Node, statement: str) -> None:
    with closing(sqlite3.connect(node.folder / "state/ledger.db")) as books:
        books.execute(statement)
        books.commit()


def spoil_settings(node: Node) -> None:
    file = node.folder / "vf-settings.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "ens1f0/1": {**document["ens1f0/0"], "vlan": 9}}))


def scribble(node: Node) -> None:
    for name in ("ledger.db", "ledger.db-wal"):
        (node.folder / "state" / name).write_bytes(b"x" * 8192)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda node, pod: in_pod(pod, "set", "net1", "netns", str(os.getpid())), "was taken from under container c1"),
        (lambda node, pod: in_host("set", "ens1f0v1", "name", "eth7"), "came back as"),
        (lambda node, pod: write(node, "DELETE FROM attachments"), "and is not in the ledger"),
        (lambda node, pod: spoil_settings(node), "has vlan 9 left behind"),
        (lambda node, pod: (node.folder / "leases/rails/10.9.0.2").unlink(), "is leased to it no more"),
        (lambda node, pod: scribble(node), "is damaged"),
    ],
)
def test_what_is_planted_on_a_node_is_found(
    node: Node, pod: Pod, spoil: Callable[[Node, Pod], object], text: str
) -> None:
    spoil(node, pod)
    assert any(text in violation.text for violation in node.wrong()), node.wrong()


def test_what_one_pod_leaves_is_found_at_rest_only_and_nothing_after_its_end(node: Node, pod: Pod) -> None:
    held = dict(node.promises)
    node.promises.clear()
    assert node.wrong() == ()
    spooled = node.folder / "spool/1.del"
    spooled.touch()
    texts = [violation.text for violation in node.wrong(settled=True)]
    assert any("has no right to it any more" in text for text in texts)
    assert any("still in the spool" in text for text in texts)
    spooled.unlink()
    node.promises |= held
    node.running()
    node.delete(pod, plain(node))
    node.until(lambda: node.wrong(settled=True) == ())
