"""Type `rdma`, chained after the plugin that brings the interface.

The plugin of that name moves the RDMA device and demands that the system keeps RDMA devices apart. Here the
RDMA device goes along with the interface already, in the call before. So this call passes the result on, after
a look at whether the pod has what the chain was written for; its DEL and CHECK leave all to the call before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from agent.errors import HardwareError, RequestInvalid
from agent.ledger import Ledger
from agent.model.device import Snapshot
from cni.call import Call

KIND = "rdma"

log = logging.getLogger(__name__)


def add(ledger: Ledger, snapshot: Snapshot, call: Call) -> Mapping[str, Any]:
    """Pass the previous result on. Raises RequestInvalid or HardwareError where the pod has no RDMA device.

    In shared mode every pod sees all RDMA devices, and the chain asks for nothing that is not there.
    """
    conf = call.conf
    if conf.prev_result is None:
        raise RequestInvalid("prevResult is missing: chain type rdma after sriov, ib-sriov or nodefabric")
    if not snapshot.rdma_exclusive:
        return conf.prev_result
    rows = ledger.attachments_of(call.container_id, call.ifname)
    bound = ledger.binding_of(conf.device) if conf.device is not None else None
    device = bound.device if bound is not None else conf.device
    mine = [row for row in rows if device in (None, row.device)]
    if not mine:
        raise HardwareError(
            f"{device or call.ifname} was brought into the pod by another plugin, and its RDMA device stayed in"
            " the host: let type sriov, ib-sriov or nodefabric bring it, which take the RDMA device along"
        )
    without = [row.device for row in mine if row.undo.rdma is None]
    if without:
        raise HardwareError(
            f"{', '.join(without)} came into the pod without an RDMA device: load its RDMA driver (mlx5_ib, irdma …),"
            " or take type rdma out of the chain"
        )
    return conf.prev_result
