"""The command line: ``tbbn run``, ``tbbn list`` and the others in :mod:`tbbn.bench.cli.commands`.

Data goes to standard output, progress to standard error.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from tbbn.bench.cli.commands import MODULES
from tbbn.bench.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_MISTAKE, Call
from tbbn.bench.cli.train import check_commas, take_settings
from tbbn.errors import UserError, printable, unknown_name


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line, which say what an argument that is missing should be."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            missing = re.findall(r"\w+", message)
            message = "; ".join(f"{a.metavar} is needed: {a.help}" for a in self._actions if a.metavar in missing)
        raise UserError(f"{message}; see {self.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parser, names = build_parser()
        if not words:
            raise UserError(f"a command is needed: {', '.join(names)}; tbbn run shows what this is, tbbn --help more.")
        if not words[0].startswith("-") and words[0] not in names:
            raise unknown_name("command", words[0], names)
        check_commas(words)
        settings, words = take_settings(words) if words[0] in ("run", "sweep") else ({}, words)
        chosen = parser.parse_args(words)
        chosen.settings = settings
        code: int = chosen.call(chosen)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(printable(f"tbbn: {error}"), file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("tbbn: interrupted; what was done is kept, and the same command goes on from there.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone; what is still in the buffer would fail again at the interpreter's end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            print(printable(f"tbbn: {error.filename}: {error.strerror}."), file=sys.stderr)
            return EXIT_MISTAKE
        if os.environ.get("TBBN_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['-'])[0]}"
        print(printable(f"tbbn: unexpected {what}; set TBBN_TRACEBACK=1 to see where."), file=sys.stderr)
        return EXIT_FAILED


def build_parser() -> tuple[Parser, list[str]]:
    """The parser, and the commands it knows."""
    import tbbn

    parser = Parser(prog="tbbn", description="Class-incremental learning with any method, any norm, any scenario.")
    parser.add_argument("--version", action="version", version=f"tbbn {tbbn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, call: Call, line: str, example: str) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        made = commands.add_parser(name, help=line, description=line, epilog=f"example: {example}", formatter_class=raw)
        made.set_defaults(call=call)
        return made

    for module in MODULES:
        module.add(command)
    return parser, list(commands.choices)


if __name__ == "__main__":
    sys.exit(main())
