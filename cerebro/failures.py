"""Failed trials: what makes them alike, and when the run is given up for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cerebro.errors import RunError
from cerebro.trial import TrialRecord

ALIKE_FAILURES = 3
_NO_METRIC = "the model reports no metric"


class FirstFailures:
    """Stops a run in which nothing but the same failure has happened yet."""

    def __init__(self) -> None:
        self._failed: list[TrialRecord] = []
        self.any_unit_done = False

    def add(self, record: TrialRecord) -> None:
        """Count a failed trial.

        Raises
        ------
        RunError
            If the first trials all failed alike.
        """
        if self.any_unit_done and not (record.error or "").startswith(_NO_METRIC):
            return
        self._failed.append(record)
        causes = {failure_kind(r.error or "") for r in self._failed}
        if len(self._failed) >= ALIKE_FAILURES and len(causes) == 1:
            raise RunError(
                f"the first {len(self._failed)} trials failed alike: {self._failed[0].error}"
            )


def raise_if_all_failed(records: Sequence[TrialRecord]) -> None:
    """Raise RunError if a run found nothing."""
    failed = [r for r in records if r.status in ("failed", "diverged")]
    if records and len(failed) == len(records):
        raise RunError(f"all {len(records)} trials failed; the first: {failed[0].error}")
    if not records:
        raise RunError("the searcher suggested no trial")


def failure_kind(message: str) -> str:
    """What makes two failures alike: the exception's type and where it was raised."""
    kind, _, rest = message.partition(":")
    return kind + rest[rest.rfind("(") :] if "(" in rest else message


def missing_metric(name: str, metrics: Mapping[str, float], *, validated: bool) -> str | None:
    """Why an epoch's metrics do not rank the trial; None if they do.

    With validation, what ranks must come from validation.
    """
    only_training = f"train_{name}" in metrics and f"val_{name}" not in metrics
    if name in metrics and not (only_training and validated):
        return None
    if name in metrics:
        return (
            f"{_NO_METRIC} {name!r} in validation: return it from eval_batch too, or rank by "
            f"metric='train_{name}'"
        )
    names = ", ".join(sorted(metrics)) or "none"
    return (
        f"{_NO_METRIC} {name!r}; it reports {names}: return it from train_batch and eval_batch, "
        "or choose another metric="
    )
