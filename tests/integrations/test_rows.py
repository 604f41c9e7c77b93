"""The task of each row, from its label."""

import pytest
import torch

from tbbn.errors import UserError
from tbbn.integrations.rows import Tasks, labels_of


def test_labels_become_tasks():
    tasks = Tasks([[4, 1], range(2, 4), [0]], task=1)
    assert tasks.of(torch.tensor([1, 2, 4, 3])).tolist() == [0, 1, 0, 1]
    tasks.task = 2
    assert tasks.of(torch.tensor([0, 2])).tolist() == [2, 1]


@pytest.mark.parametrize("label", [0, 7, -1])
def test_a_class_of_a_later_task_or_of_none_is_refused(label):
    tasks = Tasks([[4, 1], [2, 3], [0]], task=1)
    with pytest.raises(
        UserError, match=rf"class {label} belongs to no task up to task 1; the tasks are \[\[1, 4\], \[2, 3\]"
    ):
        tasks.of(torch.tensor([1, label]))


def test_tasks_are_checked():
    with pytest.raises(UserError, match="tasks: class 3 is in two tasks"):
        Tasks([[1, 3], [3]])
    with pytest.raises(UserError, match=r"tasks: expected the classes of every task, .* got \[\]"):
        Tasks([])
    with pytest.raises(UserError, match="task: must be from 0 to 1, got 2"):
        Tasks([[0], [1]], task=2)


@pytest.mark.parametrize("batch", [("x", torch.tensor([3])), {"labels": torch.tensor([3])}, {"y": torch.tensor([3])}])
def test_labels_are_found(batch):
    assert labels_of(batch).tolist() == [3]


@pytest.mark.parametrize("batch", [torch.tensor([3]), {"z": torch.tensor([3])}, ("x", "y"), ("x", torch.ones(2, 2))])
def test_labels_that_are_not_found_are_an_error(batch):
    with pytest.raises(UserError, match=r"the labels were not found in a batch of type .*; override task_ids"):
        labels_of(batch)
