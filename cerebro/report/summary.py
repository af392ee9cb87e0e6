"""Write a result as plain text, for ``Result.summary()`` and ``cerebro show``."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cerebro.errors import escape_unprintable
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report.conclusions import conclude
from cerebro.report.findings import UNREAD, offer_graph

MAX_TRIALS = 20
LEAST_SAVED = 60.0  # seconds of a search's training that ``graph=True`` must save to be offered
WIDTH = 100  # of wrapped lines, in characters


def rank_trials(result: Any) -> list[Any]:
    """Sort a result's trials, best first; those without the metric come last, by number."""

    def key(trial: Any) -> tuple[float, int]:
        value = fmt.metric_value(trial.metrics, result.metric)
        return fmt.rank(value, result.mode), trial.number

    return sorted(result.trials, key=key)


def tabulate(result: Any, trials: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table of `trials`, as text."""
    names = fmt.metric_columns((trial.metrics for trial in trials), result.metric)
    # A value that all trials share does not distinguish them.
    flat = [flatten(trial.config) for trial in trials]
    varying = fmt.choose_settings(flat)
    by_best = result.select == "best"
    best_at = [fmt.BEST_AT] if by_best else []
    headings = ["trial", "status", "epochs", *best_at, *(fmt.heading(n) for n in names), *varying]
    rows = [
        [
            str(trial.number),
            trial.status,
            str(trial.epoch),
            *(["-" if trial.best_epoch is None else str(trial.best_epoch + 1)] if by_best else []),
            *(fmt.mean_metric(trial.metrics, name) for name in names),
            *(fmt.number(config[key], 3) if key in config else "" for key in varying),
        ]
        for trial, config in zip(trials, flat, strict=True)
    ]
    return headings, rows


def lay_out_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table with two spaces between columns; numbers are right-aligned."""
    widths = [max(fmt.width(r[i]) for r in [headings, *rows]) for i in range(len(headings))]
    numeric = [all(_looks_numeric(row[i]) for row in rows) for i in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            fmt.pad(cell, width, right=right)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), *(line(row) for row in rows)])


def _looks_numeric(cell: str) -> bool:
    try:
        float(cell.replace(",", "").partition(" ±")[0] or 0)
    except ValueError:
        return cell == "-"
    return True


def count_statuses(result: Any) -> str:
    """Write the number of trials by status: ``12 finished, 4 failed``."""
    return fmt.states(Counter(trial.status for trial in result.trials)) or "no trials"


def best_lines(result: Any) -> list[str]:
    """Describe the best trial in a few lines; empty while no trial has a finite metric."""
    values = [fmt.metric_value(trial.metrics, result.metric) for trial in result.trials]
    if not any(map(fmt.is_finite, values)):
        return []
    best = result.best
    value = fmt.mean_metric(best.metrics, result.metric)
    by_last = result.select == "last" or best.best_epoch is None
    epochs = best.epoch if by_last else best.best_epoch + 1
    after = f" after {fmt.count_noun(epochs, 'epoch')}"
    lines = [f"best: trial {best.number}, {fmt.heading(result.metric)} {value}{after}"]
    tie = fmt.describe_tie(result.trials, best, result.metric)
    return [*lines, *config_lines(best.config), *filter(None, [tie])]


def config_lines(config: Mapping[str, Any]) -> list[str]:
    values = flatten(config)
    width = max(map(fmt.width, values), default=0)
    return [f"  {fmt.pad(name, width)}  {fmt.number(v)}" for name, v in values.items()]


def list_failures(result: Any, *, with_status: bool = False) -> list[str]:
    """Return the last line of each distinct error, and how many trials had it."""
    causes: dict[str, list[int]] = {}
    for trial in result.trials:
        if trial.error:
            status = f" {trial.status}" if with_status else ""
            causes.setdefault(f"{status}: {last_line(trial.error)}", []).append(trial.number)
    return describe_causes(causes)


def describe_causes(causes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a line for each cause, such as ``" failed: ..."``, with the numbers of its trials."""
    return [
        f"trial {numbers[0]}{f' and {len(numbers) - 1} more' if numbers[1:] else ''}{what}"
        for what, numbers in causes.items()
    ]


def last_line(error: Any) -> str:
    return "".join(str(error or "").strip().splitlines()[-1:])


def list_warnings(result: Any) -> list[str]:
    """Return each distinct warning, with the trial or the number of trials that raised it."""
    trials: dict[str, set[int]] = {}
    of_all = []
    for event in result.events():
        if event["kind"] == UNREAD:
            of_all.append(event["text"])
        if event["kind"] == "warning":
            numbers = trials.setdefault(event["text"], set())
            numbers.update(() if event["trial"] is None else [event["trial"]])
    return [*of_all, *(f"{_name_source(numbers)}: {text}" for text, numbers in trials.items())]


def _name_source(trials: set[int]) -> str:
    """Return the trial that warned, or how many did; without trials, the hop check warned."""
    if len(trials) == 1:
        return f"trial {min(trials)}"
    return f"{len(trials)} trials" if trials else "before the search"


def render(result: Any, max_trials: int = MAX_TRIALS) -> str:
    """Write a result as text: its trials, its best configuration, and how reliable they are."""
    trials = rank_trials(result)
    parts = [f"{result.path}: {result.status}; {count_statuses(result)}"]
    if trials:
        text = lay_out_table(*tabulate(result, trials[:max_trials]))
        if len(trials) > max_trials:
            text += f"\nand {len(trials) - max_trials} more"
        parts.append(text)
    conclusions = conclude(result, trials)
    for lines in (
        best_lines(result),
        _add_title("how reliable these numbers are", conclusions.sure),
        list_failures(result),
        list_warnings(result),
        _add_title("what to try next", [*conclusions.next, *faster_steps(result)]),
    ):
        parts += ["\n".join(lines)] if lines else []
    return escape_unprintable("\n\n".join(parts))


def faster_steps(result: Any) -> list[str]:
    """Return what ``graph=True`` would bring, if it would have saved a minute of this search."""
    saved = getattr(result, "saved", None)
    gain = None if saved is None else saved.meta.get("graph_gain")
    if gain is None:
        return []
    ordinary, replayed = gain
    trained = sum(entry["seconds"] for trial in result.trials for entry in trial.history)
    is_much = trained * (1 - replayed / ordinary) >= LEAST_SAVED
    offer = offer_graph((ordinary, replayed))
    return [offer] if offer and is_much else []


def _add_title(title: str, lines: Sequence[str]) -> list[str]:
    """Put a title above wrapped lines; return nothing if there are no lines."""
    wrapped = [
        textwrap.fill(line, WIDTH, initial_indent="- ", subsequent_indent="  ",
                      break_long_words=False, break_on_hyphens=False)
        for line in lines
    ]  # fmt: skip
    return [title, *wrapped] if wrapped else []


def fold_table(trial: Any) -> str:
    """List the folds of a trial with their metrics at the trial's epoch."""
    folds = trial.folds
    names = fmt.full_names(name for fold in folds for name in fold.metrics)
    rows = [
        [
            str(fold.fold),
            str(fold.number),
            fold.status,
            str(fold.epoch),
            *(fmt.metric(fold.metrics.get(name)) for name in names),
            str(fold.state_hash or "-"),
        ]
        for fold in folds
    ]
    metrics = (fmt.heading(name) for name in names)
    return lay_out_table(["fold", "number", "status", "epochs", *metrics, "state hash"], rows)


def render_trial(trial: Any) -> str:
    """Write one trial as text: status, configuration, and its metrics after every epoch."""
    parts = [f"trial {trial.number}: {trial.status} after {fmt.count_noun(trial.epoch, 'epoch')}"]
    parts.append("\n".join(config_lines(trial.config)))
    if trial.history:
        names = fmt.full_names(name for e in trial.history for name in e["metrics"])
        rows = [
            [
                f"{entry['epoch'] + 1}{' *' if entry['epoch'] == trial.best_epoch else ''}",
                *(fmt.mean_metric(entry["metrics"], name) for name in names),
                fmt.duration(entry["seconds"]),
                str(entry["state_hash"]),
            ]
            for entry in trial.history
        ]
        headings = ["epochs", *(fmt.heading(n) for n in names), "time", "state hash"]
        parts.append(lay_out_table(headings, rows) + "\n* best")
    if trial.folds:
        parts.append(fold_table(trial))
    if getattr(trial, "not_exact", None):
        parts.append(f"not exact, because it used {', '.join(trial.not_exact)}")
    if trial.error:
        parts.append(str(trial.error).strip())
    return escape_unprintable("\n\n".join(part for part in parts if part))
