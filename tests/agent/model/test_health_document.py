"""docs/health.md and docs/gpu.md say of reasons and errors what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from agent.model.device_health import WITHHOLDING, XID_REASONS, XIDS, XidClass
from agent.model.health import Reason, Tempo

DOCUMENT = (Path(__file__).parents[3] / "docs/health.md").read_text()
GPU_DOCUMENT = (Path(__file__).parents[3] / "docs/gpu.md").read_text()


def test_the_document_lists_exactly_the_reasons_there_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|$", DOCUMENT, re.MULTILINE)
    assert rows == [(reason.value, reason.text) for reason in Reason]
    lasting = " and ".join(f"`{reason}`" for reason in Reason if reason.tempo is Tempo.SETTLED)
    assert f"{lasting} count, and end, [when they have lasted]" in DOCUMENT


def test_the_table_of_errors_is_that_of_the_code() -> None:
    for kind in XidClass:
        listed = "; ".join(f"{xid} {text}" for xid, (found, text) in sorted(XIDS.items()) if found is kind)
        assert f"| {kind.value} | {listed} |\n" in GPU_DOCUMENT


def test_the_table_of_gpu_reasons_is_that_of_the_code() -> None:
    listed = re.findall(r"^\| `([A-Z]\w+)` \| [^|]+ \|$", GPU_DOCUMENT, re.MULTILINE)
    assert set(listed) == {*WITHHOLDING, *XID_REASONS.values(), Reason.MIG_UNFIT}
    shown = ("RowRemapPending", "PageRetirementPending", "InforomCorrupted")
    assert all(f"`{word}`" in GPU_DOCUMENT for word in shown)
