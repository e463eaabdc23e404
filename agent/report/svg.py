"""The PCIe tree as a drawing: one SVG file, without a script, a font or a picture from elsewhere.

Boxes are NUMA nodes, host bridges and switches; chips in them are GPUs and NICs. A GPU's chip names the NIC
nearest to it. Nothing is told by colour alone: every chip has its label.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from agent.model.device import Snapshot
from agent.report.chart import Branch, rails, rows, tree

CHIP_WIDTH, CHIP_HEIGHT, GAP, PAD, HEAD, LETTER = 206, 54, 10, 12, 22, 7.3
WIDEST = 1440
"""Boxes side by side are broken into rows at this width."""

STYLE = """\
svg{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:#fff}
text{fill:#1a1a1a}.soft{fill:#555}.numa,.bridge,.nic,.gpu{stroke-width:1.5}
.numa{fill:#f6f6f4;stroke:#8a8a8a}.bridge{fill:#fff;stroke:#8a8a8a;stroke-dasharray:4 3}
.gpu{fill:#d9f2e8;stroke:#009e73}.nic{fill:#dcecf7;stroke:#0072b2}.label{font-weight:bold}
@media(prefers-color-scheme:dark){svg{background:#16181b}text{fill:#eee}.soft{fill:#b5b5b5}
.numa{fill:#1e2125;stroke:#777}.bridge{fill:#16181b;stroke:#777}
.gpu{fill:#0b3b2d;stroke:#2fc79a}.nic{fill:#0c2f47;stroke:#56b4e9}}
"""


@dataclass(frozen=True, slots=True)
class _Block:
    """A rectangle with lines of text, and others inside. Places are relative to the outer one."""

    kind: str
    lines: tuple[str, ...]
    width: float
    height: float
    inside: tuple[_Block, ...] = ()
    x: float = 0
    y: float = 0


def draw(snapshot: Snapshot, title: str) -> str:
    """Draw the GPUs and NICs of a snapshot, as the text of an SVG file."""
    chips = _chips(snapshot)
    blocks = [_numa(group, chips) for group in tree(snapshot)]
    placed, width, height = _flow(blocks, 0)  # one below the other
    top = 2 * PAD + HEAD
    width, height = max(width, LETTER * len(title) * 1.3) + 2 * PAD, height + top + PAD
    if not blocks:
        title = f"{title}: neither GPUs nor NICs"
    body = "".join(_drawn(replace(block, x=block.x + PAD, y=block.y + top), 0, 0) for block in placed)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{_written(title)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<text class="label" x="{PAD}" y="{PAD + HEAD - 6}" font-size="15">{_written(title)}</text>\n{body}</svg>\n'
    )


def _chips(snapshot: Snapshot) -> dict[str, _Block]:
    """Make the chip of each GPU and NIC, by address."""
    table = rows(snapshot)
    label_of = {row.address: row.label for row in table}
    near = {
        gpu.pci_address: f"{place.name} {' '.join(label_of[nic.address] for nic in nics)}"
        for gpu, nics, place in rails(snapshot)
        if place is not None
    }
    chips = {
        row.address: _chip("gpu" if row.gpu else "nic", row.label, row.title, near.get(row.address, row.address))
        for row in table
    }
    pfs: dict[str, list[str]] = {}
    for pf, function in snapshot.data_direct.of.items():
        pfs.setdefault(function, []).append(label_of.get(pf, pf))
    return chips | {function: _chip("nic", " ".join(of), "Data Direct", function) for function, of in pfs.items()}


def _chip(kind: str, *lines: str) -> _Block:
    room = int((CHIP_WIDTH - 2 * 8) / LETTER)
    return _Block(kind, tuple(_cut(line, room) for line in lines), CHIP_WIDTH, CHIP_HEIGHT)


def _numa(group: Branch, chips: dict[str, _Block]) -> _Block:
    name = "unknown NUMA node" if group["numaNode"] is None else f"NUMA node {group['numaNode']}"
    head = f"{name}   CPUs {group['cpus']}" if group["cpus"] else name
    return _box("numa", head, [_part(part, chips) for part in group["below"]], WIDEST - 2 * PAD)


def _part(part: Branch, chips: dict[str, _Block]) -> _Block:
    if (address := part.get("device")) is not None:
        return chips.get(address) or _chip("gpu", "GPU?", address, "not told by NVML")
    inside = [_part(child, chips) for child in part["below"]]
    return _box("bridge", " / ".join(part["bridges"]), inside, 2 * (CHIP_WIDTH + GAP) + 2 * PAD)


def _box(kind: str, head: str, inside: Sequence[_Block], widest: float) -> _Block:
    placed, width, height = _flow(inside, widest)
    width = max(width + 2 * PAD, CHIP_WIDTH + 2 * PAD)
    head = _cut(head, int((width - 2 * PAD) / LETTER))
    moved = tuple(replace(block, x=block.x + PAD, y=block.y + PAD + HEAD) for block in placed)
    return _Block(kind, (head,), width, height + 2 * PAD + HEAD, moved)


def _flow(blocks: Iterable[_Block], widest: float) -> tuple[list[_Block], float, float]:
    """Put blocks side by side, in rows no wider than `widest` where that can be."""
    placed: list[_Block] = []
    x = y = row = width = 0.0
    for block in blocks:
        if x and x + block.width > widest:
            x, y, row = 0.0, y + row + GAP, 0.0
        placed.append(replace(block, x=x, y=y))
        width, x, row = max(width, x + block.width), x + block.width + GAP, max(row, block.height)
    return placed, width, y + row


def _drawn(block: _Block, x: float, y: float) -> str:
    x, y = x + block.x, y + block.y
    corner = {"gpu": 10, "nic": 0}.get(block.kind, 6)
    size = f'x="{x:.0f}" y="{y:.0f}" width="{block.width:.0f}" height="{block.height:.0f}" rx="{corner}"'
    parts = [f'<rect class="{block.kind}" {size}/>\n']
    for number, line in enumerate(block.lines):
        look = "label" if number == 0 and not block.inside else "soft" if block.inside or number == 2 else "plain"
        parts.append(f'<text class="{look}" x="{x + 8:.0f}" y="{y + 16 + 15 * number:.0f}">{_written(line)}</text>\n')
    return "".join(parts) + "".join(_drawn(inner, x, y) for inner in block.inside)


def _written(text: str) -> str:
    """Write a text for XML, which has no place for control characters: an interface may be called so."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text), {'"': "&quot;"})


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"
