"""What the node offers, who holds what, and what is wrong: one document for programs, a layout of it for people."""

from __future__ import annotations

from agent.report.status.document import FORMAT, CachedStatus, Served, build, without_agent
from agent.report.status.text import UNKNOWN_POD, ago, events_text, table, text

__all__ = [
    "FORMAT",
    "UNKNOWN_POD",
    "CachedStatus",
    "Served",
    "ago",
    "build",
    "events_text",
    "table",
    "text",
    "without_agent",
]
