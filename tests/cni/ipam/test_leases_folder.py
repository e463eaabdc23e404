"""Where IPAM plugins are looked for, when they are no longer where they were at the ADD."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.cni.desk import open_desk
from tests.cni.tiny_node import Rig, stub_answer, vf


def test_a_plugin_is_looked_for_where_the_del_says(rig: Rig) -> None:
    """Distributions of Kubernetes keep plugins in a folder of each version of theirs."""
    pod, other = rig.pod(), rig.folder / "other"
    other.mkdir()
    script = f"echo $CNI_COMMAND $CNI_CONTAINERID >>{rig.folder}/calls; {stub_answer('10.0.0.2/24')}"
    for container_id in ("c1", "c2"):
        rig.add(
            container_id, pod, f"net{container_id[1]}", deviceID=vf(int(container_id[1])), ipam=rig.stub_ipam(script)
        )
    (rig.folder / "stub").rename(other / "stub")
    with rig.call("c1", pod, {}, "net1") as call:
        rig.attachments.delete(replace(call, cni_path=str(other)))
    rig.await_back(1)
    with rig.call("", None, {"cni.dev/valid-attachments": []}) as call:
        rig.attachments.collect(replace(call, cni_path=str(other)))
    rig.await_back(2)
    assert (rig.folder / "calls").read_text().splitlines() == ["ADD c1", "ADD c2", "DEL c1", "DEL c2"]
    assert rig.ledger.owed_leases() == ()


def test_what_is_owed_from_before_is_given_back_to_the_plugin_of_today(tmp_path: Path) -> None:
    """After an upgrade and a reboot no DEL comes with the new place of a plugin, but ADDs do."""
    other = tmp_path / "other"
    other.mkdir()
    with open_desk(tmp_path) as desk:
        desk.plugin("stub", f"echo $CNI_COMMAND $CNI_CONTAINERID >>{tmp_path}/calls; {stub_answer('10.0.0.2/24')}")
        desk.owe("c1")
        (tmp_path / "stub").rename(other / "stub")
        assert desk.leases.settle() == (0, 0)
        row = desk.row("c2")
        desk.leases.take(replace(row, request={**row.request, "cni_path": str(other)}))
        assert desk.leases.settle() == (1, 0)
        assert desk.said() == ["ADD c2", "DEL c1"]
