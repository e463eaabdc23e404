"""Completion scripts for bash, zsh and fish, written from the described command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from agent.commands.described import Argument, Described

PROGRAM = "nodefabric"


def bash(commands: Sequence[Described], top: Sequence[Argument], nodes: Sequence[str]) -> str:
    """Write a script for bash 4 and later; it needs no bash-completion package."""
    lines = [
        f"# bash completion of {PROGRAM}: source this, or put it into /etc/bash_completion.d",
        "_nodefabric() {",
        '    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} kind=words words=""',
        "    COMPREPLY=()",
        '    case "$COMP_CWORD:${COMP_WORDS[1]}:$before" in',
        f"    1:*) words={_quoted(_words([c.name for c in commands], _names(top)))} ;;",
    ]
    for command in commands:
        for argument in command.arguments:
            if argument.names and argument.metavar:
                place = "|".join(f"*:{command.name}:{name}" for name in argument.names)
                lines.append(f"    {place}) {_bash_value(argument, nodes)} ;;")
        lines.append(f"    *:{command.name}:*) {_bash_rest(command, nodes)} ;;")
    return "\n".join(
        [
            *lines,
            "    esac",
            "    # A file's name may hold spaces: one to a line.",
            "    local IFS=$'\\n'",
            '    case "$kind" in',
            '    file) compopt -o filenames; COMPREPLY=($(compgen -f -- "$current")) ;;',
            '    folder) compopt -o filenames; COMPREPLY=($(compgen -d -- "$current")) ;;',
            "    node) compopt -o filenames",
            '        COMPREPLY=($(IFS=\' \'; compgen -W "$words" -- "$current"; compgen -f -- "$current")) ;;',
            '    words) COMPREPLY=($(IFS=\' \'; compgen -W "$words" -- "$current")) ;;',
            "    esac",
            "}",
            f"complete -F _nodefabric {PROGRAM}",
            "",
        ]
    )


def zsh(commands: Sequence[Described], top: Sequence[Argument], nodes: Sequence[str]) -> str:
    """Write a script for zsh's completion system, as a file `_nodefabric` in a folder of $fpath."""
    lines = [
        f"#compdef {PROGRAM}",
        f"# zsh completion of {PROGRAM}: as _nodefabric in a folder of $fpath",
        "_nodefabric() {",
        "    local -a commands",
        "    commands=(",
        *(f"        {_quoted(f'{c.name}:{_zsh_text(c.text)}')}" for c in commands),
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe -t commands command commands",
        f"        _arguments {' '.join(_zsh_argument(a, nodes) for a in top)}",
        "        return",
        "    fi",
        "    local chosen=$words[2]",
        "    shift words",
        "    (( CURRENT-- ))",
        '    case "$chosen" in',
    ]
    for command in commands:
        lines.append(f"    {command.name})")
        shown = " \\\n            ".join(_zsh_argument(a, nodes) for a in command.arguments)
        lines += [f"        _arguments -s \\\n            {shown}", "        ;;"]
    return "\n".join([*lines, "    esac", "}", '_nodefabric "$@"', ""])


def fish(commands: Sequence[Described], top: Sequence[Argument], nodes: Sequence[str]) -> str:
    """Write a script for fish, as a file `nodefabric.fish` in ~/.config/fish/completions."""
    start = f"complete -c {PROGRAM}"
    lines = [f"# fish completion of {PROGRAM}: in ~/.config/fish/completions/{PROGRAM}.fish", f"{start} -f"]
    names = " ".join(command.name for command in commands)
    none = f"-n {_quoted(f'not __fish_seen_subcommand_from {names}')}"
    lines += [f"{start} {none} -a {c.name} -d {_quoted(c.text)}" for c in commands]
    lines += [f"{start} {none} {_fish_argument(a, nodes)}" for a in top]
    for command in commands:
        seen = f"-n {_quoted(f'__fish_seen_subcommand_from {command.name}')}"
        lines += [f"{start} {seen} {told}" for a in command.arguments if (told := _fish_argument(a, nodes))]
    return "\n".join([*lines, ""])


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def _names(arguments: Sequence[Argument]) -> list[str]:
    return [name for argument in arguments for name in argument.names]


def _words(*groups: Sequence[str]) -> str:
    return " ".join(word for group in groups for word in group)


def _quoted(text: str) -> str:
    """Quote a text for bash and zsh; fish reads the same unless it holds a backslash."""
    return "'" + text.replace("'", "'\\''") + "'"


def _bash_value(argument: Argument, nodes: Sequence[str]) -> str:
    words = _words(nodes) if argument.takes == "node" else _words(argument.choices)
    return f"kind={argument.takes or 'words'} words={_quoted(words)}"


def _bash_rest(command: Described, nodes: Sequence[str]) -> str:
    """What may stand where no option waits for its value: options, or an argument without a name."""
    options = f"words={_quoted(_words(_names(command.arguments)))}"
    plain = next((a for a in command.arguments if not a.names), None)
    if plain is None:
        return options
    return f"if [[ $current == -* ]]; then {options}; else {_bash_value(plain, nodes)}; fi"


def _zsh_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:").replace("[", "\\[").replace("]", "\\]")


def _zsh_argument(argument: Argument, nodes: Sequence[str]) -> str:
    value = ""
    if argument.metavar:
        match argument.takes:
            case "file":
                action = "_files"
            case "folder":
                action = "_files -/"
            case "node":
                action = f"{{_alternative 'names:recorded node:({_words(nodes)})' 'files:file:_files'}}"
            case _:
                action = f"({_words(argument.choices)})" if argument.choices else " "
        value = f":{_zsh_text(argument.metavar)}:{action}"
    if not argument.names:
        return _quoted(value)
    others = f"({' '.join(argument.names)})" if len(argument.names) > 1 else ""
    shown = argument.text.replace("[", "\\[").replace("]", "\\]")
    return " ".join(_quoted(f"{others}{name}[{shown}]{value}") for name in argument.names)


def _fish_argument(argument: Argument, nodes: Sequence[str]) -> str:
    if not argument.names:
        return "-F" if argument.takes else f"-a {_quoted(_words(argument.choices))}" if argument.choices else ""
    names = [f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in argument.names]
    value = []
    if argument.metavar:
        words = _words(nodes) if argument.takes == "node" else _words(argument.choices)
        value = ["-r", *(["-F"] if argument.takes else ["-f"]), *([f"-a {_quoted(words)}"] if words else [])]
    return " ".join([*names, *value, f"-d {_quoted(argument.text)}"])
