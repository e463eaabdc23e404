"""What is no plain YAML, no mapping or no readable file is refused in few words; whatever comes, by a ConfigError."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import config
from agent.config import Config, Endpoints, Resource, Select, Topology
from agent.config.networks import NetworkKeys
from agent.config.section import keys_of
from agent.errors import ConfigError


def problems_of(text: str | bytes) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "test.yaml")
    return caught.value.problems


@pytest.mark.parametrize(
    "text",
    [
        "resources: [",
        "a: b: c",
        "\t- x",
        "!!python/object/apply:os.system [true]",
        "x: !!timestamp nonsense",
        "x: 2026-13-41",
        "x: !!int nonsense",
        "x: !!int ''",
        "x: !!bool nonsense",
        "x: !!float nonsense",
        "x: " + "9" * 5000,
        "[" * 1500,
        *(b"\xff\xfe\xfa", b"rescanSeconds: 5 # \xe4\n", b"\x00\x01"),
    ],
)
def test_what_is_not_plain_yaml_is_told_so(text: str | bytes) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith("is not YAML")
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/dev/zero", "is larger than 1048576 bytes"),
        ("/missing.yaml", "/missing.yaml: cannot be read: No such file"),
        ("/", "cannot be read: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.load(Path(path))


KEYS = st.sampled_from(
    sorted({key for each in (Config, Endpoints, Resource, Select, Topology, NetworkKeys) for key in keys_of(each)})
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.dates(),
    st.sampled_from(["vf", "hca", "gpu", "rdma/vf", "n", "ens1f0#0-3", "/x", "2026-99-99", "!!int x", "&a", "*a"]),
)


DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.one_of(KEYS, SCALARS), inner, max_size=6)),
    max_leaves=25,
)


def written(value: object) -> str:
    """Write YAML in flow style without quoting, so that much of it is wrong in interesting ways."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(k)}: {written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return str(value)


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS)
def test_whatever_stands_in_the_document_only_a_config_error_is_raised(document: object) -> None:
    with suppress(ConfigError):
        config.parse(written(document), "fuzz.yaml")


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text("{}[]:,-&*!|>'\"%@ \n\tab1?#~.", max_size=60).map(str.encode)))
def test_whatever_bytes_come_only_a_config_error_is_raised(text: bytes) -> None:
    with suppress(ConfigError):
        config.parse(text, "fuzz.yaml")


def test_a_key_that_went_is_read_with_a_warning_that_says_what_to_do() -> None:
    read = config.parse(
        "topology: {coalesceSeconds: 5, publish: true, labels: {to: nfd}}\ndra: {status: false}\n", "test.yaml"
    )
    assert read.topology.publish
    assert read.warnings == (
        "topology.coalesceSeconds: has no effect any more, the value is always 2: take it out",
        "topology.labels.to: has no effect any more, labels are always set on the Node itself: take it out",
        "dra.status: has no effect any more, the claim's status is always written: take it out",
    )
