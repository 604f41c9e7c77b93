"""The toy figure: whose statistics are the balanced population's."""

from __future__ import annotations

import torch

from tbbn.paper.toy import MEANS, SPREADS, figure, population, table, toy


def test_the_population_is_the_mixture_of_all_tasks_in_equal_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat(
        [m + s * torch.randn(200_000, 2, generator=generator) for m, s in zip(MEANS, SPREADS, strict=True)]
    )
    mean, var = population()
    torch.testing.assert_close(mean[:2].float(), rows.mean(0), rtol=0, atol=0.02)
    torch.testing.assert_close(var[-2:].float(), rows.var(0), rtol=0.01, atol=0)


def test_tbbn_is_nearest_to_the_balanced_population_and_batch_norm_farthest() -> None:
    outcomes = toy()
    errors = {outcome.name: outcome.mean_error for outcome in outcomes}
    assert errors["TBBN"] < 0.15 < errors["continual norm"] < errors["batch norm"]
    # By hand: task 4 has 3/4 of a batch, so batch norm's mean is (3 m4 + (m1 + m2 + m3) / 3) / 4.
    wanted, var = population()
    expected = 0.75 * MEANS[3] + 0.25 * MEANS[:3].mean(0)
    by_hand = ((expected.double() - wanted[:2]).abs() / var[:2].sqrt()).mean().item()
    assert abs(errors["batch norm"] - by_hand) < 0.05
    printed = {name: (float(mean), float(std)) for name, mean, std in table(outcomes).rows}
    for outcome in outcomes:
        assert printed[outcome.name] == (round(outcome.mean_error, 2), round(100 * outcome.std_error, 1))
    panels = figure(outcomes).axes
    assert [axes.get_title().split("\n")[0] for axes in panels] == list(printed)
