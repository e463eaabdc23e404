"""Selectors that leave nothing to a later resource, whatever node they meet. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

from agent.config.values import Resource, Select

CONDITIONS = tuple(f.name for f in fields(Select) if f.name not in ("need_vhost_net", "any_of", "is_rdma", "vdpa_type"))


def selectors_of(resource: Resource) -> tuple[tuple[str, str, Select], ...]:
    """List what a resource selects: where the selector stands, the kind of device, the selector."""
    if resource.kind == "rail":
        return ("gpu", "gpu", resource.gpu), ("nic.select", resource.nic.kind, resource.nic.select)
    return (("select", resource.kind, resource.select),)


def covered(resources: Sequence[Resource]) -> Iterator[tuple[int, str, int]]:
    """List selectors that can take nothing: the resource's number, where the selector stands, and by whom.

    An earlier resource of the same kind takes all that they select, on any node. Pools of other projects'
    configurations are left alone: there the first takes what it likes by design.
    """
    for j, later in enumerate(resources):
        for where, kind, select in selectors_of(later) if later.compat is None else ():
            first = next((i for i, earlier in enumerate(resources[:j]) if _takes_all(earlier, kind, select)), None)
            if first is not None:
                yield j, where, first


def _takes_all(resource: Resource, kind: str, select: Select) -> bool:
    if resource.compat is not None:
        return False
    return any(k == kind and covers(s, select) for _, k, s in selectors_of(resource))


def covers(wide: Select, narrow: Select) -> bool:
    """Tell whether one selector takes all that another takes, as far as that shows without a node."""
    if wide.any_of:
        return wide == narrow or any(covers(other, narrow) for other in wide.any_of if not _own(wide))
    if narrow.any_of:
        return all(covers(wide, other) for other in narrow.any_of) or covers(wide, _without_alternatives(narrow))
    if wide.is_rdma and not narrow.is_rdma:
        return False
    if wide.vdpa_type and wide.vdpa_type != narrow.vdpa_type:
        return False
    return all(_covers(getattr(wide, name), getattr(narrow, name)) for name in CONDITIONS)


def _covers(wide: tuple[object, ...], narrow: tuple[object, ...]) -> bool:
    return not wide or (bool(narrow) and set(narrow) <= set(wide))


def _own(select: Select) -> bool:
    return _without_alternatives(select) != Select()


def _without_alternatives(select: Select) -> Select:
    return Select(**{f.name: getattr(select, f.name) for f in fields(Select) if f.name != "any_of"})
