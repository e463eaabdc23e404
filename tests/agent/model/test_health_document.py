"""docs/health.md and docs/gpu.md say of reasons and errors what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from agent.model.device_health import NOTED, WITHHOLDING, XID_REASONS, XIDS, XidClass
from agent.model.health import Reason, Tempo
from agent.offer.units import MISFIT

DOCUMENT = (Path(__file__).parents[3] / "docs/health.md").read_text()
GPU_DOCUMENT = (Path(__file__).parents[3] / "docs/gpu.md").read_text()
COUNTS = {Tempo.AT_ONCE: "at once", Tempo.SETTLED: "when it has lasted"}


def test_the_document_lists_exactly_the_reasons_there_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (at once|when it has lasted) \|$", DOCUMENT, re.MULTILINE)
    assert rows == [(reason.value, reason.text, COUNTS[reason.tempo]) for reason in Reason]


def test_the_table_of_errors_is_that_of_the_code() -> None:
    for kind in XidClass:
        listed = "; ".join(f"{xid} {text}" for xid, (found, text) in sorted(XIDS.items()) if found is kind)
        assert f"| {kind.value} | {listed} |\n" in GPU_DOCUMENT


def test_the_table_of_gpu_reasons_is_that_of_the_code() -> None:
    listed = re.findall(r"^\| `([A-Z]\w+)` \| [^|]+ \|$", GPU_DOCUMENT, re.MULTILINE)
    assert set(listed) == {*WITHHOLDING, *XID_REASONS.values(), MISFIT}
    assert all(f"`{word}`" in GPU_DOCUMENT for word in NOTED)
