"""CHECK and GC: compare what is with the books, and free what the runtime no longer knows."""

from __future__ import annotations

import logging
from ipaddress import ip_interface

from agent.errors import AttachmentError, RequestInvalid
from agent.hardware.host import Host
from agent.ledger import Ledger
from agent.model.allocation import Attachment, AttachmentState
from cni.call import Call
from cni.detach import Detaching
from cni.leases import LeaseBook
from cni.modes.choice import mode_of

log = logging.getLogger(__name__)


def check(host: Host, ledger: Ledger, leases: LeaseBook, call: Call) -> None:
    """Compare what was set up with what is. Raises AttachmentError that lists the differences."""
    if call.netns is None:
        raise RequestInvalid("CHECK came without a network namespace")
    rows = ledger.attachments_of(call.container_id, call.ifname)
    if not rows:
        if call.conf.device is not None:
            raise AttachmentError(f"{call.conf.device} is not attached for container {call.container_id}")
        return
    found: list[str] = []
    for row in rows:
        if row.state is not AttachmentState.ATTACHED:
            found.append(f"{row.device} is {row.state.value}")
            continue
        found += mode_of(row).differences(host, row, call.netns, call.conf)
        missing = _leased(row) - set(host.links.addresses(row.ifname, call.netns))
        found += [f"{row.ifname} lacks address {address}" for address in sorted(missing)]
        found += filter(None, [leases.check(row)])
    if found:
        raise AttachmentError("; ".join(found))


def collect(ledger: Ledger, detaching: Detaching, call: Call) -> None:
    """GC: detach what this network holds for containers that the runtime no longer lists."""
    valid = call.conf.valid_attachments
    if valid is None:
        raise RequestInvalid("GC came without cni.dev/valid-attachments")
    dead = [
        row
        for row in ledger.attachments()
        if row.request["name"] == call.conf.name and (row.owner.container_id, row.owner.cni_ifname) not in valid
    ]
    ledger.begin_detach([row.attachment_id for row in dead])
    for row in dead:
        log.info("garbage: %s of container %s", row.device, row.owner.container_id)
        detaching.start_detach(row, None)


def _leased(row: Attachment) -> set[str]:
    """The addresses that the answer gave to this interface, in the kernel's spelling."""
    answer = row.result or {}
    index = next((i for i, found in enumerate(answer.get("interfaces", [])) if found.get("name") == row.ifname), None)
    return {str(ip_interface(ip["address"])) for ip in answer.get("ips", []) if ip.get("interface") == index}
