"""Private names of torch: one module has them all, and the layer is right without them."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tbbn
from tbbn.nn import private

PACKAGE = Path(tbbn.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != Path(private.__file__))
FOREACH = "torch._foreach_"  # what torch.optim is made of; there since torch 1.8

WITHOUT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tbbn.nn.private", sys.argv[1])
private = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # before any module takes a name from it
spec.loader.exec_module(private)
for name, (_, fallback) in private.FALLBACKS.items():
    setattr(private, name, fallback)
import torch, tbbn
from tbbn.nn import plan
assert plan.functorch_active is private.FALLBACKS["functorch_active"][1]
from literal import reshape_repeat
bn = torch.nn.BatchNorm2d(3, dtype=torch.float64)
bn.register_forward_hook(lambda layer, args, y: calls.append(y))
bn.register_load_state_dict_pre_hook(lambda layer, *args: calls.append(args))
calls, layer = [], tbbn.convert(torch.nn.Sequential(bn))
x = torch.randn(18, 3, 2, 2, dtype=torch.float64, requires_grad=True)
mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
for _ in range(2):
    with tbbn.balance(layer, current=12, memory=6, past_tasks=2):
        y = layer(x)
    expected = reshape_repeat(x, mean, var, None, None, 12, tbbn.splits(12, 6, 2))
torch.testing.assert_close(y, expected)
torch.testing.assert_close((layer[0].running_mean, layer[0].running_var), (mean, var))
v = torch.randn_like(y)
torch.testing.assert_close(torch.autograd.grad(y, x, v), torch.autograd.grad(expected, x, v))
plain = tbbn.revert(layer)
assert type(plain[0]) is torch.nn.BatchNorm2d and len(calls) == 2
torch.testing.assert_close(plain.eval()(x), torch.nn.functional.batch_norm(x, mean, var))
"""


def dotted(node):
    """``a.b.c`` of an attribute; empty for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def private_names(path):
    """Names of torch with a part that begins with one underscore."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            found = [dotted(node)]
        for name in found:
            first, *rest = name.split(".")
            if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest):
                yield name


def test_no_other_module_uses_a_private_name_of_torch():
    found = {(str(path.relative_to(PACKAGE)), name) for path in FILES for name in private_names(path)}
    assert {(path, name) for path, name in found if not name.startswith(FOREACH)} == set()


def test_this_torch_has_the_names():
    cuda_only = () if torch.cuda.is_available() else ("raw_stream", "current_device")
    missing = [n for n, (_, fallback) in private.FALLBACKS.items() if getattr(private, n) is fallback]
    assert [name for name in missing if name not in (*cuda_only, "global_hooks")] == []


def test_global_hooks_are_seen_without_torchs_own_answer():
    fallback = private.FALLBACKS["global_hooks"][1]
    assert not fallback()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert fallback()
    finally:
        handle.remove()
    assert not fallback()


def test_the_layer_is_right_without_any_of_them():
    path = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), str(PACKAGE.parent)])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, private.__file__],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(private.FALLBACKS))
def test_a_torch_without_the_name_gets_the_fallback(name, monkeypatch):
    monkeypatch.setitem(private.FALLBACKS, name, ("_C._no_such_name.at_all", private.FALLBACKS[name][1]))
    assert private._find(name) is private.FALLBACKS[name][1]


def test_an_export_is_known_by_its_flag(monkeypatch):
    assert not private.exporting()
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True, raising=False)
    assert private.exporting()
    monkeypatch.delattr(torch.compiler, "_is_exporting_flag")
    assert not private.exporting()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jit itself
def test_a_fallback_answers_on_the_safe_side():
    given = {name: fallback for name, (_, fallback) in private.FALLBACKS.items()}
    assert given["functorch_active"]() and given["dispatch_modes"]() == 1 and given["is_wrapped"](torch.zeros(1))
    assert given["graph_task"]() == -1 and given["saved_tensors_hooks"](False) is not None and given["binary"] is None
    tracing = []
    torch.jit.trace(lambda x: tracing.append(given["tracing_state"]()) or x, torch.zeros(1), check_trace=False)
    assert tracing == [True] and given["tracing_state"]() is None
    assert not given["global_hooks"]()
    assert not isinstance(lambda: None, given["WrappedHook"])


@pytest.mark.parametrize("name", ["functorch_active", "dispatch_modes", "tracing_state"])
def test_any_of_three_makes_a_transform(name, monkeypatch):
    values = {"functorch_active": False, "dispatch_modes": 0, "tracing_state": None}
    for key, value in values.items():
        monkeypatch.setattr(private, key, lambda value=value: value)
    assert private.under_transform() is False
    monkeypatch.setattr(private, name, lambda: 1)
    assert private.under_transform() is True


def test_the_tables_of_global_hooks_are_torchs(monkeypatch):
    module = vars(torch.nn.modules.module)
    named = [module[name] for name in module if re.fullmatch(r"_global_\w+_hooks", name)]
    assert len(named) >= 4 and [id(table) for table in private._hook_tables] == [id(table) for table in named]
    answer = private.FALLBACKS["global_hooks"][1]
    for tables, wanted in (([], True), ([{}, {}], False), ([{}, {1: print}], True)):  # without tables nobody knows
        monkeypatch.setattr(private, "_hook_tables", tables)
        assert answer() == wanted
