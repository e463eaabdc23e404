"""docs/gpu.md says of errors what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from agent.model.device_health import NOTED, WITHHOLDING, XID_REASONS, XIDS, XidClass
from agent.offer.units import MISFIT

TEXT = (Path(__file__).parents[3] / "docs/gpu.md").read_text()


def test_the_table_of_errors_is_that_of_the_code() -> None:
    for kind in XidClass:
        listed = "; ".join(f"{xid} {text}" for xid, (found, text) in sorted(XIDS.items()) if found is kind)
        assert f"| {kind.value} | {listed} |\n" in TEXT


def test_the_table_of_reasons_is_that_of_the_code() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", TEXT, re.MULTILINE))
    assert set(told) == {*WITHHOLDING, *XID_REASONS.values(), MISFIT}
    assert {word: told[word] for word in WITHHOLDING} == dict(WITHHOLDING)
    assert all(f"`{word}`" in TEXT for word in NOTED)
