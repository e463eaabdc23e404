"""The drawing of the tree: sound XML that shows every device, and nothing of elsewhere."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.model.device import Snapshot
from agent.report.svg import draw

Snapshots = Callable[[str], Snapshot]
NODES = ("h100-8gpu", "gb200-4gpu", "efa", "ib-dual-port", "one-nic")
SVG = "{http://www.w3.org/2000/svg}"


def boxes(drawing: str) -> list[tuple[str, float, float, float, float]]:
    """List the rectangles: class, and left, top, right, bottom."""
    found = []
    for rect in ET.fromstring(drawing).iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        found.append((rect.attrib["class"], x, y, x + width, y + height))
    return found


@pytest.mark.parametrize("name", NODES)
def test_no_two_chips_overlap(node_snapshot: Snapshots, name: str) -> None:
    chips = [box for box in boxes(draw(node_snapshot(name), name)) if box[0] in ("gpu", "nic")]
    for i, (_, left, top, right, bottom) in enumerate(chips):
        for _, x, y, x2, y2 in chips[:i]:
            assert x >= right or left >= x2 or y >= bottom or top >= y2


def test_names_from_outside_cannot_break_out(node_snapshot: Snapshots) -> None:
    snapshot = node_snapshot("h100-8gpu")
    hostile = replace(snapshot, gpus=tuple(replace(gpu, name='<script>"&\x1b\x00\udc80') for gpu in snapshot.gpus))
    drawing = draw(hostile, '"><script>')
    assert not list(ET.fromstring(drawing).iter(f"{SVG}script"))
    assert "http" not in drawing.replace("http://www.w3.org/2000/svg", "")
