"""What the relay prints: results, and errors as the CNI specification has them.

One table from the agent's errors to CNI's codes. `msg` says what is wrong and what helps, `details`
has the one word that metrics and logs have for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent.errors import (
    AgentError,
    AllocationError,
    AttachmentError,
    DeviceBusy,
    HardwareError,
    IpamFailed,
    LedgerError,
    RequestInvalid,
    Unavailable,
)
from cni import protocol
from cni.fields import NotJson
from cni.netconf import VersionUnsupported
from cni.protocol import Answer
from cni.readiness import ConnectivityLimited

NEWEST = "1.1.0"


class EnvironmentInvalid(RequestInvalid):
    """A CNI_* variable is missing or wrong."""


_CODES: tuple[tuple[type[AgentError], int], ...] = (
    (VersionUnsupported, protocol.INCOMPATIBLE_VERSION),
    (EnvironmentInvalid, protocol.INVALID_ENVIRONMENT),
    (NotJson, protocol.DECODING_FAILURE),
    (RequestInvalid, protocol.INVALID_NETWORK_CONFIG),
    (DeviceBusy, protocol.TRY_AGAIN_LATER),
    (ConnectivityLimited, protocol.CONNECTIVITY_LIMITED),
    (Unavailable, protocol.TRY_AGAIN_LATER),
    (IpamFailed, protocol.IPAM_FAILED),
    (AttachmentError, protocol.CHECK_FAILED),
    (HardwareError, protocol.HARDWARE_FAILED),
    (LedgerError, protocol.LEDGER_FAILED),
    (AllocationError, protocol.TRY_AGAIN_LATER),
)


def printed(document: Mapping[str, Any]) -> Answer:
    """Answer with a result."""
    return Answer(0, json.dumps(document).encode())


def failed(command: str, version: str, error: Exception) -> Answer:
    """Answer with an error object in the version of the call."""
    reason = error.reason if isinstance(error, AgentError) else type(error).__name__
    text = str(error) if isinstance(error, AgentError) else f"unexpected error: {error}"
    document = {"cniVersion": version, "code": code_of(command, error), "msg": text, "details": reason}
    return Answer(1, json.dumps(document).encode())


def code_of(command: str, error: Exception) -> int:
    """Find CNI's code for an error. For STATUS all that is not the caller's fault means: not available."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), protocol.INTERNAL)
    if command != "STATUS" or isinstance(error, RequestInvalid) or code == protocol.CONNECTIVITY_LIMITED:
        return code
    return protocol.PLUGIN_NOT_AVAILABLE
