"""What the build of the image says when it fails; that it succeeds is seen in tests/daemonset/test_image.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDAH = """#!/bin/sh
case "$*" in *' build '*) echo 'no space for a layer'; exit 5 ;; esac
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the image is built by root")
def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    programs = {"buildah": BUILDAH, "debootstrap": "#!/bin/sh\n", "apt-get": "#!/bin/sh\n", "dpkg-deb": "#!/bin/sh\n"}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    built = subprocess.run(
        [ROOT / "hack/build-image", "amd64"], env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 5
    assert built.stderr == "no space for a layer\n"
