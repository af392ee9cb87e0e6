"""Estimate the noise in a metric: standard errors from rows and from folds, without SciPy.

Only what follows from the record is estimated. If the values of single rows were not recorded,
their mean, such as a loss, has no standard error here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

LEVEL = 0.05  # the probability that a test calls equal trials different

_SHARE_NAMES = re.compile(
    r"(.*_)?(acc|accuracy|error_rate|zero_one_loss|top_?\d+|hit_rate|em|exact_match)"
    r"|((class|classification|test|top_?\d+)_)?(err|error)"
)
_OTHER_SHARES = re.compile(r"balanced|weighted|macro|token|word|char|pixel")
"""Words in the names of accuracies that are not means over rows.

With many rows the values cannot show this: every number is close to a whole number of rows.
"""

# The 97.5% quantiles of Student's t for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def count_correct_rows(name: str, values: Sequence[float], rows: int) -> list[int] | None:
    """Return the number of correct rows that each value of an accuracy represents.

    The name is without ``val_``; each value is a mean over the same rows. None if the name is not
    that of a share of rows, or if a value is not a whole number of rows, as with balanced
    accuracies and accuracies over tokens.
    """
    if not values or rows < 1 or _SHARE_NAMES.fullmatch(name.lower()) is None:
        return None
    if _OTHER_SHARES.search(name.lower()) or not all(0 <= value <= 1 for value in values):
        return None
    counts = [round(value * rows) for value in values]
    # Models average in float32, whose error grows with the number of rows.
    slack = min(1e-6 * rows + 1e-6, 0.25)
    off = max(abs(value * rows - count) for value, count in zip(values, counts, strict=True))
    return counts if off <= slack else None


def binomial_error(share: float, rows: int) -> float:
    """Return the standard error of a share of rows: ``sqrt(p (1 - p) / n)``.

    This is the error from choosing `rows` independent rows; other seeds and training rows add more.
    Near 0 and 1 it is too small, unlike the interval of `wilson_interval`.
    """
    return math.sqrt(share * (1 - share) / rows)


def wilson_interval(count: int, rows: int) -> tuple[float, float]:
    """Return the Wilson score interval of a share of rows.

    ``(p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n)``, with the normal quantile ``z``,
    contains the true share with a probability of about ``1 - LEVEL``, even near 0 and 1 (E. B.
    Wilson, Probable inference, the law of succession, and statistical inference, JASA 22, 1927).
    """
    z = NormalDist().inv_cdf(1 - LEVEL / 2)
    share = count / rows
    middle = share + z * z / (2 * rows)
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    scale = 1 + z * z / rows
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def is_separable(difference: int) -> bool:
    """Return whether an exact test on the same rows can distinguish two models at 5%.

    McNemar's exact test counts only the rows on which one of two models is right. If all of these
    favor one model, they are `difference` rows, and the two-sided p-value is ``2 * 0.5 **
    difference``; otherwise it is larger (Q. McNemar, Note on the sampling error of the difference
    between correlated proportions or percentages, Psychometrika 12, 1947).
    """
    return bool(2.0 * 0.5 ** abs(difference) <= LEVEL)


def fold_error(values: Sequence[float], test_share: float) -> float:
    """Return the standard error, for new rows, of a mean over two or more folds.

    This is ``s sqrt(1/k + n_test / n_train)``, with the sample standard deviation ``s`` of the `k`
    values and `test_share` as ``n_test / n_train``. Folds share training rows, so ``s / sqrt(k)``
    is too small (C. Nadeau and Y. Bengio, Inference for the generalization error, Machine Learning
    52, 2003). The formula also holds for differences between two models on the same folds.
    """
    return stdev(values) * math.sqrt(1 / len(values) + test_share)


def differ_over_folds(a: Sequence[float], b: Sequence[float], test_share: float) -> bool:
    """Return whether two models differ over the same folds, by the corrected t test at 5%.

    It compares ``|mean(a - b)|`` with `fold_error` of ``a - b``, times the quantile of Student's t
    with ``k - 1`` degrees of freedom.
    """
    differences = [x - y for x, y in zip(a, b, strict=True)]
    error = fold_error(differences, test_share)
    return abs(fmean(differences)) > t_quantile(len(differences) - 1) * error


def t_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t, correct to 0.001.

    From 31 degrees of freedom on, use the first terms of the Cornish-Fisher expansion.
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = NormalDist().inv_cdf(1 - LEVEL / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def estimate_movement(values: Sequence[float]) -> float | None:
    """Return how much a metric moves around its trend from epoch to epoch.

    ``sqrt(mean(s²) / 6)`` over the second differences ``s = a - 2 b + c`` of successive values
    estimates the standard deviation around a trend that is nearly straight over three epochs (T.
    Gasser, L. Sroka and C. Jennen-Steinmetz, Residual variance and residual pattern in nonlinear
    regression, Biometrika 73, 1986). It measures the noise of training, not of the validation rows.
    None for fewer than five values, or if one is not finite.
    """
    if len(values) < 5 or not all(map(math.isfinite, values)):
        return None
    triples = zip(values, values[1:], values[2:], strict=False)
    return math.sqrt(fmean((a - 2 * b + c) ** 2 for a, b, c in triples) / 6)
