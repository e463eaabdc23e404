from __future__ import annotations

from agent.model.health import HEALTHY, Health, Reason, unhealthy
from agent.offer.offer import HealthChange, Unit, Units, health_changes

LINK, QUARANTINED = unhealthy(Reason.LINK_DOWN), unhealthy(Reason.QUARANTINED)


def unit(unit_id: str, health: Health, device: str) -> Unit:
    return Unit(unit_id, "rdma/vf", "vf", device, health, 0)


def offer(*healths: Health) -> Units:
    return {"rdma/vf": [unit(f"unit-{n}", health, f"vf-{n}") for n, health in enumerate(healths)]}


def test_units_that_share_a_reason_are_told_together() -> None:
    assert list(health_changes(offer(HEALTHY, HEALTHY, HEALTHY), offer(LINK, QUARANTINED, LINK))) == [
        HealthChange("rdma/vf", "LinkDown", False, ("vf-0", "vf-2")),
        HealthChange("rdma/vf", "Quarantined", False, ("vf-1",)),
    ]


def test_a_recovery_names_what_is_over_and_comes_after_what_broke() -> None:
    assert list(health_changes(offer(LINK, HEALTHY), offer(HEALTHY, LINK))) == [
        HealthChange("rdma/vf", "LinkDown", False, ("vf-1",)),
        HealthChange("rdma/vf", "LinkDown", True, ("vf-0",)),
    ]


def test_another_reason_is_told() -> None:
    (change,) = health_changes(offer(LINK), offer(QUARANTINED))
    assert (change.reason, change.is_healthy) == ("Quarantined", False)


def test_what_stays_as_it_was_is_not_told_and_neither_is_a_healthy_unit_that_is_new() -> None:
    assert list(health_changes(offer(LINK, HEALTHY), offer(LINK, HEALTHY))) == []
    assert list(health_changes({}, offer(HEALTHY))) == []
    assert [change.reason for change in health_changes({}, offer(LINK))] == ["LinkDown"]
    assert list(health_changes(offer(LINK), {"rdma/vf": []})) == []


def test_a_unit_without_a_device_goes_by_its_own_name() -> None:
    (change,) = health_changes({}, {"rdma/vf": [unit("slot-1", LINK, "")]})
    assert change.devices == ("slot-1",)
