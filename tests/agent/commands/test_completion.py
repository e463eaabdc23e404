"""The completion scripts, run by the shells that they are for."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from agent.__main__ import _parser, main
from agent.commands.completion import SHELLS, script

(PARSERS,) = (action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
COMMANDS = list(PARSERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, and some files to complete."""
    made = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (made / shell).write_text(script(_parser(), shell))
    (made / "with space.yaml").touch()
    (made / "sub").mkdir()
    return made


def run(folder: Path, shell: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"nobody tries the completion for {shell}: install it (hack/setup --tests)")
    environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        [program, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def bash(folder: Path, *words: str) -> list[str]:
    """Complete the last of some words."""
    script = (
        'source ./bash; COMP_WORDS=(nodefabric "$@"); COMP_CWORD=$#; _shtab_nodefabric 2>/dev/null;'
        ' ((${#COMPREPLY[@]} == 0)) || printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = run(folder, "bash", "--norc", "-c", script, "bash", *words)
    assert done.stderr == ""
    return sorted(done.stdout.splitlines())


def fish(folder: Path, line: str) -> list[str]:
    done = run(folder, "fish", "--no-config", "-c", 'source ./fish; complete -C "$argv[1]"', line)
    assert done.stderr == ""
    return sorted(found.partition("\t")[0] for found in done.stdout.splitlines())


def test_bash_completes_commands_options_values_files_and_folders(folder: Path) -> None:
    assert bash(folder, "") == sorted(COMMANDS)
    assert bash(folder, "-") == ["--help", "--version", "-h"]
    assert bash(folder, "st") == ["status"]
    assert bash(folder, "status", "--o") == ["--output"]
    assert bash(folder, "status", "--output", "") == ["json", "text"]
    assert bash(folder, "status", "-o", "j") == ["json"]
    assert bash(folder, "run", "--log-level", "W") == ["WARNING"]
    assert bash(folder, "completion", "z") == ["zsh"]

    assert "with space.yaml" in bash(folder, "check-config", "with")
    assert bash(folder, "status", "--config", "wi") == ["with space.yaml"]
    assert bash(folder, "topology", "--root", "") == ["sub"]
    assert "--root" in bash(folder, "check-config", "--")


def test_fish_completes_the_same(folder: Path) -> None:
    assert set(COMMANDS) <= set(fish(folder, "nodefabric "))
    assert fish(folder, "nodefabric st") == ["status"]
    assert fish(folder, "nodefabric status --out") == ["--output"]
    assert fish(folder, "nodefabric status --output ") == ["json", "text"]
    assert fish(folder, "nodefabric status --config wi") == ["with space.yaml"]
    assert fish(folder, "nodefabric completion z") == ["zsh"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_sound(folder: Path, shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, shell, "-n", shell).returncode == 0
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == (folder / shell).read_text()


def test_no_option_has_a_value_without_a_word_for_it() -> None:
    for name, parser in PARSERS.items():
        for action in parser._actions:
            assert action.help, (name, action.option_strings)
            assert action.option_strings or action.metavar or action.choices
