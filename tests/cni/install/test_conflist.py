"""Which configuration a runtime takes, and our entry in its text."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent.config.networks import OWN
from cni.install import conflist
from cni.install.conflist import ConflistInvalid
from tests.cni.conflists import BRIDGE, CALICO

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
PLUGINS = st.builds(
    lambda more, kind: {**more, "type": kind}, st.dictionaries(st.text(), VALUES, max_size=3), st.text()
)
CONFLISTS = st.builds(
    lambda more, plugins, version: {**more, "cniVersion": version, "plugins": plugins},
    st.dictionaries(st.text(), VALUES, max_size=3),
    st.lists(PLUGINS, min_size=1, max_size=4),
    st.sampled_from(["0.3.1", "0.4.0", "1.0.0", "1.1.0"]),
)


def text_of(document: Any, indent: int | None, ascii_only: bool) -> bytes:
    return json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")


@given(CONFLISTS, st.sampled_from([None, 0, 2]), st.booleans())
def test_what_is_chained_is_the_same_with_our_plugin_last_and_comes_back_byte_for_byte(
    document: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    content = text_of(document, indent, ascii_only)
    assume(all(plugin["type"] != OWN for plugin in document["plugins"]))
    chained = conflist.chained(content)
    assert chained is not None
    before, after = json.loads(content), json.loads(chained)
    assert after.pop("plugins") == [*before.pop("plugins"), {"type": "nodefabric"}]
    assert after == before
    assert conflist.chained(chained) is None
    assert conflist.unchained(chained) == content
    assert conflist.unchained(content) is None


def test_nothing_of_the_text_is_touched() -> None:
    chained = conflist.chained(CALICO)
    assert chained is not None
    assert chained == CALICO.replace(b"true}\n    }", b'true}\n    }, {"type": "nodefabric"}')


def test_what_the_main_plugin_changed_meanwhile_stays() -> None:
    chained = conflist.chained(CALICO)
    assert chained is not None
    changed = chained.replace(b'"mtu": 0', b'"mtu": 1440')
    assert conflist.unchained(changed) == CALICO.replace(b'"mtu": 0', b'"mtu": 1440')


def test_an_entry_in_another_place_or_twice_is_taken_out_too() -> None:
    entry, other = '{ "type" : "nodefabric" }', '{"type": "a"}'
    lists = [entry, other], [other, entry, other], [entry, entry, other], [entry, other, entry]
    for listed, before_other in itertools.product(lists, (" , ", ",")):
        plugins = " , ".join(listed).replace(f" , {other}", before_other + other)
        content = f'{{"cniVersion":"1.0.0","plugins":[{plugins}]}}'.encode()
        found = conflist.unchained(content)
        assert found is not None
        kinds_left = [plugin["type"] for plugin in json.loads(found)["plugins"]]
        assert kinds_left == ["a"] * listed.count(other)


def test_an_entry_with_settings_or_alone_is_its_authors() -> None:
    for plugins in ([{"type": "a"}, {"type": "nodefabric", "vlan": 3}], [{"type": "nodefabric"}]):
        content = json.dumps({"cniVersion": "1.0.0", "plugins": plugins}).encode()
        assert conflist.unchained(content) is None
        assert conflist.names_us(content)
        assert conflist.chained(content) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (CALICO[:-40], "is it being written"),
        (b"\xff", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[]", "no JSON object"),
        (b"{} {}", "something follows"),
        (b"{}", "no list 'plugins'"),
        (b'{"plugins": {}}', "no list 'plugins'"),
        (b'{"plugins": []}', "'plugins' is empty"),
        (b'{"plugins": [1]}', r"plugins\[0\] has no 'type'"),
        (b'{"plugins": [{"type": "a"}, {"type": 1}]}', r"plugins\[1\] has no 'type'"),
        (b'{"plugins": [{"type": "a"}]}', "cniVersion is '0.1.0'"),
        (b'{"cniVersion": "0.2.0", "plugins": [{"type": "a"}]}', "cniVersion is '0.2.0'"),
        (b'{"cniVersion": ["1.0.0"], "plugins": [{"type": "a"}]}', "cniVersion is"),
        (b'{"a": NaN, "plugins": [{"type": "a"}]}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_its_reason(content: bytes, problem: str) -> None:
    with pytest.raises(ConflistInvalid, match=problem):
        conflist.chained(content)
    with pytest.raises(ConflistInvalid, match=f"10-a.conflist: .*{problem}"):
        conflist.plan({"10-a.conflist": content})


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=20).map(lambda b: CALICO[:150] + b + CALICO[170:])))
def test_whatever_bytes_come_only_our_error_is_raised(content: bytes) -> None:
    for function in (conflist.chained, conflist.unchained, conflist.check):
        with suppress(ConflistInvalid):
            function(content)
    with suppress(ConflistInvalid):
        conflist.wrapped("10-a.conf", content)
    conflist.names_us(content)


def test_numbers_of_any_length_are_let_be() -> None:
    content = b'{"cniVersion": "1.0.0", "plugins": [{"type": "a", "n": ' + b"9" * 10_000 + b"}]}"
    chained = conflist.chained(content)
    assert chained is not None
    assert conflist.unchained(chained) == content


def test_a_key_that_is_there_twice_counts_the_last_time() -> None:
    content = b'{"plugins": [{"type": "x"}], "cniVersion": "1.0.0", "plugins": [{"type": "y"}]}'
    assert conflist.chained(content) == content[:-2] + b', {"type": "nodefabric"}]}'


def test_the_runtime_takes_the_first_by_bytes_of_what_libcni_reads() -> None:
    names = ["20-b.conflist", "10-a.conf.bak", "B.json", "a.conf", "10-a.conflist~", ".nodefabric-install-1", "conf"]
    assert conflist.candidates(names) == ["20-b.conflist", "B.json", "a.conf"]
    assert conflist.candidates(["é.conf", "z.conf", ".hidden.conf"]) == [".hidden.conf", "z.conf", "é.conf"]


def test_a_single_configuration_gets_a_conflist_before_it_that_holds_its_text() -> None:
    plan = conflist.plan({"10-b.conf": BRIDGE, "20-c.conflist": CALICO})
    assert (plan.network, plan.remove) == ("10-b.conf", ())
    assert plan.write is not None
    name, content = plan.write
    assert conflist.candidates(["10-b.conf", name, "10-a.conf", "10-b-.conf"])[-2:] == [name, "10-b.conf"]
    document = json.loads(content)
    assert (document["cniVersion"], document["name"]) == ("1.0.0", "b")
    assert document["plugins"] == [json.loads(BRIDGE), {"type": "nodefabric"}]
    assert BRIDGE.strip() in content
    assert conflist.plan({"10-b.conf": BRIDGE, name: content}).is_done
    assert conflist.wrapped_file(name, content) == "10-b.conf"


def test_a_wrapper_follows_what_it_wraps() -> None:
    name = "10-b-nodefabric.conflist"
    old = conflist.wrapped("10-b.conf", BRIDGE)
    changed = BRIDGE.replace(b"bridge", b"ptp")
    assert conflist.plan({"10-b.conf": changed, name: old}).write == (name, conflist.wrapped("10-b.conf", changed))
    assert conflist.plan({name: old}).remove == (name,)
    assert conflist.plan({"05-c.conf": BRIDGE, "10-b.conf": BRIDGE, name: old}).remove == (name,)
    assert conflist.plan({name: old, "10-b.conflist": CALICO}).remove == (name,)
    assert conflist.plan({}) == conflist.Plan(None)


def test_a_file_that_only_looks_like_a_wrapper_is_a_network() -> None:
    assert conflist.plan({"10-b-nodefabric.conflist": CALICO}).network == "10-b-nodefabric.conflist"


@pytest.mark.parametrize("missing", ["type", "name", "cniVersion"])
def test_a_single_configuration_that_lacks_something_is_refused(missing: str) -> None:
    document = json.loads(BRIDGE)
    del document[missing]
    with pytest.raises(ConflistInvalid, match=missing):
        conflist.wrapped("10-b.conf", json.dumps(document).encode())
