"""Series about claims and the DRA driver. Where nothing is offered to claims, and none is left, there are none."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from agent.model.allocation import Attachment, AttachmentState, Claim, ClaimState
from agent.report.dra import DriverState

STATES = ("attached", *(state.value for state in ClaimState))


def claim_families(
    driver: DriverState | None, claims: Sequence[Claim], attachments: Iterable[Attachment]
) -> Iterator[Metric]:
    """Build the series."""
    if driver is not None:
        yield from _driver_families(driver)
    if driver is None and not claims:
        return
    attached = {row.claim_uid for row in attachments if row.state is AttachmentState.ATTACHED}
    resources = {resource for resource, _, _ in driver.devices} if driver is not None else set()
    counts = Tally({(resource, state): 0 for resource in resources for state in STATES})
    for claim in claims:
        is_attached = claim.state is ClaimState.PREPARED and claim.ref.uid in attached
        state = "attached" if is_attached else claim.state.value
        counts.update({(found.resource_name, state) for found in claim.devices})
    family = GaugeMetricFamily(
        "nodefabric_dra_claims",
        "Claims that kubelet had prepared, by resource and state; attached ones are prepared and have an interface in"
        " a pod.",
        labels=("resource", "state"),
    )
    for labels, count in sorted(counts.items()):
        family.add_metric(labels, count)
    yield family
    leaving = [claim.since for claim in claims if claim.state is ClaimState.UNPREPARING]
    family = GaugeMetricFamily(
        "nodefabric_dra_unpreparing_since_seconds",
        "When kubelet first asked for the claim that is longest on its way back, in seconds since the epoch; none if"
        " there is no such claim.",
    )
    if leaving:
        family.add_metric((), min(leaving))
    yield family


def _driver_families(driver: DriverState) -> Iterator[Metric]:
    registered = GaugeMetricFamily(
        "nodefabric_dra_registered", "1 while kubelet has the DRA driver registered, else 0.", labels=("driver",)
    )
    registered.add_metric((driver.name,), driver.is_registered)
    yield registered
    if driver.slices is not None:
        yield GaugeMetricFamily(
            "nodefabric_dra_slices",
            "ResourceSlices of this node that the API server has as they should be.",
            value=driver.slices,
        )
    dropped = GaugeMetricFamily(
        "nodefabric_dra_dropped",
        "1 for each feature of ResourceSlices that the cluster leaves out (taints, capacity, listAttributes).",
        labels=("feature",),
    )
    for feature in sorted(driver.dropped):
        dropped.add_metric((feature,), 1)
    yield dropped
    devices = GaugeMetricFamily(
        "nodefabric_dra_devices",
        "Devices that are offered to claims, by resource and health (healthy, or the reason why not).",
        labels=("resource", "health"),
    )
    for resource, health, count in driver.devices:
        devices.add_metric((resource, health), count)
    yield devices
