"""``tbbn completion bash|zsh|fish``: a script that completes commands, options, settings and registered names.

The script is generated from the parsers, so that it knows every command. It does not start Python when a key is pressed.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

from tbbn.bench import config as cfg
from tbbn.bench.cli import reproduce
from tbbn.bench.cli.catalogue import LISTS
from tbbn.bench.cli.common import Command
from tbbn.errors import unknown_name

_NAMES = {  # for each option or argument: the list of names that it takes
    "--norm": "norms", "--method": "methods", "--data": "datasets", "--backbone": "backbones",
    "--batch.augment": "augmentations", "recipe": "recipes",
}  # fmt: skip


class Word(NamedTuple):
    """An option: its help, whether it takes a value, and its known values."""

    help: str
    takes_value: bool
    values: tuple[str, ...]


class Known(NamedTuple):
    """The possible words after a command."""

    line: str
    arguments: tuple[str, ...]
    files: bool  # whether files are possible, too
    options: dict[str, Word]


def add(command: Command) -> None:
    line = "Print a shell completion script."
    made = command("completion", _completion, line, "tbbn completion bash >> ~/.bashrc")
    made.add_argument("shell", metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


def _completion(args: argparse.Namespace) -> int:
    if args.shell not in SHELLS:
        raise unknown_name("shell", args.shell, SHELLS)
    print(SHELLS[args.shell](_commands()), end="")
    return 0


def _commands() -> dict[str, Known]:
    from tbbn.bench.cli.main import build_parser

    parser, commands = build_parser()
    lines = {choice.dest: choice.help or "" for a in parser._actions for choice in getattr(a, "_choices_actions", ())}
    return {name: _known(command, lines[name]) for name, command in commands.items()}


def _known(parser: argparse.ArgumentParser, line: str) -> Known:
    arguments: list[str] = []
    options: dict[str, Word] = {}
    files = False
    if parser.get_default("takes_settings"):
        for s in cfg.SETTINGS.values():
            values = ("true", "false") if s.kind in (bool, "bool") else s.choices or _names(f"--{s.name}")
            options[f"--{s.name}"] = Word(s.help, True, tuple(values))
    for action in parser._actions:
        values = tuple(map(str, action.choices or ())) or _names(action.dest if not action.option_strings else "")
        if not action.option_strings:
            arguments += values
            files |= not values or action.dest == "recipe"
        for option in action.option_strings:
            word = Word(action.help or "", action.nargs != 0, values or _names(option))
            options |= {option: word} if option.startswith("--") else {}
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                options |= _known(inner, "").options
    return Known(line, tuple(arguments), files, options)


def _names(of: str) -> tuple[str, ...]:
    if of == "what":
        return tuple(LISTS)
    if of == "shell":
        return tuple(SHELLS)
    if of == "name":
        return tuple(reproduce.names())
    return tuple(name for name in LISTS[_NAMES[of]]() if "+" not in name) if of in _NAMES else ()


def _bash(commands: dict[str, Known]) -> str:
    by_values: dict[tuple[str, ...], list[str]] = {}
    for name, known in commands.items():
        for option, word in known.options.items():
            if word.takes_value:
                by_values.setdefault(word.values, []).append(f'"{name} {option}"')
    values = [f"        {'|'.join(patterns)}) words={_quoted(values)} ;;" for values, patterns in by_values.items()]
    others = [
        f"        {name}' '*) words={_quoted((*known.arguments, *known.options))} ;;"
        for name, known in commands.items()
    ]
    return "\n".join(
        [
            '# Completion of tbbn in bash: eval "$(tbbn completion bash)"',
            "_tbbn() {",
            "    local word=${COMP_WORDS[COMP_CWORD]} words= before=",
            '    case "${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in',
            *values,
            *others,
            "    esac",
            f'    [ "$COMP_CWORD" -gt 1 ] || words={_quoted(commands)}',
            '    case "$word" in *,*) before="${word%,*}," ;; esac  # a list: complete what follows the last comma',
            '    COMPREPLY=($(compgen -P "$before" -W "$words" -- "${word##*,}"))',
            "}",
            "complete -o bashdefault -o default -F _tbbn tbbn\n",
        ]
    )


def _zsh(commands: dict[str, Known]) -> str:
    first = "autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n"
    return first + _bash(commands).replace("bash", "zsh", 2)


def _fish(commands: dict[str, Known]) -> str:
    lines = ["# Completion of tbbn in fish: tbbn completion fish | source"]
    for name, known in commands.items():
        lines.append(f"complete -c tbbn -n __fish_use_subcommand -xa {name} -d {shlex.quote(known.line)}")
        after = f"complete -c tbbn -n {shlex.quote(f'__fish_seen_subcommand_from {name}')}"
        if known.arguments:
            lines.append(f"{after}{'' if known.files else ' -f'} -a {_quoted(known.arguments)}")
        for option, word in known.options.items():
            value = f" -xa {_quoted(word.values)}" if word.values else " -r" if word.takes_value else ""
            lines.append(f"{after} -l {option.removeprefix('--')}{value} -d {shlex.quote(word.help)}")
    return "\n".join(lines) + "\n"


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


SHELLS: dict[str, Any] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
