"""The command line. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tbbn.bench.cli import (
    analyse,
    completion,
    data,
    demo,
    inspect,
    interchange,
    report,
    reproduce,
    speed,
    train,
    verify,
)
from tbbn.bench.cli.common import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    EXIT_TIME_LIMIT,
    Call,
    TimeLimitReached,
)
from tbbn.bench.cli.settings import check_commas, split_plugins, split_settings
from tbbn.bench.cli.streams import droppable_stderr, fill_closed_descriptors, to_nowhere
from tbbn.bench.extras import require_bench
from tbbn.errors import UserError, printable, unknown_name
from tbbn.plugins import failure, load_plugin

_LONGEST = 4000  # characters of an error
MODULES = (
    demo,
    train,
    reproduce,
    inspect,
    report,
    analyse,
    verify,
    data,
    interchange,
    speed,
    completion,
)  # in the order of the help


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors that say what a missing argument should be."""

    @property
    def options(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            missing = re.findall(r"\w+", message)
            message = "; ".join(f"missing {a.metavar}: {a.help}" for a in self._actions if a.metavar in missing)
        raise UserError(f"{message}; see {self.prog} --help.")


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and the parsers of its commands by name."""
    import tbbn

    parser = Parser(prog="tbbn", description="Class-incremental learning: any method, norm, data set and scenario.")
    parser.add_argument("--version", action="version", version=f"tbbn {tbbn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, call: Call, line: str, example: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, help=line, description=line, epilog=f"example: {example}", formatter_class=raw)
        made.set_defaults(call=call)
        made.add_argument("--plugin", metavar="PLUGIN", help="load a module or a Python file first; may be repeated")
        return made

    for module in MODULES:
        module.add(command)
    return parser, dict(commands.choices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    fill_closed_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that its encoding lacks, as on standard error
        sys.stdout.reconfigure(errors="backslashreplace")
    with droppable_stderr():
        return _exit_code(list(sys.argv[1:] if arguments is None else arguments))


def _exit_code(words: list[str]) -> int:
    try:
        return _run(words)
    except UserError as error:
        if error.__cause__ is not None and os.environ.get("TBBN_TRACEBACK"):
            raise
        _print_error(str(error))
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("tbbn: interrupted; run the same command again to resume.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except TimeLimitReached as limit:
        saved = str(limit) or "everything is saved"
        print(f"tbbn: time limit reached, {saved}; run the same command again to continue.", file=sys.stderr)
        return EXIT_TIME_LIMIT
    except BrokenPipeError:
        to_nowhere(sys.stdout)  # the reader is gone, and flushing the rest at exit would fail again
        # Success if the reader of a list, such as head, has seen enough, but a failure if results of training were not read.
        return EXIT_FAILED if split_plugins(words)[1][0] in train.COMMANDS else 0
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            _print_error(f"{error.filename}: {error.strerror}.")
            return EXIT_MISTAKE
        if os.environ.get("TBBN_TRACEBACK"):
            raise
        what = (failure(error).splitlines() or ["-"])[0]
        unexpected = "" if what.partition(":")[0] != type(error).__name__ else "unexpected "
        _print_error(f"{unexpected}{what}; set TBBN_TRACEBACK=1 to see the traceback.")
        return EXIT_FAILED


def _print_error(text: str) -> None:
    """Print an error as one line. If it repeats megabytes of input, keep its beginning (the place) and its end (the fix)."""
    line = printable(f"tbbn: {text}")
    print(line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}", file=sys.stderr)


def _run(words: list[str]) -> int:
    parser, commands = build_parser()
    plugins, words = split_plugins(words)
    if not words:
        raise UserError(f"missing command: {', '.join(commands)}. Try tbbn demo, or tbbn --help.")
    if not words[0].startswith("-") and words[0] not in commands:
        raise unknown_name("command", words[0], commands)
    check_commas(words)
    settings: dict[str, Any] = {}
    if words[0] in commands and commands[words[0]].get_default("takes_settings"):
        settings, words = split_settings(words, commands[words[0]].options)
    rest: list[str] = []
    if words[0] in commands and commands[words[0]].get_default("takes_rest") and "--" in words:
        words, rest = words[: words.index("--")], words[words.index("--") + 1 :]
    args = parser.parse_args(words)
    args.settings, args.plugins, args.rest = settings, plugins, rest
    require_bench(args.command)
    for plugin in plugins:
        load_plugin(plugin)
    code = _call(args)
    if sys.stdout is None:
        print("tbbn: standard output is closed; the results could not be printed.", file=sys.stderr)
        return code or EXIT_FAILED
    sys.stdout.flush()
    return code


def _call(args: argparse.Namespace) -> int:
    """Do the command. Under torchrun, rank 0 does it, and the other ranks only take part in its training."""
    if args.command not in train.COMMANDS:
        return args.call(args)
    from tbbn.bench.cli.ranks import lead_or_follow

    return lead_or_follow(args)


if __name__ == "__main__":
    sys.exit(main())
