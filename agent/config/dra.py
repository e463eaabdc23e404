"""The section `dra`: how devices are offered to claims (Dynamic Resource Allocation), and what claims may say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator
from pydantic.json_schema import SkipJsonSchema

from agent.config.routing import KEYS as ROUTING_KEYS
from agent.config.section import Flag, Many, Refusal, Section, choice, matching, string
from agent.config.sections import each_once

DRIVER = "nodefabric.io"
STANDARD = "resource.kubernetes.io"
SHARES = ("capacity", "devices")
ALIASED = ("uuid", "pciBusID", "numaNode")
"""What an alias can tell, by the second half of its name: UUID or PCI address of the nearest GPU, or the NUMA node."""
NEAR_ADDRESS = f"{STANDARD}/pciBusID"
"""The one standard attribute that may be an alias: only places carry it, which have no address of their own."""
SAFE_KEYS = ("ifName", "mtu", "addresses", *ROUTING_KEYS)
"""What concerns the pod alone."""
CLAIM_KEYS = (
    *SAFE_KEYS,
    *("network", "mode", "ipam", "master", "rdma", "pkey", "mac", "guid", "vlan", "vlanQoS", "vlanProto", "trunk"),
    *("min_tx_rate", "max_tx_rate", "spoofchk", "trust", "link_state", "altNames", "macvlanMode", "vfio"),
    *("ipvlanMode", "functionReset"),
)
"""All that the parameters of a class may say; those of a claim only what `claimMay` lists."""
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_DOMAIN = rf"(?=[a-z0-9.-]{{1,63}}(?:/|$)){_LABEL}(?:\.{_LABEL})*"
_ALIAS = re.compile(rf"({_DOMAIN})/([A-Za-z_][A-Za-z0-9_]{{0,31}})")


def _alias(text: str) -> str:
    """Read the name of another driver's attribute."""
    found = _ALIAS.fullmatch(text)
    if not found or found[2] not in ALIASED or (found[1] == STANDARD and text != NEAR_ADDRESS):
        raise ValueError(text)
    return text


_ALIAS_WANTED = (
    f"an attribute of another driver, domain/name, with the name {' or '.join(ALIASED)}; of {STANDARD} only pciBusID"
)


@dataclass(frozen=True, slots=True)
class Dra(Section):
    """How the resources with `offer: dra` are offered."""

    driver: Annotated[
        str, matching("a domain of at most 63 characters, such as nodefabric.io", re.compile(_DOMAIN))
    ] = DRIVER
    """The driver's name in slices and classes"""
    aliases: Many[Annotated[str, string(_ALIAS_WANTED, _alias)]] = ("gpu.nvidia.com/uuid", NEAR_ADDRESS)
    """Attributes of other drivers that our devices carry too, for constraints: uuid or pciBusID (late only) of the
    nearest GPU, numaNode; default: gpu.nvidia.com/uuid and resource.kubernetes.io/pciBusID"""
    list_attributes: Flag = False
    """Publish all nearest GPUs of a shared adapter; needs the gate DRAListTypeAttributes"""
    status: SkipJsonSchema[bool] = True
    """Whether interface and addresses go into the claim's status."""
    metadata: Flag = False
    """Give containers files that describe their devices (KEP-5304)"""
    claim_may: Annotated[
        Many[Annotated[str, choice(*CLAIM_KEYS)]],
        AfterValidator(each_once),
    ] = SAFE_KEYS
    """Keys that a claim's parameters may set (a class may set all); default: the first nine. Never addresses where the
    network has ipam"""
    shares: Annotated[str, choice(*SHARES)] = "capacity"
    """How shares and late-bound units are published: as capacity (Kubernetes 1.36), or a device each"""

    def contradictions(self) -> Iterator[Refusal]:
        for alias in self.aliases:
            if alias.partition("/")[0] == self.driver:
                text = f"{alias} is in the driver's own domain, whose attributes are there anyway"
                yield Refusal(("aliases",), text, ("driver",))
