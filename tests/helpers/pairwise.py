"""A small part of a product in which every pair of values still occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases of the product of ``axes``: each pair of values from two axes occurs in one of them. The same at every call.

    Greedy: always the case with the most pairs that are still missing; among equals the one with the values used least so far.
    """
    cases = {case: set(combinations(enumerate(case), 2)) for case in product(*axes)}
    missing = {pair for pairs in cases.values() for pair in pairs}
    uses: Counter[Any] = Counter()
    chosen = []

    def gain(case: tuple[Any, ...]) -> tuple[int, int]:
        return len(cases[case]), -sum(map(uses.__getitem__, case))

    while missing:
        chosen.append(max(cases, key=gain))
        missing -= cases[chosen[-1]]
        uses.update(chosen[-1])
        cases = {case: left for case, pairs in cases.items() if (left := pairs & missing)}
    return chosen
