"""``tbbn import`` turns settings of other programs into a recipe; ``tbbn export`` writes a network for other programs."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tbbn.bench.cli.common import Command, add_data_root
from tbbn.errors import UserError, printable

_IMPORT_EXAMPLE = "tbbn import facil -- --approach lucir --num-tasks 10 --nc-first-task 50 --num-exemplars 2000"


def add(command: Command) -> None:
    line = "Convert FACIL flags or a PyCIL JSON config to a recipe, and list the differences."
    made = command("import", _import, line, _IMPORT_EXAMPLE)
    made.set_defaults(takes_rest=True)
    made.add_argument("program", metavar="PROGRAM", help="facil (its flags after --) or pycil (its JSON file)")
    made.add_argument("file", metavar="FILE", nargs="?", help="pycil: the JSON file")
    made.add_argument(
        "--out", metavar="RECIPE.toml", help="the recipe to write (default: PROGRAM.toml, or FILE with .toml)"
    )
    made.add_argument("--overwrite", action="store_true", help="overwrite an existing recipe")
    made.add_argument("--json", action="store_true", help="print the converted settings as JSON")
    line = "Export a network with plain batch norm to safetensors and ONNX, with a model card."
    made = command("export", _export, line, "tbbn export runs/demo/ft-tbbn-0")
    made.add_argument("run", metavar="RUN", type=Path, help="the folder of a run")
    made.add_argument(
        "--task", type=int, help="export the network after this task, from 1 (default: the last one learnt)"
    )
    made.add_argument("--out", metavar="FOLDER", type=Path, help="output folder (default: exports/NAME-OF-RUN)")
    made.add_argument("--overwrite", action="store_true", help="replace the export of another run")
    add_data_root(made)
    made.add_argument("--json", action="store_true", help="print what was written and checked as JSON")


def _export(args: argparse.Namespace) -> int:
    from tbbn.bench.interchange.export import export

    task = "" if args.task is None else f"-task-{args.task}"
    out = args.out or Path("exports") / f"{args.run.resolve().name}{task}"
    done = export(args.run, out, task=args.task, overwrite=args.overwrite, root=args.root)
    if args.json:
        found = {"folder": str(out), "checked": list(done.checked), "not_checked": list(done.not_checked)}
        print(json.dumps(found, indent=1))
        return 0
    for line in done.checked:
        print(f"checked: {line}")
    for line in done.not_checked:
        print(f"not checked: {line}")
    print(printable(f"wrote {out}; its README.md says how to use it"))
    return 0


def _import(args: argparse.Namespace) -> int:
    from tbbn.bench.files import write_atomic
    from tbbn.bench.interchange.facil import import_facil
    from tbbn.bench.interchange.pycil import import_pycil

    if args.program == "facil":
        if not args.rest or args.file:
            raise UserError(f"tbbn import facil needs FACIL's flags after --: {_IMPORT_EXAMPLE}")
        found, title = import_facil(args.rest), f"From FACIL: {' '.join(args.rest)}"
    elif args.program == "pycil":
        if not args.file or args.rest:
            raise UserError("tbbn import pycil needs a PyCIL config: tbbn import pycil exps/icarl.json")
        found, title = import_pycil(Path(args.file)), f"From PyCIL: {args.file}"
    else:
        raise UserError(f"tbbn import takes facil or pycil, got {args.program!r:.60}.")
    out = Path(args.out or (f"{Path(args.file).stem}.toml" if args.file else f"{args.program}.toml"))
    text = found.recipe(printable(title))
    if out.exists() and not args.overwrite:
        raise UserError(f"{out}: exists; choose another file with --out, or add --overwrite.")
    write_atomic(out, text.encode())
    if args.json:
        lines = [{"kind": line.kind, "given": line.given, "here": line.here} for line in found.lines]
        print(json.dumps({"recipe": str(out), "settings": found.settings, "lines": lines}, indent=1))
        return 0
    for line in found.lines:
        print(printable(str(line)))
    counts = Counter(line.kind for line in found.lines)
    print(f"\n{', '.join(f'{count} {kind}' for kind, count in counts.items())}.")
    print(printable(f"wrote {out}; look at it with tbbn run {out} --dry-run"))
    return 0
