"""Import FACIL's command line as a recipe, including the flags that the paper's authors added to it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from tbbn.bench.interchange.imported import Imported, no_counterpart
from tbbn.errors import UserError

METHODS = {"finetuning": "ft"} | {name: name for name in ("joint", "lucir", "eeil", "bic", "icarl", "il2m", "ssil")}
DATA = {"cifar100": "cifar100", "cifar100_icarl": "cifar100", "imagenet_subset": "imagenet100"}
DATA |= {name: name for name in ("mnist", "svhn")}
NETWORKS = {"mobilenet_v2": "mobilenet-v2", "shufflenet_v2_x1_0": "shufflenet-v2", "mnasnet0_5": "mnasnet-0.5"}
NETWORKS |= {name: name for name in ("resnet32", "resnet18", "resnet34")}
NORMS = {"custom_split_bn": "bn", "tbbn": "tbbn", "InstanceNorm": "in", "BatchReNorm": "brn", "SwitchNorm": "sn"}

# FACIL's flags and their defaults. Flags without a value have the default False.
FLAGS: dict[str, Any] = {
    "approach": "finetuning", "datasets": ["cifar100"], "network": "resnet32", "num_tasks": 4, "nc_first_task": 0,
    "stop_at_task": 0, "batch_size": 64, "nepochs": 200, "lr": 0.1, "lr_min": 1e-4, "lr_factor": 3.0, "lr_patience": 5,
    "clipping": 10000.0, "momentum": 0.0, "weight_decay": 0.0, "seed": 0, "num_exemplars": 0,
    "num_exemplars_per_class": 0, "exemplar_selection": "random",
    # Added by the paper's authors.
    "batch_ratio": 3, "lr_scheduler": "multisteplr", "bn_momentum": 0.1, "cn_num": 0, "gn": 16,
    "custom_split_bn": False, "tbbn": False, "cn": False, "InstanceNorm": False, "GroupNorm": False,
    "BatchReNorm": False, "SwitchNorm": False,
}  # fmt: skip
AUTHORS = tuple(FLAGS)[tuple(FLAGS).index("batch_ratio") :]
# Our methods' options, by FACIL's approach and flag.
OPTIONS = {
    "lucir": {"lamb": "less_forget", "lamb_mr": "ranking", "dist": "margin", "K": "top_k"},
    "eeil": {
        "lamb": "kd",
        "T": "temperature",
        "lr_finetuning_factor": "balanced_lr_factor",
        "nepochs_finetuning": "balanced_epochs",
    },
    "bic": {"T": "temperature", "val_exemplar_percentage": "held_out", "num_bias_epochs": "correction_epochs"},
    "icarl": {"lamb": "kd"},
}
DEFAULT_OPTIONS = {"eeil": {"lr_finetuning_factor": 0.01}}  # FACIL's defaults that differ from ours
SWITCHES = {"remove_less_forget": "method.less_forget", "remove_margin_ranking": "method.ranking"}  # each sets it to 0
# Flags without a counterpart here: whether they take a value, and the reason.
WITHOUT: dict[str, tuple[bool, str]] = {
    "gpu": (True, "the device is chosen when the recipe runs: --device cuda:0"),
    "results_path": (True, "the folder is chosen when the recipe runs: --out"),
    "exp_name": (True, "the folder is chosen when the recipe runs: --name"),
    "log": (True, "loggers are chosen when the recipe runs: --log tensorboard"),
    "save_models": (False, "every run keeps its network: tbbn export"),
    "last_layer_analysis": (False, "not measured"),
    "no_cudnn_deterministic": (False, "runs are deterministic; --autotune trades that for speed"),
    "num_workers": (True, "images are kept on the device"),
    "pin_memory": (True, "images are kept on the device"),
    "use_valid_only": (False, "results are on test images"),
    "keep_existing_head": (False, "every network starts from fresh weights"),
    "pretrained": (False, "every network starts from fresh weights"),
    "warmup_nepochs": (True, "it trains the new head alone; train.warmup only raises the learning rate"),
    "warmup_lr_factor": (True, "see warmup-nepochs"),
    "multi_softmax": (False, "the loss is over all classes so far"),
    "fix_bn": (False, "statistics are never fixed after the first task"),
    "eval_on_train": (False, "losses are in the record; accuracies are on test images"),
    "gridsearch_tasks": (True, "settings are the same in every task"),
    "all_outputs": (False, "the loss is always over all classes so far"),
    "remove_adapt_lamda": (False, "LUCIR's weight always grows with the number of old classes"),
    "noise_grad": (False, "gradients get no noise"),
    "fix_batch": (True, "batches always have a fixed ratio of new to old rows"),
    "amp": (True, "the precision is chosen when the recipe runs: --precision bf16"),
    "seperate_batch": (True, "--batch.forward separate does it"),
    "bn_splits": (True, "the number of splits follows from the batch"),
    "LayerNorm": (False, "not among the norms here"),
    "eval_train_mode": (False, "evaluation is in eval mode"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"tbbn import facil: {message}.")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, default in FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, dest=name, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, dest=name, nargs="+")
        else:
            parser.add_argument(flag, dest=name, type=type(default))
    for name in dict.fromkeys(flag for options in OPTIONS.values() for flag in options):
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=float)
    for name in SWITCHES:
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, action="store_true")
    for name, (has_value, _) in WITHOUT.items():
        flag = f"--{name.replace('_', '-')}"
        if has_value:
            parser.add_argument(flag, dest=name, nargs="*")
        else:
            parser.add_argument(flag, dest=name, action="store_true")
    return parser


def import_facil(words: Sequence[str]) -> Imported:
    """The recipe for a FACIL command line: its flags, and FACIL's defaults for missing ones."""
    known, unknown = _parser().parse_known_args(list(words))
    given = vars(known)
    args = argparse.Namespace(**{**FLAGS, **given}, by_authors=any(name in given for name in AUTHORS))
    found = Imported()

    def shown(name: str) -> str:
        flag = f"--{name.replace('_', '-')}"
        value = getattr(args, name)
        text = " ".join(map(str, value)) if isinstance(value, list) else "" if value is True else f"{value}"
        return f"{flag} {text}".rstrip() + ("" if name in given else " (FACIL's default)")

    if args.by_authors:
        found.take("flags that the paper's authors added to FACIL", protocol="paper")
    _data(found, args, shown)
    _method(found, args, given, shown)
    _memory(found, args, shown)
    _training(found, args, shown)
    _norm(found, args, given, shown)
    for name, (_, why) in WITHOUT.items():
        if name in given:
            found.miss(shown(name), why)
    for word in unknown:
        if word.startswith("-"):
            found.miss(word, "not a flag of FACIL that is known here")
    return found


def _data(found: Imported, args: argparse.Namespace, shown: Any) -> None:
    for name in args.datasets:
        if name not in DATA:
            raise no_counterpart("FACIL's data set", name, DATA)
    found.take(shown("datasets"), data__name="+".join(DATA[name] for name in args.datasets))
    has_order = any(name in ("cifar100_icarl", "imagenet_subset") for name in args.datasets)
    if has_order:
        found.take(f"class order of {' '.join(args.datasets)}", data__class_order="icarl")
    n_tasks = args.num_tasks * len(args.datasets)
    found.take(shown("num_tasks"), data__tasks=n_tasks)
    if args.nc_first_task:
        found.take(shown("nc_first_task"), data__base_classes=args.nc_first_task)
    if args.stop_at_task:
        found.take(shown("stop_at_task"), data__stop_after=args.stop_at_task)
    found.take("a tenth of the images for validation (FACIL's default)", data__validation=0.1, train__keep="best")
    found.take(shown("seed"), seed=args.seed)
    if args.network in NETWORKS:
        found.take(shown("network"), backbone=NETWORKS[args.network])
    else:
        found.miss(shown("network"), "the data set's default network is used; tbbn list backbones shows all")


def _method(found: Imported, args: argparse.Namespace, given: dict[str, Any], shown: Any) -> None:
    if args.approach not in METHODS:
        raise no_counterpart("FACIL's approach", args.approach, METHODS)
    found.take(shown("approach"), method__name=METHODS[args.approach])
    options = OPTIONS.get(args.approach, {})
    for flag, value in DEFAULT_OPTIONS.get(args.approach, {}).items():
        if flag not in given:
            setattr(args, flag, value)
            found.take(shown(flag), **{f"method__{options[flag]}": value})
    for flag in dict.fromkeys(name for names in OPTIONS.values() for name in names):
        if flag in given and flag in options:
            value = given[flag]
            whole = options[flag] in ("top_k", "balanced_epochs", "correction_epochs")
            found.take(shown(flag), **{f"method__{options[flag]}": int(value) if whole else value})
        elif flag in given:
            found.miss(shown(flag), f"{METHODS[args.approach]} has no such option")
    for flag, name in SWITCHES.items():
        if flag in given and args.approach == "lucir":
            found.take(shown(flag), **{name.replace(".", "__"): 0.0})
        elif flag in given:
            found.miss(shown(flag), "an option of LUCIR only")
    if args.approach == "finetuning" and not (args.num_exemplars or args.num_exemplars_per_class):
        found.differ(
            "finetuning without exemplars", "FACIL's loss is over the classes of the task, here over all so far"
        )


def _memory(found: Imported, args: argparse.Namespace, shown: Any) -> None:
    if args.num_exemplars_per_class:
        found.take(
            shown("num_exemplars_per_class"), memory__budget=args.num_exemplars_per_class, memory__per_class=True
        )
    else:
        found.take(shown("num_exemplars"), memory__budget=args.num_exemplars)
    found.take(shown("exemplar_selection"), memory__selection=args.exemplar_selection)
    rounding = {"memory__rounding": "ceil", "memory__shrink": "reselect"}
    found.take("exemplars per class rounded up, and selected again after each task", **rounding)
    if args.by_authors:
        found.take(shown("batch_ratio"), batch__ratio=f"{args.batch_ratio}:1")
    elif args.num_exemplars or args.num_exemplars_per_class:
        why = "FACIL shuffles exemplars into the task's images; here every batch has this ratio of new to old rows"
        found.differ("batches of task and exemplars", why, batch__ratio="3:1")


def _training(found: Imported, args: argparse.Namespace, shown: Any) -> None:
    found.take(shown("batch_size"), batch__size=args.batch_size)
    found.take(shown("lr"), train__lr=args.lr)
    if args.by_authors and args.lr_scheduler == "multisteplr":
        found.take(shown("nepochs"), train__epochs=args.nepochs)
        found.take(shown("lr_scheduler"), train__schedule="multistep")
        found.take(shown("lr_factor"), train__gamma=1 / args.lr_factor)
    else:
        found.differ(shown("nepochs"), "FACIL may stop earlier, see lr-patience", train__epochs=args.nepochs)
        why = (
            "FACIL divides the learning rate when the validation loss stalls; here it falls at half and three quarters"
        )
        given = ", ".join(shown(name) for name in ("lr_patience", "lr_factor", "lr_min"))
        found.differ(given, why, train__schedule="multistep")
    found.take(shown("momentum"), train__momentum=args.momentum)
    found.take(shown("weight_decay"), train__weight_decay=args.weight_decay)
    found.take(shown("clipping"), train__clip_norm=args.clipping)


def _norm(found: Imported, args: argparse.Namespace, given: dict[str, Any], shown: Any) -> None:
    for flag, name in NORMS.items():
        if getattr(args, flag):
            found.take(shown(flag), norm__name=name)
    if args.GroupNorm:
        found.take(f"--GroupNorm {shown('gn')}", norm__name="gn", norm__groups=args.gn)
    if args.cn:
        groups = {"norm__groups": args.cn_num} if args.cn_num else {}
        found.take(f"--cn {shown('cn_num')}" if args.cn_num else "--cn", norm__name="cn", **groups)
    if "bn_momentum" in given:
        found.take(shown("bn_momentum"), norm__momentum=args.bn_momentum)
