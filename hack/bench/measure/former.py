"""A former version of the project, built beside this one, to be measured in the same rounds."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Version:
    """What plays: a checkout's agent, None for this one's, and its relay."""

    relay: Path
    code: Path | None = None


def build(revision: str, folder: Path) -> Version:
    """Unpack a commit into `folder`, and build its relay. Its agent runs on the packages of this checkout's .venv.

    Raises SystemExit if there is no such commit, or it does not build.
    """
    try:
        code = unpack(revision, folder)
        python = {"PYTHON": str(CHECKOUT / ".venv/bin/python")}
        subprocess.run([code / "hack/build-shim", "native"], check=True, env={**os.environ, **python})
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        raise SystemExit(f"--against {revision}: {said or error}") from error
    return Version(code / "build/shim/native/nodefabric-cni", code)


def unpack(revision: str, folder: Path) -> Path:
    """Unpack a commit into a folder below `folder`. Raises CalledProcessError if there is no such commit."""
    found = _run("git", "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    code = folder / found[:12]
    if not code.exists():
        with tarfile.open(fileobj=io.BytesIO(_run("git", "archive", found))) as archive:
            archive.extractall(code.with_suffix(".new"), filter="data")
        code.with_suffix(".new").rename(code)
    return code


def _run(*command: str) -> bytes:
    return subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True).stdout
