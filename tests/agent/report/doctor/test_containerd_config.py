"""containerd's configuration with its imports. That it is read as containerd does: tests/containerd."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.report.doctor.collect import runtime
from agent.report.doctor.containerd_config import MOST_FILES, Cdi, File, cdi, read

ON = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n'
OTHER = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".registry]\nconfig_path = "/certs"\n'
IMPORTS = 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "etc/containerd"
    (found / "conf.d").mkdir(parents=True)
    return found


def test_imports_are_found_below_the_hosts_root_and_read_in_order(folder: Path, tmp_path: Path) -> None:
    (folder / "config.toml").write_text('imports = ["conf.d/b.toml", "/etc/containerd/conf.d/*.toml", "last.toml"]\n')
    for name in ("conf.d/b.toml", "conf.d/a.toml", "conf.d/.c.toml", "conf.d/d.yaml", "last.toml"):
        (folder / name).write_text("")
    files, problem = read(tmp_path)
    assert problem == ""
    assert [file.path.removeprefix("/etc/containerd/") for file in files] == [
        *("config.toml", "conf.d/b.toml", "conf.d/.c.toml", "conf.d/a.toml", "last.toml")
    ]


def test_what_an_import_says_is_told_with_its_file(folder: Path, tmp_path: Path) -> None:
    (folder / "config.toml").write_text(IMPORTS)
    (folder / "conf.d/cdi.toml").write_text(ON)
    found = runtime(tmp_path, None)
    assert found is not None
    assert (found.enable_cdi, found.cdi_file, found.problem) == (True, "/etc/containerd/conf.d/cdi.toml", "")


def test_before_containerd_2_an_import_about_the_plugin_undoes_what_the_main_file_says(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "config.toml").write_text(IMPORTS + ON.removeprefix("version = 2\n"))
    (folder / "conf.d/registry.toml").write_text(OTHER)
    files, _ = read(tmp_path)
    assert cdi(files, merges=False) == Cdi(None, "/etc/containerd/conf.d/registry.toml")
    assert cdi(files, merges=True) == Cdi(True, "/etc/containerd/config.toml")
    found = runtime(tmp_path, None)
    assert found is not None
    assert not found.resolves_cdi
    assert found.cdi_file == "/etc/containerd/conf.d/registry.toml"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"config.toml": 'imports = ["gone.toml"]\n'}, "/etc/containerd/gone.toml is imported and is not there"),
        ({"config.toml": IMPORTS, "conf.d/bad.toml": "version = \n"}, "/etc/containerd/conf.d/bad.toml: "),
        ({"config.toml": IMPORTS, "conf.d/bad.toml": "\xff"}, "/etc/containerd/conf.d/bad.toml: "),
        ({"config.toml": IMPORTS, "conf.d/a.toml/b": ""}, "/etc/containerd/conf.d/a.toml: Is a directory"),
        ({"config.toml": IMPORTS} | {f"conf.d/{n}.toml": "" for n in range(MOST_FILES)}, "imports more than 100 files"),
    ],
)
def test_what_containerd_would_not_start_with_is_told(
    folder: Path, tmp_path: Path, files: dict[str, str], problem: str
) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode("latin-1"))
    assert problem in read(tmp_path)[1]
    found = runtime(tmp_path, None)
    assert found is not None
    assert problem in found.problem


@pytest.mark.parametrize("imports", ["3", "[3]", '[""]', "[]"])
def test_imports_of_a_strange_shape_are_passed_over(folder: Path, tmp_path: Path, imports: str) -> None:
    (folder / "config.toml").write_text(f"imports = {imports}\n")
    files, problem = read(tmp_path)
    assert ([file.path for file in files], problem) == (["/etc/containerd/config.toml"], "")


def test_without_a_main_file_nothing_is_said(tmp_path: Path) -> None:
    assert read(tmp_path) == ((), "")
    assert cdi((), merges=True) == Cdi()
    assert cdi((File("a", {"plugins": {"cri": {"enable_cdi": False}}}),), merges=True) == Cdi(False, "a")
