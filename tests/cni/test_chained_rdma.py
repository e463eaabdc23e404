"""Type `rdma` after a plugin that brings the interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from agent.errors import HardwareError, RequestInvalid
from agent.state import Latest
from cni.attachment import Attachments
from cni.call import Node
from tests.agent.books import attach, owner
from tests.cni.tiny_node import Rig, tiny_snapshot, vf

RESULT: Mapping[str, Any] = {"cniVersion": "1.0.0", "interfaces": [{"name": "net1", "sandbox": "/x"}]}
CONF: Mapping[str, Any] = {"cniVersion": "1.0.0", "type": "rdma", "deviceID": vf(0), "prevResult": RESULT}
SHARED = tiny_snapshot(3)
EXCLUSIVE = replace(SHARED, rdma_exclusive=True)


def test_in_a_shared_system_the_result_is_passed_on(rig: Rig) -> None:
    pod = rig.pod()
    rig.add("c1", pod)
    with rig.call("c1", pod, CONF) as call:
        assert rig.attachments.add(call) == RESULT
        rig.attachments.check(call)
        rig.attachments.delete(call)
    assert rig.in_pod(pod) is not None
    rig.delete("c1", pod)
    rig.await_back()


def test_a_call_that_is_not_chained_is_refused(rig: Rig) -> None:
    with rig.call("c1", rig.pod(), {**CONF, "prevResult": None}) as call, pytest.raises(RequestInvalid) as caught:
        rig.attachments.add(call)
    assert "prevResult is missing" in str(caught.value)


def test_where_devices_are_kept_apart_the_pod_must_have_got_its_own(rig: Rig) -> None:
    attachments = Attachments(Node(rig.machine, rig.ledger, Latest(EXCLUSIVE)))
    with rig.call("c1", rig.pod(), CONF) as call:
        with pytest.raises(HardwareError, match="was brought into the pod by another plugin"):
            attachments.add(call)
        row = attach(rig.ledger, vf(0), owner("c1"))
        with pytest.raises(HardwareError, match=f"{vf(0)} came into the pod without an RDMA device"):
            attachments.add(call)
        rig.ledger.finish_detach(row)
        rig.ledger.begin_attach(
            row.owner,
            ifname="net1",
            device=vf(0),
            resource_name="",
            undo=replace(row.undo, rdma="mlx5_4", extra={"rdma_index": 4}),
            netns_path="/x",
            request=row.request,
        )
        assert attachments.add(call) == RESULT
        rig.ledger.finish_detach(rig.ledger.attachments()[0])
    attachments.close()
