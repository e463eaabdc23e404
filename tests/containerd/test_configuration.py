"""What doctor makes of containerd's configuration is what containerd makes of it, imports and all."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from agent.report.doctor import containerd_config
from tests.containerd import runtime

SECTION = '[plugins."io.containerd.grpc.v1.cri"'
SAID = {"said": f"{SECTION}]\nenable_cdi = true\n", "denied": f"{SECTION}]\nenable_cdi = false\n"}
OTHER = f'{SECTION}.registry]\nconfig_path = "/certs"\n'
ARRANGEMENTS: dict[str, dict[str, str]] = {
    "the main file alone": {"config.toml": SAID["said"]},
    "a drop-in": {"config.toml": 'imports = ["FOLDER/conf.d/*.toml"]\n', "conf.d/cdi.toml": SAID["said"]},
    "a file beside it, by its own name": {"config.toml": 'imports = ["cdi.toml"]\n', "cdi.toml": SAID["said"]},
    "the later of two": {
        "config.toml": 'imports = ["FOLDER/conf.d/*.toml"]\n',
        "conf.d/10.toml": SAID["said"],
        "conf.d/20.toml": SAID["denied"],
    },
    "a drop-in about something else": {
        "config.toml": 'imports = ["FOLDER/conf.d/*.toml"]\n' + SAID["said"],
        "conf.d/registry.toml": OTHER,
    },
    "imports within imports, and round in a circle": {
        "config.toml": 'imports = ["one/a.toml"]\n',
        "one/a.toml": 'imports = ["../two/b.toml", "../config.toml"]\n' + SAID["denied"],
        "two/b.toml": SAID["said"],
    },
}


@pytest.mark.parametrize("suite", ["trixie", "forky"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_cdi_is_on_where_containerd_has_it_on(tmp_path: Path, suite: str, arrangement: str) -> None:
    program = runtime.unpacked(suite) / "bin/containerd"
    if not program.exists():
        pytest.skip(f"no containerd of Debian's {suite}: hack/fetch-containerd fetches it")
    for name, text in ARRANGEMENTS[arrangement].items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("version = 2\n" + text.replace("FOLDER", str(tmp_path)))
    main = tmp_path / "config.toml"
    dumped = subprocess.run(
        [program, "--config", main, "config", "dump"], capture_output=True, text=True, timeout=60, check=True
    )
    plugins = tomllib.loads(dumped.stdout)["plugins"]
    (actual,) = [
        plugins[name]["enable_cdi"] for name in containerd_config.SECTIONS if "enable_cdi" in plugins.get(name, {})
    ]
    files, problem = containerd_config.read(Path("/"), PurePosixPath(main))
    assert problem == ""
    is_2 = suite == "forky"
    found = containerd_config.cdi(files, merges=is_2)
    assert (is_2 if found.enabled is None else found.enabled) == actual
