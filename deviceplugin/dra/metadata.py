"""What of a claim is on disk: its CDI spec and, if wanted, files that tell its containers of their devices (KEP-5304).

Each request of a claim has a file with a DeviceMetadata object in it: what the ResourceSlice says of each device. For a
device that was chosen late it is what a slice would say of this one, had it been offered by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agent.config import Config
from agent.edits import metadata
from agent.edits.claim_specs import ClaimSpecs
from agent.errors import Unavailable
from agent.model.claims import Claim, ClaimDevice, ClaimState
from agent.state import Latest
from deviceplugin.dra.allocation import Allocation
from deviceplugin.dra.attributes import Attributes, Facts, attributes_of
from deviceplugin.dra.devices import DraDevice


def path_in_containers(claim: Allocation, request: str, driver: str) -> str:
    """Tell where a container finds the file of a request, by the name that its pod has for the claim."""
    whose = f"resourceclaimtemplates/{claim.pod_claim}" if claim.pod_claim else f"resourceclaims/{claim.ref.name}"
    return f"{metadata.IN_CONTAINERS}/{whose}/{request}/{driver}-metadata.json"


def documents_of(
    claim: Allocation, attributes: Mapping[tuple[str, str, str], Attributes]
) -> Mapping[str, Mapping[str, Any]]:
    """Map each request to its DeviceMetadata. `attributes` are those of each result, by request, device and share."""
    found: dict[str, dict[str, Any]] = {}
    for result in claim.results:
        ref = claim.ref
        document = found.setdefault(
            result.base,
            {
                "kind": "DeviceMetadata",
                "apiVersion": metadata.API_VERSION,
                "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid},
                **({"podClaimName": claim.pod_claim} if claim.pod_claim else {}),
                "requests": [{"name": result.request, "devices": []}],
            },
        )
        device = {"driver": result.driver, "pool": result.pool, "name": result.device}
        told = attributes[result.base, result.device, result.share_id]
        document["requests"][0]["devices"].append(device | ({"attributes": told} if told else {}))
    return found


class ClaimFiles:
    """Writes and removes what of claims is on disk. Methods block, briefly."""

    def __init__(
        self,
        specs: ClaimSpecs,
        config: Latest[Config],
        catalog: Latest[tuple[DraDevice, ...]],
        facts: Latest[Facts],
    ) -> None:
        """`facts` are what the catalog's attributes are made of."""
        self._specs = specs
        self._config = config
        self._catalog = catalog
        self._facts = facts

    def complete(self, claim: Claim, allocation: Allocation | None, known: Callable[[], Claim | None]) -> None:
        """Write what is missing of a claim's files; all of them if it is not prepared yet.

        `known` looks the claim up once more: an ADD may have found its devices to be others than they were.
        Raises Unavailable, also if the `allocation` is needed and the API server did not tell it.
        """
        is_missing = self._specs.metadata.missing(claim)
        if is_missing and allocation is None:
            raise Unavailable(f"the files that tell of claim {claim.ref} are gone, and the API server is away")
        is_new = claim.state is not ClaimState.PREPARED and bool(metadata.requests_told(claim))
        if allocation is not None and (is_missing or is_new):
            attributes = {(d.request, d.device_name, d.share_id): self._attributes(d) for d in claim.devices}
            for request, document in documents_of(allocation, attributes).items():
                self._specs.metadata.write(claim.ref.uid, request, document)
        self._specs.renew(known)

    def remove(self, uid: str) -> None:
        """Remove a claim's files. What is not there is removed already. Raises Unavailable."""
        self._specs.remove(uid)

    def _attributes(self, device: ClaimDevice) -> Attributes:
        """Tell what is known of a device; nothing if its resource is offered no more."""
        resource = next((r for r in self._config.value.claimable if r.name == device.resource_name), None)
        if resource is None:
            return {}
        mine = [listed for listed in self._catalog.value if listed.resource_name == resource.name]
        if resource.binding != "late":
            return next((listed.attributes for listed in mine if listed.name == device.device_name), {})
        facts = self._facts.value
        pci = facts.seen.snapshot.by_address.get(device.device)
        unit = next((unit for listed in mine for unit in listed.units if unit.device == device.device), None)
        return attributes_of(resource, unit, pci, facts) if unit is not None and pci is not None else {}
