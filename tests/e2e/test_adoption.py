"""A node that other plugins served until now: the real agent starts, and their pods keep what they have."""

from __future__ import annotations

import json
import subprocess

from hack.sim.stage import CONFIG, Stage, wait

CONTAINER = "ab" * 32


def test_a_pod_of_the_old_plugin_keeps_its_vf_and_gives_it_back(stage: Stage) -> None:
    stage.build_node("h100-8gpu")
    stage.write_config({**CONFIG, "netnsDirs": [str(stage.folder / "netns")]})
    machine = stage.machine
    snapshot = machine.scan()
    facts = next(device for device in snapshot.devices if device.is_vf and device.netdev is not None)
    link, pf = machine.find_netdev(facts.address), snapshot.pf_netdev(facts)
    assert link is not None
    assert pf is not None
    pod = stage.folder / "old.netns"
    pod.touch()
    subprocess.run(["unshare", f"--net={pod}", "true"], check=True)
    subprocess.run(["ip", "link", "set", link.name, "netns", str(pod), "name", "net1"], check=True)
    state = machine.root / "var/lib/cni/sriov"
    (state / "pci").mkdir(parents=True)
    was = {"HostIFName": link.name, "EffectiveMAC": link.mac, "MTU": link.mtu}
    known = {"cniVersion": "1.0.0", "name": "old", "type": "sriov", "deviceID": facts.address}
    file = state / f"{CONTAINER}-net1"
    file.write_text(json.dumps({**known, "Master": pf.name, "VFID": facts.vf_index, "OrigVfState": was}))
    (state / "pci" / facts.address).write_text(str(pod))

    stage.start_kubelet("--seed", "7")
    stage.start_agent()
    stage.await_ready()
    (row,) = stage.status()["attachments"]
    assert (row["device"], row["state"]) == (facts.address, "attached")
    assert 'nodefabric_reconcile_actions_total{action="adopt",reason="replaced-plugin"} 1.0' in stage.fetch("/metrics")

    assert stage.call("DEL", known, CONTAINER, pod) == (0, {})
    wait("the VF to be back", lambda: stage.status()["attachments"] == [] or None)
    back = machine.find_netdev(facts.address)
    assert back is not None
    assert (back.name, back.mac, back.mtu) == (link.name, link.mac, link.mtu)
    assert not file.exists()
    subprocess.run(["umount", "--lazy", pod], check=True)
