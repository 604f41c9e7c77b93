"""Statistics over ranks: two gloo processes against one, and what the layer does without other processes."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import rank_cases
import torch
from torch import nn

import tbbn
from tbbn.errors import UserError
from tbbn.nn import sync
from tbbn.nn.plan import make_layout


def run_ranks(folder, names):
    """Run the cases in one pair of processes: starting a pair for each would take seconds."""
    processes = [
        subprocess.Popen(
            [sys.executable, rank_cases.__file__, str(rank), str(folder), *names], stderr=subprocess.PIPE, text=True
        )
        for rank in range(rank_cases.RANKS)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(rank_cases.RANKS)]


@pytest.mark.parametrize(
    "names", [rank_cases.CASES, pytest.param(rank_cases.NIGHTLY, marks=pytest.mark.nightly)], ids=["all", "rare"]
)
def test_two_ranks_equal_one(names, tmp_path):
    for rank, results in enumerate(run_ranks(tmp_path, names)):
        for name, failed in results.items():
            assert not failed, f"{name}, rank {rank}: {failed}"
        assert results.keys() == names.keys()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(2), nn.BatchNorm1d(4))


@pytest.mark.filterwarnings("ignore:A training forward outside")
def test_without_other_processes_nothing_changes():
    synced, single = tbbn.convert(network(), sync=True), tbbn.convert(network())
    x = torch.randn(16, 3, 6, 6)
    for past in (0, 3):
        with (
            tbbn.balance(synced, current=12, memory=4, past_tasks=past),
            tbbn.balance(single, current=12, memory=4, past_tasks=past),
        ):
            assert torch.equal(synced(x), single(x))
    assert torch.equal(synced(x), single(x))
    assert torch.equal(synced.eval()(x), single.eval()(x))
    assert all(torch.equal(a, b) for a, b in zip(synced.buffers(), single.buffers(), strict=True))


def test_the_layer_says_that_it_synchronises():
    model = tbbn.convert(network(), sync=True)
    assert "sync=True" in repr(model[1]) and "sync=True" in repr(copy.deepcopy(model)[4])
    assert "sync" not in repr(tbbn.convert(network())[1])


def test_a_process_group_alone_asks_for_synchronisation():
    group = object()
    layer = tbbn.convert(nn.BatchNorm2d(4), process_group=group)
    assert layer.sync and layer.process_group is group
    assert not tbbn.convert(nn.BatchNorm2d(4)).sync and type(tbbn.convert(nn.BatchNorm2d(4), "bn")) is nn.BatchNorm2d


def test_a_torch_without_distributed_has_one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")
    assert sync.ranks_in(None) == 1


def test_a_layout_stays_itself_where_nothing_is_synchronised():
    layout = make_layout(12, 4, None, 3, None)
    assert sync.share_counts(layout, {}) is layout
    assert sync.share_counts(layout, {None: torch.device("cpu")}, [(12, 4)]) is layout  # one process


def test_output_statistics_are_not_synchronised():
    with pytest.raises(UserError, match="output_statistics is not synchronised"):
        tbbn.convert(network(), sync=True, output_statistics=True)


def test_what_is_missing_is_looked_for_at_any_depth():
    for norm, message in (
        (nn.SyncBatchNorm(3), "convert_sync_batchnorm replaces them by SyncBatchNorm"),
        (nn.BatchNorm2d(3), r"has no task-balanced layer; call tbbn.convert\(model\) once"),
        (nn.Identity(), "has no batch norm, so there is nothing to balance"),
    ):
        model = nn.Module()
        model.deep = nn.Sequential(nn.Sequential(nn.ReLU(), norm))
        with pytest.raises(UserError, match=f"balance: Module .*{message}"):
            tbbn.balance(model, current=12, memory=4, past_tasks=3)


def test_after_convert_sync_batchnorm_the_error_says_so():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(tbbn.convert(network()))
    with pytest.raises(UserError, match=r"convert_sync_batchnorm .* call tbbn.convert\(model, sync=True\)"):
        tbbn.balance(model, current=12, memory=4, past_tasks=3)


def test_sync_batch_norm_becomes_a_layer_that_synchronises_and_itself_again():
    group = object()  # of no process: nothing is initialised here
    model = nn.SyncBatchNorm.convert_sync_batchnorm(network(), process_group=group)
    before = [vars(model[i]).keys() for i in (1, 4)]
    converted = tbbn.convert(copy.copy(model))
    single, x = tbbn.convert(network()), torch.randn(16, 3, 6, 6)
    with (
        tbbn.balance(converted, current=12, memory=4, past_tasks=3),
        tbbn.balance(single, current=12, memory=4, past_tasks=3),
    ):
        assert torch.equal(converted(x), single(x))
    assert all(converted[i].sync and converted[i].process_group is group for i in (1, 4))
    assert tbbn.convert(converted)[1] is converted[1]
    tbbn.convert(converted, rule="uneven")
    assert converted[1].sync and converted[1].options.rule == "uneven"
    reverted = tbbn.revert(converted)
    assert [type(reverted[i]) for i in (1, 4)] == [nn.SyncBatchNorm] * 2 and reverted[4].process_group is group
    assert [vars(reverted[i]).keys() for i in (1, 4)] == before
    assert torch.equal(reverted.eval()(x), single.eval()(x))


def test_a_batch_norm_reverts_to_a_batch_norm():
    model = tbbn.revert(tbbn.convert(network(), sync=True))
    assert type(model[1]) is nn.BatchNorm2d and vars(model[1]).keys() == vars(nn.BatchNorm2d(4)).keys()


def test_sync_batch_norm_is_not_desynchronised_silently():
    with pytest.raises(UserError, match="norm 'brn' does not take its statistics over ranks"):
        tbbn.convert(nn.Sequential(nn.SyncBatchNorm(3)), "brn")
    with pytest.raises(UserError, match="norm 'gn' does not take its statistics over ranks"):
        tbbn.convert(network(), "gn", groups=2, sync=True)


def test_a_lazy_layer_synchronises():
    model = tbbn.convert(nn.Sequential(nn.LazyBatchNorm2d()), sync=True)
    model(torch.randn(4, 3, 2, 2))
    assert model[0].sync


@pytest.mark.parametrize("accelerator", [None, torch.device("meta")])
def test_counts_are_sent_from_the_device_of_the_layer_or_of_this_machine(accelerator, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    for options, wanted in (
        ({"affine": False, "track_running_stats": False}, accelerator or torch.device("cpu")),  # it has no tensor
        ({"affine": False}, torch.device("cpu")),
        ({"affine": False, "device": "meta"}, torch.device("meta")),
        ({"track_running_stats": False, "device": "meta"}, torch.device("meta")),
    ):
        model = tbbn.convert(nn.Sequential(nn.BatchNorm2d(4, **options)), sync=True)
        block = tbbn.balance(model, current=3, memory=1, past_tasks=1)
        assert block.groups == {None: wanted}
