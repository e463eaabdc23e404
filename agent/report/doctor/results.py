"""What a check says: how bad it is, what it is about, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from agent.model.printable import joined


class Severity(IntEnum):
    """From bad to good."""

    ERROR = 0
    """Pods that ask for these devices will not work."""
    WARNING = 1
    """Some pods will not work, or it will break at the next reboot."""
    NOTE = 2
    """Works, and could be better."""
    UNSEEN = 3
    """Cannot be seen from here: run doctor on the host, or mount the folder."""
    FINE = 4


@dataclass(frozen=True, slots=True)
class Result:
    """One sentence about the node."""

    check: str
    severity: Severity
    text: str
    remedy: str = ""


def is_sound(findings: Iterable[Result]) -> bool:
    """Tell whether nothing is an error or a warning."""
    return all(finding.severity > Severity.WARNING for finding in findings)


def as_text(findings: Sequence[Result]) -> str:
    """Lay the findings out for a terminal, the worst first, each remedy below its finding."""
    lines = []
    for finding in sorted(findings, key=lambda f: f.severity):
        lines.append(f"{finding.severity.name.lower():<8} {finding.check:<12} {finding.text}")
        if finding.remedy:
            lines.append(f"{'':<22}{finding.remedy}")
    counts = {severity: sum(f.severity is severity for f in findings) for severity in Severity}
    told = [f"{count} {_word(severity, count)}" for severity, count in counts.items() if count]
    return joined([*lines, "", ", ".join(told)])


def as_document(findings: Sequence[Result]) -> dict[str, Any]:
    """Give the findings as values that JSON can carry."""
    return {
        "sound": is_sound(findings),
        "findings": [asdict(finding) | {"severity": finding.severity.name.lower()} for finding in findings],
    }


def _word(severity: Severity, count: int) -> str:
    match severity:
        case Severity.UNSEEN:
            return "not to be seen from here"
        case Severity.FINE:
            return "fine"
        case _:
            return severity.name.lower() + ("s" if count > 1 else "")
