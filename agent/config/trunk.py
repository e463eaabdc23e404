"""The key `trunk`: the VLANs that a VF may send with tags of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agent.model import vlan_ids
from agent.model.allocation import VfSettings
from agent.model.fields import Fields, join, shown

_WANTED = 'VLAN IDs from 0 to 4094 and ranges of them, such as "100,200-210" or [100, "200-210"]'
_WANTED_ITEM = 'a VLAN ID from 0 to 4094, a range such as "200-210", {"id": 100} or {"minID": 200, "maxID": 210}'


def with_trunk(fields: Fields, settings: VfSettings) -> VfSettings:
    """Add what `trunk` says to what a PF is to enforce. Refuses what is wrong, with its path.

    ovs-cni knows the key as a list of objects, so these are read, too.
    """
    value = fields.take("trunk", _is_text_or_list, _WANTED)
    if value is None or value == "":
        return settings
    if settings.vlan:
        fields.refuse(
            f"trunk cannot be had with vlan {settings.vlan}: either the PF tags what the VF sends, or the VF does;"
            " leave one of the two out"
        )
    items = value if isinstance(value, list) else [value]
    return replace(settings, trunk=vlan_ids.spelled(_of_list(items, fields)))


def _is_text_or_list(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value)
    return value == "" or _ranges(value) is not None


def _of_list(items: list[Any], fields: Fields) -> Iterator[vlan_ids.Range]:
    for index, item in enumerate(items):
        found = _of_object(item) if isinstance(item, dict) else _ranges(item)
        if found is None:
            fields.refuse(f"{join(join(fields.path, 'trunk'), index)} must be {_WANTED_ITEM}, is {shown(item)}")
        yield from found or ()


def _of_object(item: dict[str, Any]) -> tuple[vlan_ids.Range, ...] | None:
    if item.keys() == {"id"}:
        return _between(item["id"], item["id"])
    return _between(item["minID"], item["maxID"]) if item.keys() == {"minID", "maxID"} else None


def _ranges(value: Any) -> tuple[vlan_ids.Range, ...] | None:
    """Read an ID, or a text of several. None for what is neither."""
    if not isinstance(value, str):
        return _between(value, value)
    try:
        return vlan_ids.parse(value)
    except ValueError:
        return None


def _between(first: Any, last: Any) -> tuple[vlan_ids.Range, ...] | None:
    if type(first) is int and type(last) is int and vlan_ids.UNTAGGED <= first <= last <= vlan_ids.LAST:
        return ((first, last),)
    return None
