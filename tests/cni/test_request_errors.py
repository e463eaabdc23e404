"""What the runtime is told of an error: a code of CNI's, the reason word and a text that says what helps."""

from __future__ import annotations

import json

import pytest

from agent.errors import AgentError, DeviceBusy, HardwareError, RequestInvalid, UnknownUnit
from cni import protocol, request


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestInvalid("x"), protocol.INVALID_NETWORK_CONFIG),
        (DeviceBusy("x"), protocol.TRY_AGAIN_LATER),
        (UnknownUnit("x"), protocol.TRY_AGAIN_LATER),  # its resource may come back into the configuration
        (HardwareError("x"), protocol.HARDWARE_FAILED),
    ],
)
def test_an_error_has_a_code_and_its_reason_word(error: AgentError, code: int) -> None:
    answer = request.failed("ADD", "1.0.0", error)
    assert json.loads(answer.stdout) == {"cniVersion": "1.0.0", "code": code, "msg": "x", "details": error.reason}
    assert request.code_of("STATUS", error) == (
        code if code == protocol.INVALID_NETWORK_CONFIG else protocol.PLUGIN_NOT_AVAILABLE
    )
