"""Blocks of ``balance`` in threads and asyncio tasks, left out of order, and repeated by checkpointing."""

import asyncio
import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import replicate
from torch.utils.checkpoint import checkpoint

import tbbn
from tbbn.errors import UserError
from tbbn.nn import active, mistakes
from tbbn.nn.plan import Layout
from tbbn.nn.sync import RankLayout

EIGHT, SIX = {"current": 8, "memory": 4, "past_tasks": 2}, {"current": 6, "memory": 6, "past_tasks": 3}
OUTSIDE = "A training forward outside tbbn.balance"
quiet = pytest.mark.filterwarnings(f"ignore:{OUTSIDE}")


def network(norm="tbbn", **options):
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)]
    return tbbn.convert(nn.Sequential(*layers), norm, **options).double()


def images(seed=1, n=12):
    return torch.randn(n, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).double()


def alone(layout, seed=1, norm="tbbn"):
    """The output of a fresh network whose block is the only one."""
    model = network(norm)
    if layout is None:
        return model(images(seed))
    with tbbn.balance(model, **layout):
        return model(images(seed))


# -- threads and tasks


def test_threads_have_layouts_of_their_own():
    model, entered = network(), threading.Barrier(2, timeout=20)

    def train(layout, seed):
        with tbbn.balance(model, **layout):
            entered.wait()  # both threads are inside
            y = model(images(seed))
            entered.wait()
        return y

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(train, EIGHT, 1), pool.submit(train, SIX, 2)
        torch.testing.assert_close(first.result(), alone(EIGHT, 1))
        torch.testing.assert_close(second.result(), alone(SIX, 2))
    assert len(model.eval()(images(n=5))) == 5


@quiet
def test_a_second_thread_does_not_see_the_layout_of_the_first():
    model = network()
    with tbbn.balance(model, **EIGHT), ThreadPoolExecutor(1) as pool:
        torch.testing.assert_close(pool.submit(model, images()).result(), alone(None))
        torch.testing.assert_close(model(images()), alone(EIGHT))


def test_asyncio_tasks_have_layouts_of_their_own():
    model = network()

    async def train(layout, seed):
        with tbbn.balance(model, **layout):
            await asyncio.sleep(0)  # the other task enters its block
            y = model(images(seed))
            await asyncio.sleep(0)
        return y

    async def both():
        return await asyncio.gather(train(EIGHT, 1), train(SIX, 2))

    first, second = asyncio.run(both())
    torch.testing.assert_close(first, alone(EIGHT, 1))
    torch.testing.assert_close(second, alone(SIX, 2))


def test_one_block_object_serves_several_threads():
    model = network()
    block = tbbn.balance(model, **EIGHT)

    def train():
        for _ in range(20):
            with block, block:
                model(images())
        with block:
            return model(images())

    with ThreadPoolExecutor(4) as pool:
        for y in [pool.submit(train) for _ in range(4)]:
            torch.testing.assert_close(y.result(), alone(EIGHT))


@quiet
def test_blocks_may_be_left_out_of_order():
    model = network()
    first, second = tbbn.balance(model, **EIGHT), tbbn.balance(model, **SIX)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    torch.testing.assert_close(model(images()), alone(SIX))
    second.__exit__(None, None, None)
    torch.testing.assert_close(model(images()), alone(None))


def test_data_parallel_is_refused_and_replicas_have_layouts_of_their_own():
    layer = tbbn.TaskBalancedBatchNorm2d(2).double()
    with tbbn.balance(layer, **EIGHT), pytest.raises(UserError, match=r"nn.DataParallel splits the batch"):
        layer._replicate_for_data_parallel()
    assert replicate  # it calls the method above for every module
    replica = layer._replicate_for_data_parallel()
    assert type(replica) is type(layer) and replica is not layer and replica._is_replica
    copies = [copy.deepcopy(layer) for _ in range(2)]
    with tbbn.balance(copies[0], **EIGHT), tbbn.balance(copies[1], **SIX):
        torch.testing.assert_close(copies[0](images()), _single(EIGHT))
        torch.testing.assert_close(copies[1](images()), _single(SIX))


def _single(layout):
    layer = tbbn.TaskBalancedBatchNorm2d(2).double()
    with tbbn.balance(layer, **layout):
        return layer(images())


# -- the warning


def test_a_training_forward_outside_warns_once_and_only_after_a_block():
    model = network()
    model(images())  # never balanced so far: it may be an ordinary model
    with tbbn.balance(model, **EIGHT):
        model(images())
    model.eval()(images())
    with pytest.warns(UserWarning, match=OUTSIDE) as seen:
        model.train()(images())
    assert len(seen) == 1  # not one a layer
    assert seen[0].filename == __file__  # the call of the model, not of a layer in torch's Sequential
    with tbbn.balance(model, **EIGHT):
        model(images())
    model(images())
    other = copy.deepcopy(model)
    other(images())


@pytest.mark.filterwarnings("error")
def test_any_layer_warns_of_a_forward_outside():
    model = network()
    model[1].eval()  # fine-tuning often freezes the statistics of the first layers
    with tbbn.balance(model, **EIGHT):
        model(images())
    with pytest.warns(UserWarning, match=OUTSIDE) as seen:
        model(images())
    assert len(seen) == 1
    model.train()(images())


@pytest.mark.filterwarnings("error")
def test_layers_that_need_no_layout_are_not_watched():
    model = network()
    model[1] = tbbn.convert(nn.BatchNorm2d(6).double(), "bn", sync=True)
    with tbbn.balance(model, **EIGHT):
        model(images())
    model[1](model[0](images()))
    with pytest.warns(UserWarning, match=OUTSIDE):
        model(images())


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_leaves_no_block_behind(three_are_many):
    model = network()
    for _ in range(2):
        with tbbn.balance(model, current=12, memory=0, past_tasks=2):
            model(images())
    with (
        pytest.raises(UserWarning, match=r"3 tbbn\.balance blocks"),
        tbbn.balance(model, current=12, memory=0, past_tasks=2),
    ):
        raise AssertionError("the block was entered")
    assert active.find(model[1]) is None


@pytest.fixture
def three_are_many(monkeypatch):
    monkeypatch.setattr(mistakes, "MANY", 3)
    monkeypatch.setattr(mistakes, "_given", set())


def test_a_block_that_was_forgotten_is_said_once_a_process(three_are_many):
    model, used, plain = network(), network(), tbbn.convert(network("bn"), "bn", sync=True)
    with tbbn.balance(used, current=12, memory=0, past_tasks=0):
        used(images())
    for _ in range(5):
        model.eval()(images())
        plain(images())  # batch norm over ranks, which is what it is for
    model.train()(images())
    model(images())
    with pytest.warns(
        UserWarning, match=r"3 training forwards, none inside tbbn.balance: .* memory=0, past_tasks=0\.$"
    ) as seen:
        model(images())
    assert len(seen) == 1  # not one a layer
    assert seen[0].filename == __file__
    model(images())
    other = copy.deepcopy(model)
    for _ in range(5):
        other(images())


def test_blocks_that_never_balance_anything_are_said_once_a_process(three_are_many):
    rows = torch.arange(12)
    wrong = {"labels": rows, "current_classes": range(40, 50), "past_tasks": 4}  # no label is in the range
    model, once, first = network(), network(), network()
    with tbbn.balance(once, current=8, memory=4, past_tasks=4):
        once(images())
    for _ in range(5):
        for one, layout in ((once, wrong), (first, {"current": 12, "memory": 0, "past_tasks": 0})):
            with tbbn.balance(one, **layout):
                one(images())
    for _ in range(2):
        with tbbn.balance(model, **wrong):
            model(images())
    said = r"3 tbbn.balance blocks with past_tasks=4, .*current=0, memory=12\).* rows as one batch"
    with pytest.warns(UserWarning, match=said) as seen, tbbn.balance(model, **wrong):
        model(images())
    assert len(seen) == 1 and seen[0].filename == __file__
    other = copy.deepcopy(model)
    for _ in range(5):
        with tbbn.balance(other, **wrong):
            other(images())


@pytest.mark.filterwarnings("error")
def test_forwards_outside_after_a_block_are_not_called_forgotten(three_are_many):
    model = network()
    with tbbn.balance(model, **EIGHT):
        model(images())
    with pytest.warns(UserWarning, match=OUTSIDE):
        model(images())
    for _ in range(5):
        model(images())


@pytest.mark.parametrize("norm", ["adab2n", "bn"])
@pytest.mark.filterwarnings("error")
def test_norms_that_are_not_batch_norm_without_memory_rows_do_not_warn(norm, three_are_many):
    model = network(norm, **({"sync": True} if norm == "bn" else {}))
    for _ in range(5):
        with tbbn.balance(model, is_memory=[False] * 12, past_tasks=2, task_ids=[2] * 12):
            model(images())


@pytest.mark.filterwarnings("error")
def test_blocks_are_counted_by_task_and_with_the_rows_of_all_ranks(three_are_many):
    model = network()
    for past_tasks in (1, 2, 3):
        for _ in range(2):
            with tbbn.balance(model, current=12, memory=0, past_tasks=past_tasks):
                model(images())
    block = tbbn.balance(model, **EIGHT)  # no warning of this task any more
    with block:
        model(images())
    mistakes.entering_block(block.layers, RankLayout(12, 0, 3, counts={None: ((12, 0), (4, 8))}))
    for _ in range(2):
        mistakes.entering_block(block.layers, RankLayout(12, 0, 4, counts={None: ((12, 0), (12, 0))}))
    with pytest.warns(UserWarning, match="3 tbbn.balance blocks with past_tasks=4"):
        mistakes.entering_block(block.layers, RankLayout(12, 0, 4, counts={None: ((12, 0), (12, 0))}))
    for _ in range(4):
        mistakes.entering_block(network()[1:2], RankLayout(12, 0, 4, counts={None: ((12, 0), (0, 12))}))


LATE = "memory rows now, after 2 or more without any, and still past_tasks=0.* 1 in the second task"


def test_a_second_task_that_is_called_the_first_is_said_once_a_process(three_are_many, monkeypatch):
    monkeypatch.setattr(mistakes, "SOME", 2)
    model = network()
    for _ in range(3):
        with tbbn.balance(model, current=12, memory=0, past_tasks=0):
            model(images())
    with (
        pytest.warns(UserWarning, match=LATE) as seen,
        tbbn.balance(model, is_memory=[False] * 8 + [True] * 4, past_tasks=0),
    ):
        model(images())
    assert len(seen) == 1 and seen[0].filename == __file__
    for one in (model, copy.deepcopy(model)):
        for memory in (0, 0, 0, 4):
            with tbbn.balance(one, current=12 - memory, memory=memory, past_tasks=0):
                one(images())


@pytest.mark.filterwarnings("error")
def test_a_reservoir_has_memory_rows_in_the_first_task_and_a_later_one_may_be_left_unbalanced(
    three_are_many, monkeypatch
):
    monkeypatch.setattr(mistakes, "SOME", 2)
    reservoir, later = network(), network()
    for memory in (0, 4, 0, 0, 0, 4, 6):  # the first batch fills it
        with tbbn.balance(reservoir, current=12 - memory, memory=memory, past_tasks=0):
            reservoir(images())
    for layout in (EIGHT, *[{"current": 12, "memory": 0, "past_tasks": 0}] * 3, {**EIGHT, "past_tasks": 0}):
        with tbbn.balance(later, **layout):
            later(images())


def test_rows_of_other_classes_in_the_first_task_are_said_once_a_process(three_are_many):
    model, labels = network(), [40] * 8 + [3] * 4
    with pytest.warns(UserWarning, match="4 rows have labels outside of current_classes, but past_tasks=0") as seen:
        block = tbbn.balance(model, labels=labels, current_classes=range(40, 50), past_tasks=0)
    assert len(seen) == 1 and seen[0].filename == __file__
    with block:
        torch.testing.assert_close(model(images()), alone(None))
    tbbn.balance(model, labels=labels, current_classes=range(40, 50), past_tasks=0)
    mistakes._given.clear()
    tbbn.balance(model, labels=[40] * 12, current_classes=range(40, 50), past_tasks=0)
    tbbn.balance(model, labels=labels, current_classes=range(40, 50), past_tasks=1)


def test_a_block_without_memory_says_that_plain_batch_norm_is_meant():
    model = network()
    with tbbn.balance(model, **EIGHT):
        model(images())
    with tbbn.balance(model, current=12, memory=0, past_tasks=0):
        torch.testing.assert_close(model(images()), alone(None))


# -- checkpointing: a forward is repeated with the layout it had


def checkpointed(model, x, use_reentrant):
    return checkpoint(model, x, use_reentrant=use_reentrant)


@quiet
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("norm", ["tbbn", "adab2n"])
def test_two_layouts_before_one_backward(norm, use_reentrant):
    found = []
    for recompute in (False, True):
        model, first, second = network(norm), images(1).requires_grad_(), images(2).requires_grad_()
        call = (lambda x, m=model: checkpointed(m, x, use_reentrant)) if recompute else model
        total = 0
        for layout, x in ((EIGHT, first), (SIX, second), (EIGHT, first + 1), (None, second - 1)):
            if layout is None:
                total = total + call(x).pow(2).sum()
                continue
            with tbbn.balance(model, **layout):
                total = total + call(x).pow(2).sum()
        with tbbn.balance(model, **SIX):  # not the layout of what is repeated
            total.backward()
        found.append([first.grad, second.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@quiet
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_two_layouts_of_the_same_current_images_are_told_apart_by_the_last_memory_row(use_reentrant):
    found = []
    for recompute in (False, True):
        model, first, second = network(), images(1), images(1)
        second[-1] += 1
        first.requires_grad_(), second.requires_grad_()
        total = 0
        for layout, x in ((EIGHT, first), (SIX, second)):
            with tbbn.balance(model, **layout):
                total = total + (checkpointed(model, x, use_reentrant) if recompute else model(x)).pow(2).sum()
        total.backward()
        found.append([first.grad, second.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_two_layouts_of_the_same_images_are_refused(use_reentrant):
    model, x = network(), images().requires_grad_()
    total = 0
    for layout in (EIGHT, SIX):
        with tbbn.balance(model, **layout):
            total = total + checkpointed(model, x, use_reentrant).pow(2).sum()
    with pytest.raises(UserError, match=r"several layouts were used since; call backward after each block"):
        total.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_several_layouts_of_the_same_images_with_a_backward_each(use_reentrant):
    found = []
    for recompute in (False, True):
        model, x = network(), images().requires_grad_()
        for layout in (EIGHT, SIX, EIGHT, {"is_memory": torch.arange(12) % 3 == 0, "past_tasks": 2}):
            with tbbn.balance(model, **layout):
                y = checkpointed(model, x, use_reentrant) if recompute else model(x)
            y.pow(2).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_forwards_that_nobody_repeats_are_not_remembered(use_reentrant):
    found = []
    for recompute in (False, True):
        model, x = network(), images().requires_grad_()
        with tbbn.balance(model, **EIGHT):
            first = checkpointed(model, x, use_reentrant) if recompute else model(x)
        with tbbn.balance(model, **SIX):  # the same input, and not to be repeated
            second = model(x)
        (first.pow(2).sum() + second.pow(2).sum()).backward()
        found.append(x.grad)
        assert len(model[1]._forwards.last) == int(recompute)
    torch.testing.assert_close(*found)


def test_a_second_backward_repeats_the_same_forward():
    found = []
    for recompute in (False, True):
        model, x = network(), images().requires_grad_()
        with tbbn.balance(model, **EIGHT):
            y = checkpointed(model, x, False) if recompute else model(x)
        loss = y.pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_several_rows_a_sample_are_repeated_as_they_were(use_reentrant):
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = tbbn.convert(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))).double()
        x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        with tbbn.balance(model, **EIGHT, rows_per_sample=2):
            y = checkpointed(model, x, use_reentrant) if recompute else model(x)
        y.pow(3).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


# -- what a layer remembers of its forwards


def forward_of(layout, value=0.0, folded=False, shape=(2, 3)):
    block = None if layout is None else active.Block(None, layout, {}, 2 if folded else 1)
    return active.Forward.of(block, torch.full(shape, float(value)))


A, B = Layout(6, 2, 2), Layout(4, 4, 2)


def test_the_pixel_in_the_middle_of_the_last_row_tells_a_forward():
    for shape, middle in (((2, 3), ()), ((2, 3, 5), (2,)), ((2, 3, 4, 7), (2, 3)), ((2, 3, 2, 3, 1), (1, 1, 0))):
        x = torch.arange(torch.Size(shape).numel()).float().view(shape)
        forward = active.Forward.of(None, x)
        assert forward.pixel.tolist() == [x[(1, c, *middle)].item() for c in range(3)]
        x.zero_()
        assert forward.pixel.any(), "a copy: a layer after this one may work in place"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jit itself
def test_a_forward_without_rows_or_values_is_told_by_no_pixel():
    assert forward_of(A, shape=(0, 3)).pixel is None and forward_of(A, shape=(1, 3)).pixel is not None
    seen = []
    torch.func.vmap(lambda x: seen.append(active.Forward.of(None, x)) or x)(torch.zeros(2, 4, 3))
    with FakeTensorMode():
        seen.append(active.Forward.of(None, torch.zeros(4, 3)))
    torch.jit.trace(lambda x: seen.append(active.Forward.of(None, x)) or x, torch.zeros(4, 3), check_trace=False)
    assert [forward.pixel for forward in seen] == [None] * 3


def test_forwards_are_alike_if_a_repetition_need_not_tell_them_apart():
    assert forward_of(None).key() is None and not forward_of(None).folded
    assert forward_of(A, 1).key() == forward_of(Layout(6, 2, 2), 2).key()
    others = [
        forward_of(B),
        forward_of(A, folded=True),
        forward_of(Layout(6, 2, 3)),
        forward_of(Layout(6, 2, 2, rule="uneven")),
    ]
    mask = torch.tensor([True, False])
    others += [forward_of(Layout(1, 1, 2, mask)), forward_of(Layout(1, 1, 2, ~mask)), forward_of(Layout(1, 1, 2))]
    assert len({forward_of(A).key(), *(one.key() for one in others)}) == 8
    assert forward_of(Layout(1, 1, 2, mask)).key() == forward_of(Layout(1, 1, 2, mask.clone())).key()
    ids = torch.tensor([1, 0])
    known = Layout(1, 1, 1, task_ids=ids)
    assert forward_of(known).key() == forward_of(known, 3).key() != forward_of(Layout(1, 1, 1, task_ids=ids)).key()


def kept(*forwards):
    made = active.Forwards()
    for forward in forwards:
        made.append(forward)
    return made


def found(forwards, value):
    return forwards.repeated("Norm", torch.full((2, 3), float(value)))


def test_forwards_of_one_layout_need_no_telling_apart():
    assert found(kept(), 1) is None
    first, last = forward_of(A, 1), forward_of(A, 2)
    assert found(kept(first, last), 7) is last
    assert first.repeated and last.repeated


def test_a_repeated_forward_is_found_by_its_pixel_but_for_rounding():
    both = kept(forward_of(A, 100), forward_of(B, 200))
    for value in (98.1, 100, 101.9):
        assert found(both, value).layout is A
    assert found(both, 201).layout is B
    for value in (97.9, 102.2, -100, 0):
        with pytest.raises(UserError, match=r"Norm: activation checkpointing repeats a forward, and several layouts"):
            found(both, value)
    with pytest.raises(UserError, match="several layouts"):
        both.repeated("Norm", torch.full((2, 3), 100.0).double())
    with pytest.raises(UserError, match="several layouts"):
        both.repeated("Norm", torch.full((2, 4), 100.0))
    with pytest.raises(UserError, match="several layouts"):
        found(kept(active.Forward(A, None, False), active.Forward(B, None, False)), 1)


def test_pixels_of_zeros_and_of_large_half_precision_numbers_are_told_apart():
    assert found(kept(forward_of(A, 0), forward_of(B, 1)), 0).layout is A
    both = kept(*(active.Forward.of(active.Block(None, layout, {}, 1), torch.full((2, 3), value).half())
                  for layout, value in ((A, 40_000.0), (B, 20_000.0))))  # fmt: skip
    assert both.repeated("Norm", torch.full((2, 3), 40_000.0).half()).layout is A


def test_the_same_input_with_two_layouts_is_the_one_whose_backward_has_not_run():
    first, second = forward_of(A, 1), forward_of(B, 1)
    both = kept(first, second)
    first.repeated = True
    assert found(both, 1) is second and second.repeated
    with pytest.raises(UserError, match="several layouts"):
        found(both, 1)


def test_thirty_two_forwards_are_remembered_and_of_older_ones_whether_their_layouts_differ():
    many = [forward_of(A, value) for value in range(40)]
    forwards = kept(*many)
    assert list(forwards.last) == many[-32:] and forwards.older == {many[0].key()}
    assert found(forwards, 3) is many[-1]  # all had one layout
    mixed = kept(forward_of(B, 50), *many[:32])
    assert found(mixed, 31) is many[31]
    with pytest.raises(UserError, match="several layouts"):
        found(mixed, 50)  # forgotten, and the others had another layout
    for past in range(9):
        mixed.append(forward_of(Layout(6, 2, past), 60))
    assert len(mixed.older) == 2 and len(mixed.last) == 32


@pytest.mark.parametrize(
    ("samples", "per_sample", "rows", "folds"),
    [
        *((4, 1, 4, 1), (4, 1, 8, 1)),
        *((4, 2, 8, 2), (4, 2, 4, 1), (4, 2, 12, 1), (4, 2, 9, 1)),
        *((4, "any", 12, 3), (4, "any", 4, 1), (4, "any", 9, 1)),
        *((0, "any", 5, 1), (0, 2, 0, 1)),
    ],
)
def test_rows_of_a_sample_are_folded_where_they_fit(samples, per_sample, rows, folds):
    assert active.Block(None, Layout(samples, 0, 0), {}, per_sample).folds(rows) == folds


def test_a_block_is_left_by_its_owner_the_innermost_first():
    layer, owner, other = nn.Linear(1, 1), object(), object()
    one, two, three = (active.Block(who, A, {layer: n}, 1) for n, who in enumerate((owner, other, owner)))
    for block in (one, two, three):
        active.enter(block)
    assert active.find(layer) is three and active.find(nn.Linear(1, 1)) is None
    active.leave(owner)
    assert active.find(layer) is two
    active.leave(object())  # of nobody here
    assert active.find(layer) is two
    active.leave(other)
    assert active.find(layer) is one
    active.leave(owner)
    assert active.find(layer) is None
