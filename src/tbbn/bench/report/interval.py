"""The 95 % confidence interval of a mean over seeds, by Student's t distribution."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import sqrt

# Quantiles of t at 0.975, for 1 to 9 degrees of freedom.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def half_width(values: Sequence[float]) -> float:
    """Half the width of the interval around the mean of two or more values."""
    return quantile(len(values) - 1) * statistics.stdev(values) / sqrt(len(values))


def quantile(freedom: int) -> float:
    """The 0.975 quantile of t; beyond the table by the Cornish-Fisher expansion, which is accurate to 0.001.

    >>> [round(quantile(n), 2) for n in (2, 10, 30, 1000)]
    [4.3, 2.23, 2.04, 1.96]
    """
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def difference(gains: Sequence[float]) -> str:
    """The mean gain in points, with its interval if there are several gains. A bound of -0.0 is just below 0.

    >>> difference([1.0, 2.0, 3.0]), difference([-1.0]), difference([-0.01])
    ('+2.0 [-0.5, 4.5]', '-1.0', '+0.0')
    >>> difference([0.9, 1.0, 1.75]), difference([0.8, 1.0, 1.7])
    ('+1.2 [0.1, 2.4]', '+1.2 [-0.0, 2.3]')
    """
    mean = statistics.fmean(gains)
    if len(gains) == 1:
        return signed(mean)
    return f"{signed(mean)} {bounds(gains)}"


def bounds(values: Sequence[float], digits: int = 1) -> str:
    """The interval in brackets. The sign of a bound that rounds to 0 is kept: it says whether 0 is inside."""
    mean, half = statistics.fmean(values), half_width(values)
    return "[{:.{digits}f}, {:.{digits}f}]".format(mean - half + 0.0, mean + half + 0.0, digits=digits)


def signed(points: float) -> str:
    """
    >>> signed(1.26), signed(-0.04)
    ('+1.3', '+0.0')
    """
    return f"{round(points, 1) + 0.0:+.1f}"  # adding 0 removes the sign of -0
