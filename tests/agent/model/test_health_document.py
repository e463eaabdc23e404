from __future__ import annotations

import re
from pathlib import Path

from agent.config import HealthSettings
from agent.model.device_health import WITHHOLDING, XID_REASONS
from agent.model.health import Reason, Tempo

DOCUMENT = (Path(__file__).parents[3] / "docs/health.md").read_text()
COUNTS = {Tempo.AT_ONCE: "at once", Tempo.SETTLED: "when it has lasted"}


def test_the_document_lists_exactly_the_reasons_there_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (at once|when it has lasted) \|$", DOCUMENT, re.MULTILINE)
    assert rows == [(reason.value, reason.text, COUNTS[reason.tempo]) for reason in Reason]


def test_the_document_gives_the_defaults_that_hold() -> None:
    shown = dict(re.findall(r"^\| `health\.(\w+)` \| (\w+) \|", DOCUMENT, re.MULTILINE))
    plain = HealthSettings()
    assert shown == {
        "downSeconds": f"{plain.down_seconds:g}",
        "upSeconds": f"{plain.up_seconds:g}",
        "goneSeconds": f"{plain.gone_seconds:g}",
        "link": plain.link,
    }


def test_what_withholds_a_gpu_is_a_reason() -> None:
    assert {*WITHHOLDING, *XID_REASONS.values()} <= {reason.value for reason in Reason}
