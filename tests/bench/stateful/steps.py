"""The machine's steps: how they are drawn, what they do, and what each must leave.

A step is a dictionary of plain values, so that a failing sequence can be printed and replayed. No step depends on an
earlier one: any of them may be dropped.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forked import CRASHED, Child, Ended, Fault, command
from world import CHECKPOINTS, FOLDERS, NEEDS_ROOM, SEEDS, SWEEP, TRAIN, Broken, Known, World

from tbbn.bench.runs.overwrite import LIST

Step = dict[str, Any]
READ = ("report", "show", "verify")
BALLAST = "ballast"  # the file that fills the disk
# What a refusal may offer. Of these, `recover` follows all that change a folder.
WAYS = (
    "--overwrite",
    "--name",
    "elete ",
    "tbbn resume ",
    "wait for it",
    "run the same command again",
    "such as ",
    "no run here",
)


def draw(dice: random.Random, world: World) -> Step:
    """A step at random."""
    kind = dice.choices(("train", "read", "damage", "second"), (50, 12, 25, 13))[0]
    if kind == "damage":
        how = dice.choice(("flip", "cut", "empty", "delete"))
        return {"do": "damage", "file": dice.random(), "how": how, "at": dice.random()}
    if kind == "second":
        scope = dice.choice(("files", "all"))
        pause = [scope, int(world.lines[scope] * dice.random())]
        first = _draw_training(dice)
        other = _draw_reading(dice) if dice.random() < 0.3 else _draw_training(dice)
        if dice.random() < 0.5:  # in the same folder, and if it can, with another run
            other = {**first, "seed": dice.choice(SEEDS), "overwrite": dice.random() < 0.5}
        return {
            "do": "second",
            "first": first,
            "pause": pause,
            "other": other,
            "then": dice.choice(("continue", "kill")),
        }
    step = _draw_training(dice) if kind == "train" else _draw_reading(dice)
    if dice.random() < (0.65 if kind == "train" else 0.3):
        step["fault"] = _draw_fault(dice, world, small=kind == "read")
    return step


def _draw_training(dice: random.Random) -> Step:
    lanes = dice.choice(("1", "1", "2"))
    if dice.random() < 0.2:
        where = dice.choice((*FOLDERS, SWEEP, "."))
        return {"do": "resume", "where": where, "lanes": lanes}
    name = dice.choice(("a", "a", SWEEP))
    do = {"a": "run", SWEEP: "sweep"}[name]
    if dice.random() < 0.1:  # a run in a sweep's folder, or the other way round
        do = "run" if do == "sweep" else "sweep"
    return {"do": do, "name": name, "seed": dice.choice((0, 0, 1)), "lanes": lanes, "overwrite": dice.random() < 0.25}


def _draw_reading(dice: random.Random) -> Step:
    do = dice.choice(READ)
    return {"do": do, "where": dice.choice(FOLDERS if do == "show" else (*FOLDERS, SWEEP, "."))}


def _draw_fault(dice: random.Random, world: World, small: bool) -> Step:
    kind = dice.choices(("kill", "term", "hangup", "ctrl-c", "twice", "disk"), (35, 8, 6, 13, 20, 18))[0]
    if kind == "disk":
        return {"kind": kind, "free": int(600_000 * dice.random() ** 2)}
    scope = dice.choice(("files", "files", "all"))
    first = int(world.lines[scope] * (0.15 if small else 1.2) * dice.random())
    return {"kind": kind, "scope": scope, "lines": [first, first + dice.randrange(1, 200)][: 1 + (kind == "twice")]}


# Doing a step. -----------------------------------------------------------------------------------------------------------

NUMBERS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "hangup": signal.SIGHUP,
    "ctrl-c": signal.SIGINT,
    "twice": signal.SIGINT,
}


def do(world: World, step: Step) -> bool:
    """Do a step and check everything; False if there was nothing to do."""
    if step["do"] == "damage":
        if not _damage(world, step):
            return False
        for folder in FOLDERS:
            world.check(Path(folder))
    elif step["do"] == "second":
        _second(world, step)
    else:
        with _kept(world, step):
            must = "fault" not in step and _must_succeed(world, step)
            ended = _with_fault(world, words_of(step), step.get("fault"))
            check_outcome(world, step, ended, step.get("fault"))
            if must and ended.code:
                raise Broken(f"refused: nothing is in the way, but: {ended.code} {ended.err}")
    return True


@contextmanager
def _kept(world: World, step: Step) -> Iterator[None]:
    """Check that the folders know at its end what they knew before, or what the command has put in its place."""
    before = {folder: world.check(Path(folder)) for folder in FOLDERS}
    yield
    for folder, old in before.items():
        replacing = _seeds(step, folder) if step.get("overwrite") else []
        _check_kept(folder, old, world.check(Path(folder)), replacing)


def words_of(step: Step) -> list[str]:
    """A step as a command line."""
    if step["do"] in READ:
        return [step["do"], step["where"]]
    if step["do"] == "resume":
        return ["resume", step["where"], "--lanes", step["lanes"], "--quiet"]
    seeds = ["--seed", str(step["seed"])] if step["do"] == "run" else ["--seeds", str(len(SEEDS))]
    overwrite = ["--overwrite"] if step["overwrite"] else []
    return [step["do"], *TRAIN, *seeds, "--name", step["name"], "--lanes", step["lanes"], "--quiet", *overwrite]


def _with_fault(world: World, words: list[str], fault: Step | None) -> Ended:
    if fault is None:
        return command(words)
    if fault["kind"] != "disk":
        number = NUMBERS[fault["kind"]]
        return command(words, Fault(fault["scope"], tuple((line, number) for line in fault["lines"])))
    if not world.is_mounted:
        return command(words, Fault(file_bytes=fault["free"]))
    disk = os.statvfs(".")
    with open(BALLAST, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, disk.f_bavail * disk.f_frsize - fault["free"]))
    try:
        return command(words)
    finally:
        os.unlink(BALLAST)


def _second(world: World, step: Step) -> None:
    """Hold a process somewhere in its work, let another one work to its end, and then let the first go on, or kill it."""
    (scope, lines), first, other = step["pause"], step["first"], step["other"]
    child = Child(words_of(first), Fault(scope, ((lines, signal.SIGSTOP),)))
    try:
        with _kept(world, first):
            is_held = child.stopped()
            if not is_held:
                check_outcome(world, first, child.ended(), None)
        with _kept(world, other):
            check_outcome(world, other, command(words_of(other)), None)
    except BaseException:
        if is_held:
            child.send(signal.SIGKILL)
            child.ended()
        raise
    if is_held:
        with _kept(world, first):
            child.send(signal.SIGCONT if step["then"] == "continue" else signal.SIGKILL)
            check_outcome(world, first, child.ended(), {"kind": "kill"} if step["then"] == "kill" else None)


def _damage(world: World, step: Step) -> bool:
    """Flip a bit of a file of a run or a sweep, cut it, empty it or delete it."""
    places = [path for folder in (*FOLDERS, SWEEP) for path in sorted(Path(folder).glob("*")) if path.is_file()]
    files = [file for file in places if file.name not in (".lock", "accuracy.png", "log.jsonl")]
    if not files:
        return False
    file = files[int(step["file"] * len(files))]
    content = bytearray(file.read_bytes())
    if step["how"] == "delete" or not content:
        file.unlink()
        return True
    place = int(step["at"] * len(content))
    if step["how"] == "flip":
        content[place] ^= 1 << int(step["at"] * 8e6) % 8
    else:
        del content[0 if step["how"] == "empty" else place :]
    file.unlink()  # it may be a hard link to another one
    file.write_bytes(content)
    world.damaged.add(hashlib.sha256(content).hexdigest())
    return True


# What a step must leave. -------------------------------------------------------------------------------------------------


def _seeds(step: Step, folder: str) -> list[int]:
    """The seeds whose runs a command may put into a folder."""
    if step["do"] == "sweep":
        return [seed for seed in SEEDS if folder == f"{step['name']}/ft-tbbn-{seed}"]
    joined = f"{step.get('name')}/ft-tbbn-{step.get('seed')}"  # where a run goes that finds a sweep
    return [step["seed"]] if step["do"] == "run" and folder in (step["name"], joined) else []


def _check_kept(folder: str, old: Known | None, new: Known | None, replacing: Iterable[int]) -> None:
    if old is None:
        return
    if new is not None:
        knows = (new.recorded, new.tasks, new.finished)
        if new.seed == old.seed and all(
            a >= b for a, b in zip(knows, (old.recorded, old.tasks, old.finished), strict=True)
        ):
            return
        if new.seed in replacing and new.recorded >= 0:
            return
    raise Broken(f"lost: {folder} knew {old}, now {new}")


def _must_succeed(world: World, step: Step) -> bool:
    """Whether nothing that a command needs is missing, damaged, or another run's."""
    if step["do"] not in ("run", "resume") or step.get("name", step.get("where")) != "a":
        return False
    folder, known = Path("a"), world.known(Path("a"))
    if (folder / "runs.toml").exists() or any(entry.is_dir() for entry in folder.glob("*")):
        return False  # it is a sweep's
    if folder.exists() and not all(world.intact(file) for file in folder.iterdir() if file.is_file()):
        return False
    if step["do"] == "resume":
        return known is not None and known.recorded >= 0
    return known is None or step["overwrite"] or (known.seed == step["seed"] and not (folder / LIST).exists())


def check_outcome(world: World, step: Step, ended: Ended, fault: Step | None) -> None:
    """Raise `Broken` unless a command did its work, ended by the signal it got, or refused in one line with a way out."""
    lines = [line for line in ended.err.splitlines() if not line.startswith("tbbn: stopping after this step")]
    said = [line for line in lines if line.startswith("tbbn: ") or " is the folder of a sweep" not in line]
    kind, what = (fault or {}).get("kind"), f"{words_of(step)} {fault}: {ended.code}\n{ended.err}"
    if ended.code == CRASHED or "Traceback" in ended.err or "unexpected" in ended.err:
        raise Broken(f"traceback: {what}")
    if ended.code == 0:
        if step["do"] not in READ:
            _check_done(world, step, ended.err)
    elif ended.code == 130:
        if kind not in ("term", "hangup", "ctrl-c", "twice") or said[-1:] != [
            "tbbn: interrupted; run the same command again to resume."
        ]:
            raise Broken(f"interrupted: {what}")
    elif ended.code < 0:
        if kind is None or -ended.code != NUMBERS.get(kind):
            raise Broken(f"died: {what}")
    elif step["do"] == "verify" and ended.code == 1:
        if "FAILED" not in ended.out or said:
            raise Broken(f"refusal: {what}\n{ended.out}")
    else:
        _check_refusal(ended, said, kind == "disk", what)
        if "no run here" in ended.err and any(world.known(Path(folder)) for folder in _targets(step)):
            raise Broken(f"refusal: there is a run: {what}")


def _check_refusal(ended: Ended, said: list[str], is_full: bool, what: str) -> None:
    reasons = [line for line in said if line.startswith("tbbn: ")]
    if ended.code == 2 and (ended.out or len(said) != 1):
        raise Broken(f"refusal: not one line: {what}\n{ended.out}")
    if ended.code == 1 and not reasons:
        raise Broken(f"refusal: no reason: {what}\n{ended.out}")
    for line in reasons:
        if not any(way in line for way in WAYS) and not (is_full and any(full in line for full in NEEDS_ROOM)):
            raise Broken(f"refusal: no way out: {what}")


def _targets(step: Step) -> list[str]:
    if "where" in step:
        return [f for f in FOLDERS if step["where"] == "." or f == step["where"] or f.startswith(f"{step['where']}/")]
    return [folder for folder in FOLDERS if _seeds(step, folder)]


def _check_done(world: World, step: Step, said: str) -> None:
    """After a command that says it did its work, every run is finished, and what a checkpoint knows is in its files."""
    joined = re.search(r"this run joins it, in (\S+)\.$", said, re.MULTILINE)
    only = (joined[1] if joined else step["name"]) if step["do"] == "run" else None
    for name in _targets(step):
        if only not in (None, name):
            continue
        folder = Path(name)
        if step["do"] == "resume" and not (folder / "record.json").exists():
            continue  # nothing to resume there
        known = world.known(folder)
        if known is None or not known.finished:
            raise Broken(f"done: {step} leaves {name} with {known}")
        states = [state for file in CHECKPOINTS if (state := world.state(folder / file)) is not None]
        if any(len(state["record"]["accuracy"]) == known.tasks for state in states):
            for file in ("config.toml", "predictions.safetensors"):
                if not world.intact(folder / file):
                    raise Broken(f"done: {step} leaves {name}/{file} damaged or missing")


def recover(world: World) -> None:
    """Finish every run, following the way out of each refusal."""
    known = world.known(Path("a"))
    run = {"do": "run", "name": "a", "seed": known.seed if known else 0, "lanes": "1", "overwrite": False}
    for step in (run, {"do": "sweep", "name": SWEEP, "lanes": "1", "overwrite": False}):
        said: list[str] = []
        for _ in range(12):
            ended = command(words_of(step))
            check_outcome(world, step, ended, None)
            if ended.code == 0:
                break
            said.append(ended.err)
            _follow(step, ended.err)
        else:
            raise Broken(f"recover: nothing helps: {said[-3:]}")
        for folder in _targets(step):
            world.check(Path(folder))


def _follow(step: Step, said: str) -> None:
    """Do what a refusal proposes."""
    if "--overwrite" in said:
        step["overwrite"] = True
    elif "Delete the folder of the run" in said:
        found = re.search(r"(\S+)/checkpoint", said)
        assert found is not None
        shutil.rmtree(found[1])
    elif found := re.search(r"tbbn: (\S+): .*delete (it|the file)", said):
        Path(found[1]).unlink()
    elif found := re.search(r"tbbn resume (\S+)", said):
        command(["resume", found[1], "--quiet"])
    elif "delete the folder" in said and (found := re.search(r"tbbn: (\S+): is the folder of", said)):
        shutil.rmtree(found[1])
    else:
        raise Broken(f"recover: {said} has no way out that can be followed")
