"""doctor reads from containerd itself whether it resolves CDI names."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from agent.config import Config
from agent.report.doctor.collect import runtime
from tests.containerd.runtime import Containerd


@pytest.mark.parametrize("suite", ["trixie", "forky"], indirect=True)
def test_doctor_has_containerds_own_word_on_cdi(containerd: Containerd, suite: str) -> None:
    file = containerd.folder / "config.toml"
    for said in (True, False):
        if not said:
            file.write_text(file.read_text().replace("enable_cdi = true", "enable_cdi = false"))
            containerd.end(signal.SIGTERM)
            containerd.start()
        found = runtime(Path("/"), Config(runtime_socket=containerd.socket))
        assert found is not None
        assert (found.resolves_cdi, found.major, found.problem) == (said, 2 if suite == "forky" else 1, "")
