"""The plugin in real Avalanche strategies."""

import copy
import pickle

import pytest
import torch
from package import package
from torch import nn
from torch.utils.data import TensorDataset

import tbbn
from tbbn.errors import UserError

package("avalanche")

from avalanche.benchmarks import nc_benchmark, ni_benchmark  # noqa: E402
from avalanche.training.supervised import DER, ER_ACE, ICaRL, Naive, Replay  # noqa: E402

from tbbn.integrations.avalanche import BalancePlugin  # noqa: E402


class Labelled(TensorDataset):
    def __init__(self, x, y):
        super().__init__(x, y)
        self.targets = y.tolist()


def benchmark(data, kind=nc_benchmark, **options):
    train, test = Labelled(*data), Labelled(data[0][:12], data[1][:12])
    options = {"n_experiences": 3, "task_labels": False, "shuffle": False, **options}
    return kind(train, test, **options)


def make(strategy, model, **options):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    common = {"optimizer": optimizer, "train_mb_size": 24, "train_epochs": 1, "eval_mb_size": 24, "evaluator": None}
    if strategy is ICaRL:
        return ICaRL(
            feature_extractor=nn.Sequential(model.body, nn.AdaptiveAvgPool2d(1), nn.Flatten()), classifier=model.head,
            memory_size=12, buffer_transform=None, fixed_memory=True, **common, **options,
        )  # fmt: skip
    sizes = {} if strategy is Naive else {"mem_size": 12}
    if strategy in (DER, ER_ACE):
        sizes["batch_size_mem"] = 6
    return strategy(model=model, criterion=nn.CrossEntropyLoss(), **common, **sizes, **options)


def expected(twin, x, labels, past_tasks):
    """The output that ``tbbn.balance`` gives when told which rows are memory, by hand."""
    is_memory = torch.tensor([int(y) not in (2 * past_tasks, 2 * past_tasks + 1) for y in labels])
    with tbbn.balance(twin, is_memory=is_memory, past_tasks=past_tasks):
        return twin(x), is_memory


@pytest.mark.parametrize("strategy", [Replay, DER, ER_ACE, Naive])
def test_every_training_forward_is_balanced_by_the_labels_of_its_rows(strategy, network, data, watch):
    trainer = make(strategy, network, plugins=[BalancePlugin()])
    label_of = {row.numpy().tobytes(): int(y) for row, y in zip(*data, strict=True)}
    mixed = 0
    forwards = watch(network)
    inner = []
    network.body.register_forward_pre_hook(lambda body, args: inner.append((copy.deepcopy(network), args[0].clone())))
    for number, experience in enumerate(benchmark(data).train_stream):
        forwards.seen.clear(), inner.clear()
        trainer.train(experience)
        outputs = [output for _, _, output in forwards.seen]
        if strategy is ER_ACE and number:  # two calls of the model, one forward of the body
            outputs = [torch.cat(pair) for pair in zip(outputs[::2], outputs[1::2], strict=True)]
        rows = [(twin, x) for twin, x in inner if twin.training]
        assert len(outputs) == len(rows)
        for (twin, x), output in zip(rows, outputs, strict=True):
            twin._forward_hooks.clear(), twin._forward_pre_hooks.clear(), twin.body._forward_pre_hooks.clear()
            vars(twin).pop("forward", None)
            labels = [label_of[row.numpy().tobytes()] for row in x]
            wanted, is_memory = expected(twin, x, labels, number)
            torch.testing.assert_close(output, wanted.detach())
            mixed += bool(is_memory.any())
    assert (mixed > 0) == (strategy is not Naive)


def test_icarl_trains_and_predicts(network, data, layouts):
    trainer = make(ICaRL, network, plugins=[BalancePlugin()])
    for experience in benchmark(data).train_stream:
        trainer.train(experience)
    assert {past for _, _, past in layouts} == {0, 1, 2}
    assert sum(memory for _, memory, past in layouts if past == 0) == 0
    assert sum(memory for _, memory, past in layouts if past == 2) == 12  # the whole memory, once an epoch
    assert "forward" not in vars(trainer.model)


def test_task_labels_tell_rows_apart_where_classes_repeat(network, data, layouts):
    trainer = make(Replay, network, plugins=[BalancePlugin()])
    for experience in benchmark(data, task_labels=True, class_ids_from_zero_in_each_exp=True).train_stream:
        trainer.train(experience)
    assert {past for _, _, past in layouts} == {0, 1, 2}
    assert all((memory > 0) == (past > 0) for _, memory, past in layouts)


def test_the_same_classes_again_are_refused(network, data):
    trainer = make(Replay, network, plugins=[BalancePlugin()])
    stream = benchmark(data, ni_benchmark).train_stream
    trainer.train(stream[0])
    with pytest.raises(UserError, match="BalancePlugin: class 0 is in experiences 0 and 1, so labels do not tell"):
        trainer.train(stream[1])


def test_a_model_that_was_not_converted_is_refused(network, data):
    trainer = make(Replay, tbbn.revert(network), plugins=[BalancePlugin()])
    with pytest.raises(UserError, match=r"call tbbn\.convert"):
        trainer.train(benchmark(data).train_stream[0])


def test_a_strategy_is_pickled_between_experiences_and_goes_on(network, data):
    stream = benchmark(data).train_stream
    trainer = make(Replay, network, plugins=[BalancePlugin()])
    trainer.train(stream[0])
    plugin = pickle.loads(pickle.dumps(trainer.plugins[0]))
    assert plugin._classes == {0: {0, 1}}
    assert "forward" not in vars(trainer.model)
