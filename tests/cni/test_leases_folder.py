"""Where IPAM plugins are looked for, when they are no longer where they were at the ADD."""

from __future__ import annotations

from dataclasses import replace

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
