"""What becomes of a new version of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from agent import config
from agent.config import Config
from agent.config.files import Sources
from agent.errors import ConfigError
from agent.health_history import HealthHistory
from agent.process.conditions import Conditions
from agent.process.reload import LOOKS_UNTIL_AGAIN, Reloader
from agent.report.events import Events
from agent.report.metrics import Metrics
from agent.report.report import Report
from agent.state import Latest

GOOD = "resources: [{name: rdma/vf, kind: vf}]\n"
OTHER = "resources: [{name: rdma/hca, kind: hca}]\n"


@dataclass
class Watched:
    """A file, its reloader, and what the reloader did."""

    path: Path
    applied: list[Config] = field(default_factory=list)
    refusal: str = ""
    publishes: bool = True

    def __post_init__(self) -> None:
        self.path.write_text(GOOD)
        self.config = Latest(config.load(self.path))
        self.conditions, self.registry = Conditions(), CollectorRegistry()
        self.reloader = self.new_reloader()

    def new_reloader(self) -> Reloader:
        report = Report(Metrics(self.registry), self.conditions, Events(), HealthHistory())
        sources = Sources(self.path)
        return Reloader(sources, self.config, report, self.check, self.apply, publishes=self.publishes)

    def check(self, new: Config) -> None:
        if self.refusal:
            raise ConfigError("x", [self.refusal])

    async def apply(self) -> None:
        self.applied.append(self.config.value)

    @property
    def said(self) -> str | None:
        return self.conditions.found.get("config")

    @property
    def outcomes(self) -> dict[str, float]:
        """How many versions had which outcome."""
        name, every = "nodefabric_config_reload_total", ("applied", "partly", "unchanged", "refused")
        found = {outcome: self.registry.get_sample_value(name, {"outcome": outcome}) for outcome in every}
        return {outcome: count for outcome, count in found.items() if count}

    async def look(self, text: str | None = None, times: int = 1) -> None:
        if text is not None:
            fresh = self.path.with_suffix(".new")
            fresh.write_text(text)
            fresh.rename(self.path)
        for _ in range(times):
            await self.reloader.look()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "config.yaml")


def names(applied: list[Config]) -> list[str]:
    return [resource.name for each in applied for resource in each.resources]


@pytest.mark.parametrize(
    ("seen", "applied", "outcomes"),
    [
        ([None, None, GOOD], [], {}),
        ([None, f"# a comment\n{GOOD}"], [], {"unchanged": 1}),
        ([None, OTHER, None], ["rdma/hca"], {"applied": 1}),
        ([OTHER, None], ["rdma/hca"], {"applied": 1}),  # it came between the start and the first look
    ],
)
async def test_what_a_version_says_anew_is_applied_once(
    watched: Watched, seen: list[str | None], applied: list[str], outcomes: dict[str, float]
) -> None:
    for text in seen:
        await watched.look(text)
    assert (names(watched.applied), watched.said, watched.outcomes) == (applied, None, outcomes)


@pytest.mark.parametrize("text", ["resources: 7", "resources: [", "\0", None])
async def test_a_wrong_or_missing_file_leaves_the_former_configuration_in_effect(
    watched: Watched, text: str | None
) -> None:
    await watched.look()
    if text is None:
        watched.path.unlink()
    await watched.look(text, times=2)
    assert (watched.applied, watched.outcomes) == ([], {"refused": 1})
    assert "the former one stays in effect" in (watched.said or "")
    await watched.look(GOOD)
    assert (watched.applied, watched.outcomes, watched.said) == ([], {"refused": 1, "unchanged": 1}, None)


async def test_what_was_refused_is_in_effect_once_the_node_allows_it(watched: Watched) -> None:
    await watched.look()
    watched.refusal = "two resources select one device"
    await watched.look(OTHER, times=1 + LOOKS_UNTIL_AGAIN)
    assert (watched.applied, watched.outcomes) == ([], {"refused": 1})
    watched.refusal = ""
    await watched.look(times=LOOKS_UNTIL_AGAIN - 1)
    assert watched.applied == []
    await watched.look()
    assert (names(watched.applied), watched.outcomes) == (["rdma/hca"], {"refused": 1, "applied": 1})


async def test_what_is_heeded_at_start_only_waits_and_is_said(watched: Watched) -> None:
    await watched.look()
    await watched.look(f"{OTHER}endpoints: {{port: 1}}\nstateDir: /elsewhere\nnetnsDirs: [/n]\nrescanSeconds: 2\n")
    (applied,) = watched.applied
    assert (names(watched.applied), applied.rescan_seconds) == (["rdma/hca"], 2)
    assert (applied.endpoints, applied.state_dir) == (Config().endpoints, Config().state_dir)
    assert watched.outcomes == {"partly": 1}
    waits = "restart the agent to put into effect what was changed of endpoints, stateDir, netnsDirs"
    assert watched.conditions.found["config"] == waits
    await watched.look(f"{OTHER}rescanSeconds: 2\n")
    assert (watched.outcomes, watched.said) == ({"partly": 1, "unchanged": 1}, None)


@pytest.mark.parametrize("publishes", [True, False])
async def test_what_goes_to_an_api_server_waits_where_none_is_open(tmp_path: Path, publishes: bool) -> None:
    watched = Watched(tmp_path / "config.yaml", publishes=publishes)
    await watched.look(f"{OTHER}topology: {{publish: true}}\n")
    assert [applied.topology.publish for applied in watched.applied] == [publishes]
    waits = "restart the agent to put into effect what was changed of topology"
    assert watched.said == (None if publishes else waits)


async def test_a_configmap_is_followed_through_its_links(tmp_path: Path) -> None:
    for version, text in (("..1", GOOD), ("..2", OTHER)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "config.yaml").symlink_to("..data/config.yaml")
    watched = Watched(tmp_path / "config.yaml")
    await watched.look()
    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    await watched.look()
    assert names(watched.applied) == ["rdma/hca"]
