"""Conclude how reliable a result is, and what to try next: noise, ties, more trials, wider ranges.

Every line states a fact from the record or a bound that follows from it. If the record does not
allow a conclusion, the text says that the value is unknown. An example is the noise of a loss if
the losses of single rows were not recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report import noise
from cerebro.report.format import Range, is_number

LAST_EPOCHS = 6  # final epochs that show how much a metric moves from epoch to epoch
TOP = 3  # best trials that must agree before a range is called too narrow
OUTER = 0.25  # share of a range; three random values share an outer part with probability 1/32
ROUNDING = 1e-9  # the largest gain that may be a rounding error, as a share of the metric
MAX_NAMED = 5
FEWEST = 4  # trials for an estimate of what more of them gain


@dataclass(frozen=True)
class Facts:
    """The facts from which conclusions are drawn, besides the trials."""

    train_rows: int = 0  # rows trained on in an epoch; 0 if unknown
    validation_rows: int = 0  # rows on which a trial is validated; 0 without validation
    ranges: Mapping[str, Range] = field(default_factory=dict)
    searcher: str = ""
    points: int = 0  # configurations that the user gave to try first
    epochs: int = 0  # of the search; 0 if unknown


def facts_of(result: Any, best: Any) -> Facts:
    saved = getattr(result, "saved", None)
    if saved is None:
        return Facts()
    folds = best.folds
    train, validation = saved.rows_per_epoch(folds[0].number if folds else best.number)
    settings = saved.meta["settings"]
    return Facts(
        train_rows=train,
        validation_rows=validation,
        ranges=saved.ranges(),
        searcher=settings["searcher_name"],
        points=len(saved.meta["points"]),
        epochs=settings["epochs"],
    )


@dataclass(frozen=True)
class Conclusions:
    """Lines of text for the user; both fields are empty while no trial has a finite metric."""

    sure: Sequence[str] = ()  # how reliable the ranking is
    next: Sequence[str] = ()  # what to try next


def conclude(result: Any, ranked: Sequence[Any], facts: Facts | None = None) -> Conclusions:
    """Draw conclusions from a result; `ranked` are its trials, those without a metric last."""
    values = [(t, fmt.metric_value(t.metrics, result.metric)) for t in ranked]
    scored = [(trial, value) for trial, value in values if fmt.is_finite(value)]
    if not scored:
        return Conclusions()
    if facts is None:
        facts = facts_of(result, scored[0][0])
    reader = _Reader(result, ranked, scored, facts)
    return Conclusions(reader.judge_reliability(), reader.suggest_next_steps())


def name_trials(numbers: Sequence[int]) -> str:
    """Write trials as ``trial 3``, ``trials 0 and 10`` or ``trials 0, 1, 2, 3, 4 and 7 more``"""
    shown = [str(number) for number in numbers[:MAX_NAMED]]
    if len(numbers) > MAX_NAMED:
        return f"trials {', '.join(shown)} and {len(numbers) - MAX_NAMED} more"
    if len(shown) == 1:
        return f"trial {shown[0]}"
    return f"trials {', '.join(shown[:-1])} and {shown[-1]}"


@dataclass
class _Reader:
    result: Any
    trials: Sequence[Any]
    scored: Sequence[tuple[Any, float]]
    facts: Facts
    error: float | None = None  # the best value's standard error, if known
    close: Sequence[int] = ()  # the best trial, and trials that may equal it

    def __post_init__(self) -> None:
        self.best, self.value = self.scored[0]
        self.metric = fmt.heading(self.result.metric)
        self.is_validated = self._is_validated()

    def _is_validated(self) -> bool:
        """Return whether the metric comes from rows that were not trained on."""
        name = self.result.metric
        if name.startswith(fmt.PREFIXES):
            return bool(name.startswith("val_"))
        return f"val_{name}" in self.best.metrics or bool(self.best.folds)

    # --- reliability --------------------------------------------------------

    def judge_reliability(self) -> list[str]:
        if not self.is_validated:
            lines = [f"{self.metric} is that of rows the trials were trained on: it says nothing "
                     "about new rows"]  # fmt: skip
        elif self.best.folds:
            lines = self._judge_over_folds()
        elif (counts := self._count_correct_rows()) is not None:
            lines = self._judge_over_rows(counts)
        else:
            lines = self._judge_over_epochs()
        return [*lines, *self._compare_best_and_last(), *self._judge_more_trials()]

    def _count_correct_rows(self) -> list[int] | None:
        name, values = fmt.short_name(self.result.metric), [value for _, value in self.scored]
        return noise.count_correct_rows(name, values, self.facts.validation_rows)

    def _judge_over_rows(self, counts: Sequence[int]) -> list[str]:
        rows = self.facts.validation_rows
        self.error = noise.binomial_error(counts[0] / rows, rows)
        low, high = noise.wilson_interval(counts[0], rows)
        text = (
            f"{self.metric} {fmt.metric(self.value)} is {counts[0]:,} of {rows:,} validation rows: "
            f"standard error {fmt.metric(self.error)} ({self.error * rows:.1f} rows), "
            f"95% interval {fmt.metric(low)} to {fmt.metric(high)}"
        )
        near = [
            (trial.number, count)
            for (trial, _), count in zip(self.scored, counts, strict=True)
            if not noise.is_separable(count - counts[0])
        ]
        self.close = [number for number, _ in near]
        if len(near) < 2:
            return [text]
        apart = max(abs(count - counts[0]) for _, count in near)
        equal = f"equal on {rows:,} rows" if not apart else f"within {apart} of {rows:,} rows"
        return [
            text,
            f"{name_trials(self.close)} are {equal}: McNemar's test cannot separate them at "
            "the 5% level, whichever rows they differ in",
        ]

    def _judge_over_folds(self) -> list[str]:
        folds = self._fold_values(self.best)
        if folds is None or len(folds) < 2:
            return []
        train, test = self.facts.train_rows, self.facts.validation_rows
        share = test / train if train else 1 / (len(folds) - 1)
        self.error = noise.fold_error(folds, share)
        text = (
            f"{self.metric} {fmt.metric(self.value)} is the mean of {len(folds)} folds, which range"
            f" from {fmt.metric(min(folds))} to {fmt.metric(max(folds))}: standard error "
            f"{fmt.metric(self.error)}, corrected for the training rows that folds share"
        )
        others = [(trial.number, self._fold_values(trial) or []) for trial, _ in self.scored[1:]]
        near = [
            number
            for number, values in others
            if len(values) == len(folds) and not noise.differ_over_folds(folds, values, share)
        ]
        self.close = [self.best.number, *near]
        if not near:
            return [text]
        return [text, f"the folds do not separate {name_trials(self.close)} (t test at 5%)"]

    def _fold_values(self, trial: Any) -> list[float] | None:
        """Return the metric of each fold after the epoch that represents the trial."""
        values = [fmt.metric_value(fold.metrics, self.result.metric) for fold in trial.folds]
        finite = [value for value in values if fmt.is_finite(value)]
        return finite if finite and len(finite) == len(values) else None

    def _judge_over_epochs(self) -> list[str]:
        rows = self.facts.validation_rows
        on = f" on {rows:,} validation rows" if rows else ""
        text = (
            f"{self.metric} {fmt.metric(self.value)}{on}: the noise of these rows is unknown, "
            "because a run records means, not rows"
        )
        last = self.best.history[-LAST_EPOCHS:]
        values = [fmt.metric_value(entry["metrics"], self.result.metric) for entry in last]
        moved = noise.estimate_movement([math.nan if value is None else value for value in values])
        if moved is None:
            return [text]
        lines = [text, f"trial {self.best.number} moves around its trend by about "
                       f"{fmt.metric(moved)} per epoch (its last {len(last)} epochs)"]  # fmt: skip
        self.close = [trial.number for trial, v in self.scored if abs(v - self.value) <= moved]
        if len(self.close) > 1:
            lines.append(f"{name_trials(self.close)} differ by less than that")
        return lines

    def _compare_best_and_last(self) -> list[str]:
        best, at = self.best, self.best.best_epoch
        if self.result.select != "best" or at is None or at + 1 >= best.epoch:
            return []
        last = fmt.metric_value(best.history[-1]["metrics"], self.result.metric)
        return [
            f"trial {best.number} was best after {at + 1} of {best.epoch} epochs; after the last, "
            f"{self.metric} is {fmt.metric(last)}"
        ]

    def _judge_more_trials(self) -> list[str]:
        if not self._is_over():
            return []
        bound = self._estimate_random_gain()
        if bound is not None:
            text = f"{bound.more} more random trials find a new best with a probability of at most "
            text += f"{bound.chance:.0%}"
            # A few very bad trials make the bound useless; below ROUNDING, the trials tie.
            if not ROUNDING * abs(self.value) < bound.gain < abs(self.value):
                return [text]
            pays = ""
            if self.error:  # 0 if all rows are right: nothing is known of other rows
                pays = f", {'less' if bound.gain < self.error else 'more'} than the standard error"
            return [f"{text}, and gain at most {fmt.metric(bound.gain)} on average{pays}"]
        after = len(self.trials) - 1 - self.best.number
        if self.facts.searcher and not self._is_searcher(("random", "grid")) and after:
            return [
                f"the best is trial {self.best.number} of {len(self.trials)}: the "
                f"{fmt.count_noun(after, 'trial')} after it found nothing better"
            ]
        return []

    def _is_searcher(self, names: Sequence[str]) -> bool:
        return any(self.facts.searcher.lower().startswith(name) for name in names)

    def _is_over(self) -> bool:
        return self.result.status in ("finished", "stopped")

    def _estimate_random_gain(self) -> MoreTrials | None:
        """Estimate the gain of more trials, if the trials are independent draws from the space."""
        if not self._is_searcher(("random",)):
            return None
        first = self.facts.points
        values = [v for trial, v in self.scored if trial.number >= first]
        tried = sum(trial.number >= first for trial in self.trials)
        return more_trials(values, tried, self.result.mode)

    # --- what to try next ------------------------------------------------

    def suggest_next_steps(self) -> list[str]:
        if not self._is_over():
            return []
        return [
            *self._explain_failures(),
            *self._suggest_epochs(),
            *self._suggest_ranges(),
            *self._suggest_validation(),
        ]

    def _explain_failures(self) -> list[str]:
        """List the settings that separate the failed or diverged trials from all others."""
        lines = []
        cures = {"failed": "change it, or repair build", "diverged": "leave it out"}
        for status, cure in cures.items():
            bad = [t for t in self.trials if t.status == status]
            good = [t for t in self.trials if t.status != status]
            whose = f"all {len(bad)} {status} trials" if len(bad) > 1 else f"the {status} trial"
            for name, what in find_separating_settings(bad, good).items():
                lines.append(f"{whose}, and no others, have {name} {what}: {cure}")
        return lines

    def _suggest_epochs(self) -> list[str]:
        best, at = self.best, self.best.best_epoch
        # Without validation, the loss falls as long as a trial is trained.
        if at is None or best.epoch < 2 or not self.is_validated:
            return []
        longest = max(self.facts.epochs, max(t.epoch for t in self.trials))
        if at + 1 == best.epoch:
            if best.epoch < longest:
                return []  # the searcher or the user stopped it
            more = (
                f"cerebro.resume({str(self.result.path)!r}, epochs={2 * best.epoch}, "
                f"trials=[{best.number}])"
            )
            if self.facts.searcher and not self._is_searcher(("random", "grid")):
                more = f"a search with epochs={2 * best.epoch}"
            return [
                f"train longer, because trial {best.number} was best after its last epoch: {more}"
            ]
        last = fmt.metric_value(best.history[-1]["metrics"], self.result.metric)
        is_worse = fmt.is_finite(last) and abs(last - self.value) > (self.error or 0.0)
        if 2 * (at + 1) > best.epoch or not is_worse:
            return []
        return [
            f"train shorter, or regularize: trial {best.number} was best after {at + 1} of "
            f"{best.epoch} epochs, and became worse"
        ]

    def _suggest_ranges(self) -> list[str]:
        """List the settings whose values in the best trials are all at one end of the range."""
        top = [flatten(trial.config) for trial, _ in self.scored[:TOP]]
        if len(top) < TOP or len(self.scored) < 2 * TOP:
            return []
        if self.scored[TOP - 1][1] == self.scored[TOP][1]:
            return []  # the values of other trials are as good
        lines = []
        configs = [flatten(trial.config) for trial in self.trials]
        for name, span in self.facts.ranges.items():
            values, tried = (
                [c[name] for c in group if is_number(c.get(name))] for group in (top, configs)
            )
            side = find_end(span, values, tried)
            if side > 0 or (side < 0 and may_be_lower(span, values)):
                low, high = span.ends
                end, way = (high, "above") if side > 0 else (low, "below")
                lines.append(
                    f"widen {name}: the best {TOP} trials have "
                    f"{', '.join(fmt.number(v, 3) for v in values)}, and the range ends at "
                    f"{fmt.number(end, 3)}: try values {way} it"
                )
        return lines

    def _suggest_validation(self) -> list[str]:
        if not self.is_validated:
            return ["rank trials on rows that they are not trained on: validation=0.2"]
        lines = []
        if len(self.close) > 1:
            how = "more folds, or more rows"
            if not self.best.folds:
                how = "more validation rows, or folds (validation=cerebro.KFold(5))"
            whom = name_trials(self.close) if len(self.close) <= 2 * MAX_NAMED else "the best"
            lines.append(f"to separate {whom}: {how}")
        if len(self.scored) > 1 and not self.best.folds:
            lines.append(
                f"the best of {len(self.scored)} looks better than it is: "
                f"cerebro.open({str(self.result.path)!r}).best.evaluate(test), on rows that no "
                "trial saw, says how good it is"
            )
        return lines


def find_end(known: Range, values: Sequence[float], tried: Sequence[float]) -> int:
    """Return at which end of a range the best trials are: -1 for low, 1 for high, 0 for neither.

    They are at an end of a continuous range if all are in its outer quarter (of the logarithm, if
    that is drawn) and fewer than `TOP` trials were tried further out; of at least three listed
    numbers, if all have the first or all the last.
    """
    if len(values) < TOP:
        return 0
    steps = known.steps
    if steps:
        ends = {steps[0]: -1, steps[-1]: 1} if len(steps) > 2 else {}
        return _find_common_side([ends.get(value, 0) for value in values])
    places = [known.place(value) for value in values]
    side = _find_common_side([0 if p is None else (p >= 1 - OUTER) - (p <= OUTER) for p in places])
    further = sum(side * value > max(side * v for v in values) for value in tried)
    return side if further < TOP else 0


def may_be_lower(known: Range, values: Sequence[float]) -> bool:
    """Return whether values below the low end may make sense.

    They rarely do for settings that begin at 0, or at 1 for whole numbers, such as dropout rates
    and numbers of layers.
    """
    low, _ = known.ends
    whole = all(isinstance(value, int) for value in values)
    return low != 0 and not (whole and low == 1)


def _find_common_side(sides: Sequence[int]) -> int:
    return sides[0] if len(set(sides)) == 1 else 0


def find_separating_settings(bad: Sequence[Any], good: Sequence[Any]) -> dict[str, str]:
    """Return the settings that separate two groups of trials, with their values in the first group.

    A number does if all its values in one group are above all in the other, a category if the
    groups share no value. Without influence, all assignments of values to trials are equally likely
    (Fisher's randomization test). Of the ``C(n, b)`` ways to choose ``b`` of ``n`` trials, at most
    2 separate by a number; by a category, as many as there are sets of categories with ``b`` trials
    in all. Settings that chance would separate with a probability above 5% are left out.
    """
    if not bad or not good or 2 / math.comb(len(bad) + len(good), len(bad)) > noise.LEVEL:
        return {}
    ours = [flatten(trial.config) for trial in bad]
    theirs = [flatten(trial.config) for trial in good]
    shared = [name for name in ours[0] if all(name in config for config in [*ours, *theirs])]
    settings = {}
    for name in shared:
        if what := _describe_separation([c[name] for c in ours], [c[name] for c in theirs]):
            settings[name] = what
    return settings


def _describe_separation(ours: Sequence[Any], theirs: Sequence[Any]) -> str:
    if all(map(is_number, [*ours, *theirs])):
        if min(ours) > max(theirs):
            return f"of {fmt.number(min(ours), 3)} or more"
        return f"of {fmt.number(max(ours), 3)} or less" if max(ours) < min(theirs) else ""
    mine, others = {str(value) for value in ours}, {str(value) for value in theirs}
    if mine & others or len(mine) > MAX_NAMED or len(mine) == len(ours) > 1:
        return ""
    ways = [1] + [0] * len(ours)  # the number of sets of categories, by their number of trials
    for count in Counter(str(value) for value in [*ours, *theirs]).values():
        for trials in range(len(ours), count - 1, -1):
            ways[trials] += ways[trials - count]
    if ways[-1] / math.comb(len(ours) + len(theirs), len(ours)) > noise.LEVEL:
        return ""
    return f"= {' or '.join(sorted(mine))}"


@dataclass(frozen=True)
class MoreTrials:
    """The largest gain that can be expected from half as many further trials."""

    more: int  # further trials
    chance: float  # the probability that one of them is a new best
    gain: float  # the expected improvement of the best value, in units of the metric; at least 0


def expected_best(values: Sequence[float], draws: int, mode: str) -> float:
    """Return the mean of the best of `draws` values, over all choices without replacement.

    If the values are sorted with the best last, the i-th is the best of ``C(i - 1, draws - 1)`` of
    the ``C(n, draws)`` choices. This is the unbiased estimate of the expected best of `draws`
    independent trials (R. Tang et al., Showing your work doesn't always work, ACL 2020).
    """
    ordered = sorted(values, reverse=mode == "min")  # the best last
    n = len(ordered)
    total, share = 0.0, draws / n  # C(n - 1, draws - 1) / C(n, draws), for the last value
    for i in range(n, draws - 1, -1):
        total += share * ordered[i - 1]
        if i > 1:
            share *= (i - draws) / (i - 1)  # C(i - 2, draws - 1) / C(i - 1, draws - 1)
    return total


def more_trials(values: Sequence[float], tried: int, mode: str) -> MoreTrials | None:
    """Estimate the gain of half as many further independent trials; None below `FEWEST` values.

    The expected best of ``k`` draws is concave in ``k``: on average, each draw adds less than the
    one before. So ``m`` further trials gain at most as much as the last ``m`` did, ``E[best of n] -
    E[best of n - m]``, which `expected_best` estimates without bias for any distribution. `tried`
    counts failed trials, too.

    The best of all is one of ``m`` further trials with probability ``m / (tried + m)``: all orders
    of independent draws are equally likely (N. Glick, Breaking records and breaking boards,
    American Mathematical Monthly 85, 1978). If draws can tie, this is an upper bound.
    """
    n = len(values)
    if n < FEWEST:
        return None
    more = n // 2
    best = max(values) if mode == "max" else min(values)
    gain = abs(best - expected_best(values, n - more, mode))
    return MoreTrials(more, more / (tried + more), gain)
