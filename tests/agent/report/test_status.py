"""The status document, what it says of claims, and its layout for people."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.edits.add_facts import NOTED, RdmaFacts
from agent.ledger.database import Books
from agent.model.allocation import AttachmentState, ClaimState, Quarantine
from agent.model.device import MigDevice, Problem, Snapshot
from agent.model.health import HEALTHY, text_of
from agent.offer.offer import Unit
from agent.report import status, status_text
from agent.report.events import Events
from agent.report.facts import DriverState, Facts
from tests.agent.ledger.test_claims import claim, of_share, of_vf
from tests.agent.report.status_facts import DRIVER, FACTS, LEFT_OUT, OTHER, ROW, document, offered, slot
from tests.node import POD, VF, owner, unit_hold


def test_the_document_tells_who_holds_what_and_what_is_wrong() -> None:
    made = document(kubelet="has no open stream")
    assert (made["node"], made["version"], made["ready"]) == ("n1", "1.2", False)
    assert made["obstacles"] == {"kubelet": "has no open stream"}
    assert made["snapshot"] == {"generation": 7, "scanMilliseconds": 12.3}
    vfs, hcas = made["resources"]
    assert vfs == {
        "name": "rdma/vf",
        "kind": "vf",
        "units": 2,
        "healthy": 1,
        "granted": 2,
        "attached": 1,
        "unhealthy": [{"unit": f"unit-{OTHER}", "reason": "LinkDown"}],
    }
    assert (hcas["name"], hcas["units"], hcas["attached"]) == ("rdma/hca", 0, 0)
    assert [(g["pod"], g["container"]) for g in made["grants"]] == [("default/trainer", "worker"), (None, None)]
    (attached,) = made["attachments"]
    assert attached["addresses"] == ["10.9.0.2/24", "fd09::2/64"]
    assert (attached["netdev"], attached["ifname"], attached["container"]) == ("ens1f0v0", "net1", "c1")
    assert made["quarantine"] == [{"device": OTHER, "reason": "clean-up failed: it is stuck", "since": 6.0}]
    assert made["owedLeases"] == [
        {
            "container": "0123456789abcdef",
            "ifname": "net1",
            "plugin": "host-local",
            "since": 7.0,
            "triedAt": None,
            "problem": "",
        },
        {"container": "c2", "ifname": "net1", "plugin": "", "since": 8.0, "triedAt": 9.0, "problem": "it hangs"},
    ]
    assert attached["mode"] == "vf"
    assert made["problems"] == [{"path": "/sys/x", "text": "cannot be read"}]
    json.dumps(made)


def test_each_device_has_its_units_and_their_reasons_explained() -> None:
    made = document()
    assert [(o["device"], o["resource"], o["units"], o["healthy"], o["granted"]) for o in made["offers"]] == [
        (VF, "rdma/vf", 1, 1, 1),
        (OTHER, "rdma/vf", 1, 0, 1),
    ]
    assert made["offers"][1]["reasons"] == ["LinkDown"]
    assert made["reasons"] == {"LinkDown": text_of("LinkDown")}
    assert made["slots"] == []


def test_units_that_wait_for_a_device_are_told_by_numa_node() -> None:
    slots = [slot(n, numa) for n, numa in ((0, 0), (1, 0), (2, -1))]
    granted = (unit_hold("slot-0", "rdma/vf", VF, 3.0, POD), unit_hold("slot-1", "rdma/vf", "", 4.0))
    made = document(Facts(Snapshot(), {"rdma/vf": slots}, granted))
    counts = {"healthy": 2, "granted": 2, "bound": 1, "reasons": []}
    assert made["slots"] == [
        {"resource": "rdma/vf", "numaNode": 0, "units": 2, **counts},
        {"resource": "rdma/vf", "numaNode": None, "units": 1, "healthy": 1, "granted": 0, "bound": 0, "reasons": []},
    ]
    assert made["offers"] == []
    lines = status_text.text(made, 10.0).splitlines()
    assert "SLOTS OF  NUMA  UNITS  HEALTHY  GRANTED  BOUND" in lines
    assert "rdma/vf   -     1      1        0        0" in lines


def test_the_hardware_is_told_with_its_vfs(node_snapshot: Callable[[str], Snapshot]) -> None:
    hardware = document(Facts(node_snapshot("h100-8gpu"), rails={"0000:18:00.0": (5, 1)}))["hardware"]
    assert [gpu["index"] for gpu in hardware["gpus"]] == list(range(8))
    nic = next(nic for nic in hardware["nics"] if nic["address"] == "0000:18:00.0")
    assert (nic["numaNode"], nic["driver"], len(nic["vfs"])) == (0, "mlx5_core", 8)
    assert nic["vfs"][1]["index"] == 1
    assert nic["rdma"][0]["ports"][0]["state"] == "ACTIVE"
    assert hardware["rails"][0]["nics"] == ["0000:18:00.0"]
    assert (nic["rail"], nic["plane"]) == (5, 1)
    assert hardware["rails"][0]["locality"] == "PIX"


def test_many_units_with_one_reason_are_one_line() -> None:
    units = tuple(offered(f"0000:3b:01.{n}", "LinkDown") for n in range(20))
    lines = status_text.text(document(Facts(Snapshot(), {"rdma/vf": units})), 10.0).splitlines()
    (line,) = [line for line in lines if "LinkDown" in line]
    assert line.startswith("unit-0000:3b:01.0 and 19 more  rdma/vf   LinkDown")
    assert line.endswith(text_of("LinkDown"))


def test_events_are_laid_out_newest_first() -> None:
    events = [
        {"number": 2, "at": 95.0, "kind": "health", "subject": VF, "text": "LinkDown", "warning": True, "count": 3},
        {"number": 1, "at": 40.0, "kind": "attach", "subject": VF, "text": "is net1", "warning": False, "count": 1},
    ]
    assert status_text.events_text(events, 100.0).splitlines() == [
        "AGO     KIND    WHAT          EVENT",
        f"5s   !  health  {VF}  LinkDown (3 times)",
        f"1m      attach  {VF}  is net1",
    ]
    assert status_text.events_text([], 1.0) == "nothing has happened yet"


def rail(number: int) -> Unit:
    """Make one unit that is a GPU with its NIC."""
    return Unit(f"slot-{number}", "rdma/rail", "rail", VF, HEALTHY, 0, gpu="GPU-1")


def test_a_rail_of_several_nics_is_told_for_each_of_them_and_attached_with_any() -> None:
    unit = replace(rail(0), further=(replace(rail(0), device=OTHER, gpu=""),))
    granted = (unit_hold("slot-0", "rdma/rail", VF, 3.0, POD, others=(OTHER,)),)
    row = replace(ROW, device=OTHER, state=AttachmentState.ATTACHED)
    made = document(Facts(Snapshot(), {"rdma/rail": (unit,)}, granted, (row,)))
    assert {offer["device"]: (offer["units"], offer["granted"]) for offer in made["offers"]} == dict.fromkeys(
        [VF, OTHER, "GPU-1"], (1, 1)
    )
    assert [(g["device"], g["devices"], g["gpu"]) for g in made["grants"]] == [(VF, [VF, OTHER], "GPU-1")]
    assert made["resources"][0]["attached"] == 1
    assert [(h["device"], h["how"], h["ifname"], h["state"]) for h in made["held"]] == [
        (OTHER, "granted to default/trainer", "net1", "attached"),
        (VF, "granted to default/trainer", "", "granted"),
        ("GPU-1", "granted to default/trainer", "", "granted"),
    ]


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """List the keys of a document that hold no further keys, as docs/status-json.md spells them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        for inner in value:
            yield from leaves(inner, f"{path}[]")
    else:
        yield path


def test_every_key_is_described_and_no_other(node_snapshot: Callable[[str], Snapshot]) -> None:
    snapshot = node_snapshot("h100-8gpu")
    first = replace(snapshot.gpus[0], mig_mode=True, mig_devices=(MigDevice("MIG-1", "1g.10gb", 7, 0, 10),))
    snapshot = replace(snapshot, gpus=(first, *snapshot.gpus[1:]), problems=(Problem("/sys/x", "cannot be read"),))
    units = {"rdma/vf": (offered(VF), offered(OTHER, "LinkDown"), slot(0, 0)), "rdma/rail": (rail(1),)}
    of_rail = unit_hold("slot-1", "r", VF, 3.0, others=(OTHER,))
    facts = replace(FACTS, snapshot=snapshot, units=units, holds=(*FACTS.holds, of_rail))
    told = replace(ROW, request={**ROW.request, NOTED: RdmaFacts("mlx5_2", True, 1, 5).document()})
    facts = replace(facts, claims=(claim("c", of_share()),), driver=DRIVER, attachments=(told,))
    events = Events()
    events.note("agent", "a", "b")
    made = status.build(
        facts, node="n", version="1", kinds={}, conditions={"a": "b"}, events=events.listed(), left_out=LEFT_OUT
    )
    # Deeper branches of the tree are like the first; reasons are by word.
    found = {re.sub(r"(\.below\[\])(\.below\[\])+", r"\1\2", path) for path in leaves(made)}
    found = {path.partition(".")[0] if path.startswith(("reasons.", "obstacles.")) else path for path in found}
    found = {path for path in found if not any(other.startswith(f"{path}[]") for other in found)}
    found = {path for path in found if not path.startswith("hardware.tree[].below[].below[].b")}
    text = (Path(__file__).parents[3] / "docs/status-json.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == found


def test_nothing_in_the_way_is_ready() -> None:
    assert document()["ready"]
    assert document(publishing="the API server is away")["ready"]


def test_an_attachment_that_is_not_finished_has_no_addresses() -> None:
    made = document(Facts(Snapshot(), {}, (), (replace(ROW, result=None),)))
    assert made["attachments"][0]["addresses"] == []
    status_text.text(made, 10.0)


def test_people_are_told_the_same_in_columns() -> None:
    left_out = {"notOffered": [each.document() for each in LEFT_OUT]}
    lines = status_text.text(document(kubelet="has no open stream") | left_out, 4000.0).splitlines()
    assert lines[0] == "node n1  nodefabric 1.2  NOT READY"
    assert lines[1] == "  kubelet: has no open stream"
    assert "RESOURCE  KIND  UNITS  HEALTHY  GRANTED  ATTACHED" in lines
    assert "rdma/vf   vf    2      1        2        1" in lines
    text = "\n".join(lines)
    assert "10.9.0.2/24, fd09::2/64" in text
    assert "DEVICE        RESOURCE  HELD                                 INTERFACE  ADDRESS" in text
    assert f"{VF}  rdma/vf   granted to default/trainer (worker)  net1       10.9.0.2/24" in text
    assert f"{OTHER}  rdma/vf   granted to a pod not known yet" in text
    assert "LinkDown" in text
    assert "clean-up failed: it is stuck" in text
    assert "cannot read /sys/x: cannot be read" in text
    assert f"{OTHER}  1h   clean-up failed: it is stuck" in text
    assert "0123456789ab            net1       host-local  1h   not tried yet" in text
    assert "it hangs" in text
    assert "1 adapter (ens2f0np0)  rdma/vf  selected, but without VFs  take kind nic or hca, or create VFs" in text
    assert "VF 1)" not in text  # an unhealthy unit is shown as that
    assert all(line == line.rstrip() for line in lines)


def test_an_idle_node_is_told_in_few_lines() -> None:
    lines = status_text.text(document(Facts(Snapshot())), 10.0).splitlines()
    assert lines[0] == "node n1  nodefabric 1.2  ready"
    assert "no pod has a device" in lines
    assert not any("QUARANTINED" in line for line in lines)


def test_the_books_alone_tell_what_is_where_while_no_agent_runs() -> None:
    found = Books(FACTS.holds, FACTS.attachments, FACTS.quarantines, FACTS.owed_leases, claims=(claim(),))
    made = status.without_agent(found, node="n1", version="1.2", problem="does not run")
    with_agent = document()
    assert made.keys() == with_agent.keys() - {"snapshot"} | {"claims"}
    json.dumps(made)
    for key in ("attachments", "quarantine", "owedLeases"):
        assert made[key] == with_agent[key]
    assert made["grants"] == [grant | {"container": None} for grant in with_agent["grants"]]
    lines = status_text.text(made, 10.0).splitlines()
    assert lines[:2] == ["node n1  nodefabric 1.2  NOT READY", "  agent: does not run"]
    assert not any("RESOURCE  KIND" in line for line in lines)
    assert any("claimed by default/c (nic) for default/trainer" in line for line in lines)


def test_time_is_told_in_its_largest_unit() -> None:
    told = [status_text.ago(seconds) for seconds in (-5, 0, 59.9, 60, 3599, 7200, 200_000)]
    assert told == ["0s", "0s", "59s", "1m", "59m", "2h", "2d"]


FORGED = "failed\nrdma/vf  vf  64  64  0  0\x1b[2K"


def test_what_comes_from_outside_forges_no_row() -> None:
    facts = replace(
        FACTS,
        quarantines=(Quarantine(OTHER, FORGED, 1.0),),
        owed_leases=(replace(FACTS.owed_leases[0], problem=FORGED),),
        snapshot=replace(FACTS.snapshot, problems=(Problem("/sys/x\ny", FORGED),)),
    )
    honest = replace(
        facts,
        quarantines=(Quarantine(OTHER, "failed", 1.0),),
        owed_leases=(replace(FACTS.owed_leases[0], problem="failed"),),
        snapshot=replace(FACTS.snapshot, problems=(Problem("/sys/x", "failed"),)),
    )
    told = status_text.text(document(facts, ledger=FORGED), 10.0)
    assert len(told.splitlines()) == len(status_text.text(document(honest, ledger="failed"), 10.0).splitlines())
    assert told.replace("\n", "").isprintable()
    assert told.count("failed\\nrdma/vf  vf  64  64  0  0\\x1b[2K") == 4


def test_a_claim_is_told_with_its_devices_its_pods_and_how_far_it_is() -> None:
    prepared = replace(claim("c", of_vf(), of_share()), state=ClaimState.PREPARED, since=40.0)
    facts = Facts(Snapshot(), claims=(prepared,), attachments=(replace(ROW, claim_uid="uid-c"),), driver=DRIVER)
    made = document(facts)
    (told,) = made["claims"]
    assert (told["namespace"], told["name"], told["uid"]) == ("default", "c", "uid-c")
    assert (told["state"], told["since"], told["pods"]) == ("prepared", 40.0, ["default/trainer"])
    vf, share = told["devices"]
    assert (vf["device"], vf["name"], vf["state"]) == (VF, "vf-0000-3b-00-2", "attached")
    assert (share["share"], share["resource"], share["state"]) == ("s1", "rdma/hca", "prepared")
    lines = status_text.text(made, 100.0).splitlines()
    assert [line.split("  ")[-1] for line in lines if "claimed by default/c" in line] == ["1m"] * 2


def test_a_claim_on_its_way_back_says_so_though_its_device_is_still_in_the_pod() -> None:
    leaving = replace(claim(), state=ClaimState.UNPREPARING)
    row = replace(ROW, claim_uid="uid-c", state=AttachmentState.DETACHING)
    (told,) = document(Facts(Snapshot(), claims=(leaving,), attachments=(row,)))["claims"]
    assert told["devices"][0]["state"] == "unpreparing"


def test_a_claims_adapter_is_attached_as_long_as_any_pod_has_a_part_of_it() -> None:
    prepared = replace(claim("c", of_share()), state=ClaimState.PREPARED)
    adapter = prepared.devices[0].device
    first, second = (replace(ROW, device=f"{adapter}/c{n}/net1", claim_uid="uid-c") for n in (1, 2))
    leaving = replace(second, attachment_id=2, owner=owner("c2", "eth0"), state=AttachmentState.DETACHING)
    for rows in ((first, leaving), (leaving, first)):
        (told,) = document(Facts(Snapshot(), claims=(prepared,), attachments=rows))["claims"]
        assert told["devices"][0]["state"] == "attached"


def test_a_device_that_a_claim_has_counts_as_granted() -> None:
    made = document(Facts(Snapshot(), {"rdma/vf": (offered(VF), offered(OTHER))}, claims=(claim(),)))
    assert made["resources"][0]["granted"] == 1
    assert [(found["device"], found["granted"]) for found in made["offers"]] == [(VF, 1), (OTHER, 0)]


def test_a_driver_is_told_in_one_line_with_what_it_lacks() -> None:
    line = status_text.text(document(Facts(Snapshot(), driver=DRIVER)), 0.0).splitlines()[1]
    told = "registered with kubelet; 2 slices published; 8 devices, 7 healthy; the cluster leaves out taints"
    assert line == f"DRA driver nodefabric.io: {told}"
    line = status_text.text(
        document(Facts(Snapshot(), driver=DriverState("d.io", "not found", None))), 0.0
    ).splitlines()[1]
    told = "NOT REGISTERED with kubelet: not found; slices not known yet; 0 devices, 0 healthy"
    assert line == f"DRA driver d.io: {told}"


def test_a_node_without_claims_is_told_nothing_of_them() -> None:
    made = document()
    assert made.keys().isdisjoint({"dra", "claims"})
    assert "DRA" not in status_text.text(made, 1.0)
