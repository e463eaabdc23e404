"""The report as a drawing: for each node and way a bar. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from measure.alignment.table import WAYS, Line

COLOURS = ("#1a7f37", "#54aeff", "#bf8700", "#8c959f", "#d0d7de")
"""By way; told apart on white and on dark ground, and in grey."""
LEFT, BAR, HIGH, GAP, TOP = 210, 480, 9, 14, 62
WIDTH = LEFT + BAR + 60
INK = "#57606a"


def draw(lines: Sequence[Line]) -> str:
    """Draw a group of bars for each line. The text is a drawing's whole file."""
    group = len(WAYS) * HIGH + GAP
    height = TOP + group * len(lines) + 8
    size = f'width="{WIDTH}" height="{height}"'
    font = f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}"'
    title = "Share of GPU–NIC pairs as near as any choice could have made them"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size} role="img" {font}>',
            f"<title>{escape(title)}</title>",
            f'<text x="0" y="16" font-size="14" font-weight="600">{escape(title)}, %</text>',
            *_legend(),
            *_scale(height),
            *(part for n, line in enumerate(lines) for part in _group(line, TOP + n * group)),
            "</svg>\n",
        )
    )


def _legend() -> Iterator[str]:
    x = 0
    for (_, words), colour in zip(WAYS, COLOURS, strict=True):
        yield f'<rect x="{x}" y="27" width="11" height="11" fill="{colour}"/>'
        yield f'<text x="{x + 16}" y="37">{escape(words)}</text>'
        x += 32 + 7 * len(words)


def _scale(height: int) -> Iterator[str]:
    for percent in (0, 25, 50, 75, 100):
        x = LEFT + BAR * percent // 100
        yield f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{height}" stroke="{INK}" stroke-opacity=".25"/>'
        yield f'<text x="{x}" y="{TOP - 12}" text-anchor="middle" font-size="10">{percent}</text>'


def _group(line: Line, top: int) -> Iterator[str]:
    middle = top + len(WAYS) * HIGH // 2
    yield f'<text x="{LEFT - 10}" y="{middle}" text-anchor="end" font-weight="600">{escape(line.node)}</text>'
    yield f'<text x="{LEFT - 10}" y="{middle + 14}" text-anchor="end" font-size="10">{escape(line.nics)}</text>'
    for n, ((way, words), colour) in enumerate(zip(WAYS, COLOURS, strict=True)):
        tally = line.tallies.get(way)
        y = top + n * HIGH
        if tally is None or tally.percent is None:
            yield f'<text x="{LEFT + 4}" y="{y + HIGH - 1}" font-size="8">early only</text>'
            continue
        wide = BAR * tally.percent / 100
        yield f'<rect x="{LEFT}" y="{y}" width="{wide:.1f}" height="{HIGH - 1}" fill="{colour}">'
        yield f"<title>{escape(f'{line.node}, {line.nics}, {words}: {tally.percent:.1f} %')}</title></rect>"
        shown = f"{int(tally.percent * 10) / 10:g}"
        yield f'<text x="{LEFT + wide + 4:.1f}" y="{y + HIGH - 1}" font-size="8">{shown}</text>'
