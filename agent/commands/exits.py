"""With which status the commands end."""

from __future__ import annotations

DONE, FAILED, WRONG_INPUT, NO_ANSWER, IN_USE, MATCHES_NOTHING = 0, 1, 2, 3, 4, 5
FINDINGS = FAILED
"""doctor found something that keeps pods from working."""
INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it."""
EXIT_STATUSES = (
    "Exit statuses: 0 done, 1 something failed, 2 the configuration or the command line is wrong,"
    " 3 the agent does not answer, 4 a pod may still use the device,"
    " 5 a resource selects nothing on this node."
)
