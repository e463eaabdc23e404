"""What becomes of a new version of the configuration."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent import config
from agent.config import Config
from agent.config.files import AGAIN_SECONDS, Reloader, Sources, without_restart
from agent.errors import ConfigError
from agent.state import Latest

GOOD = "resources: [{name: rdma/vf, kind: vf}]\n"
OTHER = "resources: [{name: rdma/hca, kind: hca}]\n"


@dataclass
class Watched:
    """A file, its reloader, and what the reloader did."""

    path: Path
    applied: list[Config] = field(default_factory=list)
    said: list[str | None] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    refusal: str = ""
    now: float = 0.0
    must_wait: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.path.write_text(GOOD)
        self.reloader = Reloader(Sources(self.path), Latest(config.load(self.path)), self, clock=lambda: self.now)

    def check(self, new: Config) -> None:
        if self.refusal:
            raise ConfigError("x", [self.refusal])

    async def apply(self, new: Config) -> None:
        self.applied.append(new)

    def waiting(self, new: Config) -> tuple[str, ...]:
        return self.must_wait

    def complain(self, what: str | None) -> None:
        self.said.append(what)

    def count(self, outcome: str) -> None:
        self.outcomes.append(outcome)

    def look(self, text: str | None = None) -> None:
        if text is not None:
            fresh = self.path.with_suffix(".new")
            fresh.write_text(text)
            fresh.rename(self.path)
        asyncio.run(self.reloader.look())


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "config.yaml")


def test_a_file_that_did_not_change_is_left_alone(watched: Watched) -> None:
    for _ in range(3):
        watched.look()
    assert (watched.applied, watched.outcomes) == ([], [])


def test_a_change_between_the_start_and_the_first_look_is_seen(watched: Watched) -> None:
    watched.path.write_text(OTHER)
    watched.look()
    assert [r.name for c in watched.applied for r in c.resources] == ["rdma/hca"]


def test_a_new_version_is_applied_once(watched: Watched) -> None:
    watched.look()
    watched.look(OTHER)
    watched.look()
    assert [r.name for c in watched.applied for r in c.resources] == ["rdma/hca"]
    assert (watched.said[-1], watched.outcomes) == (None, ["applied"])


def test_the_same_in_other_words_is_no_new_configuration(watched: Watched) -> None:
    watched.look()
    watched.look(f"# a comment\n{GOOD}")
    assert (watched.applied, watched.outcomes) == ([], ["unchanged"])


def test_the_same_file_written_again_is_not_counted(watched: Watched) -> None:
    watched.look()
    watched.look(GOOD)
    assert (watched.applied, watched.outcomes) == ([], [])


@pytest.mark.parametrize("text", ["resources: 7", "resources: [", "\0"])
def test_a_wrong_file_leaves_the_former_configuration_in_effect(watched: Watched, text: str) -> None:
    watched.look()
    watched.look(text)
    assert (watched.applied, watched.outcomes) == ([], ["refused"])
    assert watched.said[-1] is not None
    assert "the former one stays in effect" in watched.said[-1]
    watched.look(GOOD)
    assert (watched.applied, watched.outcomes) == ([], ["refused", "unchanged"])
    assert watched.said.pop() is None


def test_a_file_that_is_gone_leaves_the_former_configuration_in_effect(watched: Watched) -> None:
    watched.look()
    watched.path.unlink()
    watched.look()
    watched.look()
    assert (watched.applied, watched.outcomes) == ([], ["refused"])
    watched.look(OTHER)
    assert watched.outcomes == ["refused", "applied"]


def test_what_is_wrong_on_this_node_is_refused(watched: Watched) -> None:
    watched.look()
    watched.refusal = "two resources select one device"
    watched.look(OTHER)
    assert (watched.applied, watched.outcomes) == ([], ["refused"])


def test_what_was_refused_is_in_effect_once_the_node_allows_it(watched: Watched) -> None:
    watched.look()
    watched.refusal = "two resources select one device"
    watched.look(OTHER)
    watched.now += AGAIN_SECONDS
    watched.look()
    assert watched.outcomes == ["refused"]
    watched.refusal = ""
    watched.look()
    assert watched.outcomes == ["refused"]
    watched.now += AGAIN_SECONDS
    watched.look()
    assert watched.outcomes == ["refused", "applied"]


def test_what_is_heeded_at_start_only_waits_and_is_said(watched: Watched) -> None:
    watched.look()
    watched.look(f"{OTHER}endpoints: {{port: 1}}\nstateDir: /elsewhere\nnetnsDirs: [/n]\n")
    (applied,) = watched.applied
    assert [r.name for r in applied.resources] == ["rdma/hca"]
    assert (applied.endpoints, applied.state_dir) == (Config().endpoints, Config().state_dir)
    assert watched.outcomes == ["partly"]
    assert watched.said[-1] == "restart the agent to put into effect what was changed of endpoints, stateDir, netnsDirs"
    watched.look(OTHER)
    assert watched.outcomes[-1] == "unchanged"
    assert watched.said.pop() is None


def test_other_keys_may_have_to_wait_for_reasons_of_the_moment(watched: Watched) -> None:
    watched.look()
    watched.must_wait = ("topology",)
    watched.look(f"{OTHER}topology: {{publish: true}}\n")
    assert [applied.topology for applied in watched.applied] == [Config().topology]
    assert watched.said[-1] == "restart the agent to put into effect what was changed of topology"


def test_every_key_is_either_applied_or_waits() -> None:
    changed = config.parse(
        "resources: [{name: a/b, kind: vf}]\nnetworks: [{name: n}]\nhealth: {upSeconds: 1}\nrescanSeconds: 2\n"
        "topology: {volcano: true}\n",
        "x",
    )
    new, waiting = without_restart(Config(), changed)
    assert (new, waiting) == (changed, ())
