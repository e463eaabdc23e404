"""The relay's C code under sanitizers: a short run of hack/fuzz-shim, and what it agrees on with the agent's side."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.errors import RequestInvalid
from cni import netconf
from tests import frames
from tests.cni.test_shim_pass import PREVIOUS

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests/cni/shim_corpus"
SEED = 20261121
SECONDS = 5


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fuzzer, after a run through all targets."""
    folder = tmp_path_factory.mktemp("fuzz")
    report = ["--output", str(folder), "--report", str(folder / "report.json")]
    command = [str(ROOT / "hack/fuzz-shim"), *report, "--seconds", str(SECONDS), "--seed", str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_nothing_stops_the_relays_code(built: Path) -> None:
    report = json.loads((built / "report.json").read_text())
    print(f"{report['fuzz_executions']} inputs tried")
    assert report["fuzz_crashes"] == 0
    assert {name for name, counts in report["fuzz_targets"].items() if counts["executions"] > 64} == {
        path.name for path in CORPUS.iterdir()
    }


def test_relay_and_agent_take_the_same_bytes_for_an_answer(built: Path, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    files = sorted((CORPUS / "answer").iterdir())
    for number in range(2000):
        content = bytearray(chance.choice(files).read_bytes()[:200] if chance.random() < 0.8 else b"NFC1")
        for _ in range(chance.randint(0, 3)):
            content[chance.randint(0, len(content)) :] = chance.randbytes(chance.randint(0, 6))
            if len(content) > 8 and chance.random() < 0.6:
                content[4:8] = (len(content) - 8).to_bytes(4, "big")
        path = tmp_path / str(number)
        path.write_bytes(content)
        files.append(path)
    shown = subprocess.run([built / "fuzz", "answer", "--replay", *files], capture_output=True, text=True, check=True)
    verdicts = shown.stdout.splitlines()
    assert len(verdicts) == len(files)
    for path, verdict in zip(files, verdicts, strict=True):
        try:
            frames.decode_answer(path.read_bytes())
            expected = True
        except ValueError:
            expected = False
        assert (verdict == "complete") is expected, (verdict, path.read_bytes()[:40])
    assert {"complete", "partial", "malformed"} == set(verdicts)


TYPES: list[Any] = ["nodefabric"] * 12 + ["sriov", "", None, 7]
NAMES: list[Any] = ["cluster"] * 6 + ["a b", "", None, 7]
VERSIONS: list[Any] = ["1.0.0"] * 8 + ["0.3.0", "1.1.0", "0.4.0", None, "2.0.0"]
RUNTIME: list[Any] = [
    *({}, None, {"portMappings": [{"hostPort": 80}]}, {"deviceID": "0000:3b:02.1"}, {"deviceID": ""}),
    *({"PciBusId": "0000:3b:02.1"}, {"mac": "no mac"}, {"mac": ""}, {"infinibandGUID": "x"}, [], "x"),
    *({"bandwidth": {"deviceID": "x"}}, {"CNIDeviceInfoFile": "/x"}),
]
KEYS: list[tuple[str, list[Any]]] = [
    *(("deviceID", ["0000:3b:02.1", ""]), ("DeviceID", ["0000:3b:02.1"]), ("pciBusID", ["0000:3b:02.1"])),
    *(("pf", [["ens1f0"], []]), ("master", ["ens1f0"]), ("mode", ["vf", "ipoib", "x"]), ("vlan", [7, "x"])),
    *(("ipam", [{}, {"type": "host-local"}]), ("args", [{"cni": {"guid": "x"}}, {}]), ("mac", ["x", ""])),
    *(("dns", [{}, {"nameservers": ["ä"]}]), ("capabilities", [{"mac": True}]), ("logLevel", ["debug"])),
    *(("disableCheck", [True]), ("cniVersions", [["1.0.0"]]), ("unheard-of", [1, None])),
]
SPOILT = (
    b'"',
    b"{",
    b"}",
    b",",
    b":",
    b"[",
    b"]",
    b"\\u0065",
    b"\\",
    b"\xff",
    b"null",
    b'"type":"nodefabric",',
    b"1e9",
    b" ",
)


def some_configuration(chance: random.Random) -> bytes:
    document: dict[str, Any] = {
        "cniVersion": chance.choice(VERSIONS),
        "name": chance.choice(NAMES),
        "type": chance.choice(TYPES),
    }
    for key in chance.sample(sorted(document), chance.choice((0, 0, 0, 0, 0, 1))):
        del document[key]
    if chance.random() < 0.9:
        document["prevResult"] = {**PREVIOUS, "cniVersion": chance.choice(VERSIONS)}
    if chance.random() < 0.3:
        document["runtimeConfig"] = chance.choice(RUNTIME)
    for key, values in chance.sample(KEYS, chance.choice((0, 0, 0, 1, 2))):
        document[key] = chance.choice(values)
    order = chance.sample(sorted(document), len(document))
    text = json.dumps({key: document[key] for key in order}, ensure_ascii=chance.random() < 0.5).encode()
    for _ in range(chance.choice((0, 0, 0, 1, 1, 2))):
        at = chance.randint(0, len(text))
        text = text[:at] + chance.choice((*SPOILT, b"")) + text[at + chance.choice((0, 0, 1, 3)) :]
    return text


def test_what_the_relay_lets_through_the_agent_would_let_through_unchanged(built: Path, tmp_path: Path) -> None:
    chance = random.Random(20261123)
    texts = [some_configuration(chance) for _ in range(4000)]
    files = [tmp_path / f"{number:04}" for number in range(len(texts))]
    for path, text in zip(files, texts, strict=True):
        path.write_bytes(text)
    shown = subprocess.run([built / "fuzz", "netconf", "--replay", *files], capture_output=True, text=True, check=True)
    verdicts = shown.stdout.splitlines()
    assert len(verdicts) == len(texts)
    read, refused = 0, list[str]()
    for text, verdict in zip(texts, verdicts, strict=True):
        if verdict == "asked":
            continue
        try:
            conf = netconf.parse(text)
        except RequestInvalid as error:
            # Of what another plugin answered the relay looks at the version alone, and at no key inside of a value.
            keys = json.loads(text, object_pairs_hook=lambda pairs: [key for key, _ in pairs])
            if not str(error).startswith("prevResult") and not ("twice" in str(error) and len(set(keys)) == len(keys)):
                refused.append(str(error))
            continue
        assert conf.is_chained, text
        assert conf.mac is None, text
        assert (conf.prev_result is not None) is (verdict == "passed"), text
        assert conf.prev_result is None or conf.prev_result["cniVersion"] == conf.cni_version, text
        read += 1
    assert refused == []
    assert verdicts.count("passed") > 100
    assert read > 150
