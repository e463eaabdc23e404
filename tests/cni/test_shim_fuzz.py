"""The relay's C code under sanitizers: a short run of hack/fuzz-shim, and what it agrees on with the agent's side."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from cni import protocol

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests/cni/shim_corpus"
SEED = 20261121
SECONDS = 12


def fuzz(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        str(ROOT / "hack/fuzz-shim"),
        "--output",
        str(output),
        "--report",
        str(output / "report.json"),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fuzzer, after a run through all targets."""
    folder = tmp_path_factory.mktemp("fuzz")
    done = fuzz(folder, "--seconds", str(SECONDS), "--seed", str(SEED))
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
            protocol.decode_answer(path.read_bytes())
            expected = True
        except protocol.FrameInvalid:
            expected = False
        assert (verdict == "complete") is expected, (verdict, path.read_bytes()[:40])
    assert {"complete", "partial", "malformed"} == set(verdicts)


BUGS = {
    "answer": ("frame.c", "received->length < FRAME_HEAD)", "received->length < FRAME_HEAD - 1)"),
    "link": ("link.c", '"it closed the connection inside an answer"', '""'),
    "report": ("report.c", "at[i] < low || at[i] > high", "at[i] > high"),
    "request": ("frame.c", "put(at, value, length + 1);", "put(at, value, length);"),
    "spool": ("spool.c", "return n == 0 && same == request->length;", "return false;"),
    "wait": ("deadline.c", "weight /= 10)", "weight /= 9)"),
}


@pytest.mark.parametrize("target", BUGS)
def test_a_fault_in_the_code_is_found_and_its_input_kept(tmp_path: Path, target: str) -> None:
    name, sound, faulty = BUGS[target]
    shutil.copytree(ROOT / "cni/shim", tmp_path / "shim")
    source = tmp_path / "shim" / name
    assert sound in source.read_text()
    source.write_text(source.read_text().replace(sound, faulty))
    done = fuzz(tmp_path / "out", "--shim", str(tmp_path / "shim"), "--seconds", "3", target)
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads((tmp_path / "out/report.json").read_text())["fuzz_crashes"] > 0
    assert list((tmp_path / "out").glob(f"crash-{target}-*"))
