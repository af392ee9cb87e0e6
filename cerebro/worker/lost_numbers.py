"""Notice during a run that a trial changes a number or an array that a hop would lose.

The hop check before a search tries one configuration on a few batches. Another configuration may
lower a temperature in `forward`, or a number may change only after many batches. So after each unit
the numbers of the user's own objects (see `own_numbers`) are compared with those that `build` made.
This takes microseconds, and usually none differs.

If one differs and is not in the state, the trial's model is built twice more, gets the trial's
state, and continues on a batch: once with the trial's number, and once as a hop would leave it. The
number is lost if it still differs and if the two models continued differently. So numbers that the
next step computes anew, and counters that nothing depends on, are not reported. The trial itself is
not changed.

Attributes with arrays, such as a running scale, are treated likewise. They may be used only later,
so they are looked at up to `ARRAY_LOOKS` times. A list or queue that still differs is lost even
before anything depends on it. A mapping may be a cache, and is lost only if the two models
continued differently.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from cerebro.machine import generators
from cerebro.model import get_whole_pass
from cerebro.worker import own_numbers
from cerebro.worker.aside import leave_no_trace
from cerebro.worker.held_arrays import digest, find_arrays, is_gathered
from cerebro.worker.hop_check import are_same, id_of, walk
from cerebro.worker.messages import Task, Warned
from cerebro.worker.models import LiveModel, end_epoch
from cerebro.worker.own_numbers import OwnNumbers
from cerebro.worker.runner import UnitRunner

MOST_NAMED = 3

ARRAY_LOOKS = 4
"""How often an attribute with arrays is looked at: each time when the trial is twice as old."""


def warn_of_lost_numbers(runner: UnitRunner, task: Task) -> tuple[Warned, ...]:
    """Return a warning if the trial's last unit changed numbers that a hop loses, once for each."""
    live = runner.live_model(task.trial)
    if live is None or live.own_numbers is None:
        return ()
    try:
        examined = runner.examined.setdefault(task.trial, {})
        age = task.position + 1
        numbers, arrays = live.own_numbers.find_changed(), live.own_numbers.find_changed_arrays()
        numbers = {path: value for path, value in numbers.items() if path not in examined}
        arrays = {path: value for path, value in arrays.items() if _is_due(examined, path, age)}
        if not numbers and not arrays:
            return ()
        examined |= {path: [] for path in numbers}
        examined |= {path: [*examined.get(path, []), age] for path in arrays}
        lost = _find_lost(runner, task, live, numbers, arrays)
        examined |= {path: ARRAY_LOOKS * [age] for path in lost}
        return _make_warnings(runner, task, lost) if lost else ()
    except Exception:
        return ()


def _is_due(examined: Mapping[str, list[int]], path: str, age: int) -> bool:
    looks = examined.get(path, [])
    return not looks or (len(looks) < ARRAY_LOOKS and age >= 2 * looks[-1])


def _find_lost(
    runner: UnitRunner,
    task: Task,
    live: LiveModel,
    numbers: Mapping[str, Any],
    arrays: Mapping[str, Any],
) -> list[str]:
    """Return the paths of the numbers and arrays that a hop loses and on which training depends."""
    state = live.model.state_dict()
    saved = _list_saved_numbers(state)
    numbers = {
        path: value for path, value in numbers.items() if (_last_part_of(path), value) not in saved
    }
    memory = {id_of(value) for _, value in walk(state, "")} if arrays else set()
    arrays = {
        path: value
        for path, value in arrays.items()
        if not all(id_of(array) in memory for array in find_arrays(value))
    }
    if not (numbers or arrays) or not _is_comparable(runner, task, live):
        return []
    with leave_no_trace(runner):
        first = _build_again(runner, task)
        # Objects that all models share, such as a clock, have the same values in a model just
        # built.
        numbers = {
            path: value
            for path, value in numbers.items()
            if not own_numbers.are_equal(first.own.built.get(path), value)
        }
        now = first.own.digest_arrays()
        arrays = {path: value for path, value in arrays.items() if now[path] != digest(value)}
        if not (numbers or arrays):
            return []
        without = _continue_training(runner, task, first, {})
        del first  # memory then holds at most one model besides the trial's
        lost = []
        if numbers:
            with_them = _continue_training(runner, task, _build_again(runner, task), numbers)
            lost += _find_lost_numbers(numbers, without, with_them)
        if arrays:
            with_them = _continue_training(runner, task, _build_again(runner, task), arrays)
            lost += _find_lost_arrays(arrays, without, with_them)
    return lost


def _find_lost_numbers(
    numbers: Mapping[str, Any], without: _Continued, them: _Continued
) -> list[str]:
    if without.is_like(them):
        return []
    return [
        path
        for path in numbers
        # A number that differs between two models just built is the number of an object.
        if own_numbers.are_equal(without.built.get(path), them.built.get(path))
        and not own_numbers.are_equal(without.numbers.get(path), them.numbers.get(path))
    ]


def _find_lost_arrays(
    arrays: Mapping[str, Any], without: _Continued, them: _Continued
) -> list[str]:
    alike = without.is_like(them)
    return [
        path
        for path, value in arrays.items()
        if without.arrays.get(path) != them.arrays.get(path) and (not alike or is_gathered(value))
    ]


def _list_saved_numbers(state: Any) -> set[tuple[str, Any]]:
    """Return the numbers in a state with the last parts of their paths."""
    return {
        (_last_part_of(path), value.item() if hasattr(value, "item") else value)
        for path, value in walk(state, "")
        if getattr(value, "ndim", 0) == 0
    }


def _last_part_of(path: str) -> str:
    return str((re.findall(r"\w+", path) or [""])[-1])


def _is_comparable(runner: UnitRunner, task: Task, live: LiveModel) -> bool:
    """Return whether continuations are comparable, and whether there is room for one more model."""
    context = runner.context
    varies = context.exactness.varies_on(context.device)
    if varies or runner.is_not_exact(task.trial):
        return False
    return 2 * live.held_bytes <= context.share.live_bytes  # one model more at a time


class _Built(NamedTuple):
    live: LiveModel
    own: OwnNumbers


class _Continued(NamedTuple):
    built: Mapping[str, Any]
    numbers: Mapping[str, Any]
    arrays: Mapping[str, Any]
    results: Any
    state_hash: str

    def is_like(self, other: _Continued) -> bool:
        return self.state_hash == other.state_hash and _are_same(self.results, other.results)


def _build_again(runner: UnitRunner, task: Task) -> _Built:
    live = runner.build(task.trial, task.config, task.epochs)
    return _Built(live, OwnNumbers(live.model))


def _continue_training(
    runner: UnitRunner, task: Task, built: _Built, numbers: Mapping[str, Any]
) -> _Continued:
    """Load the trial's state into a model just built, set `numbers`, and continue on a batch."""
    live, values = built
    ended = task.step == runner.context.units_per_epoch - 1
    if not ended:
        runner.begin_again(live, task.epoch)
    live = runner.load_anew(live, task, runner.committed_state(task.trial), task.epoch)
    if live is not built.live and live.own_numbers is not None:
        values = live.own_numbers
    model = live.model
    values.write(numbers)
    generators.restore(live.generators)
    if ended and hasattr(model, "begin_epoch"):
        model.begin_epoch(task.epoch)
    results: list[Any] = [model.train_batch(_make_first_batch(runner, live, task))]
    if hasattr(model, "end_unit"):
        model.end_unit()
    if runner.context.validates:
        evaluate = get_whole_pass(model)
        batch = _make_first_batch(runner, live, task)
        results.append(model.eval_batch(batch) if evaluate is None else evaluate([batch]))
    results.append(end_epoch(live, task.epoch))
    live.generators = generators.capture(live.torch, live.cuda)
    return _Continued(
        values.built, values.read_numbers(), values.digest_arrays(), results, runner.hash_of(live)
    )


def _make_first_batch(runner: UnitRunner, live: LiveModel, task: Task) -> Any:
    size = runner.context.batches.size_of(task.config)
    loader = runner.make_loader(live.model, size, training=True, trial=task.trial)
    mix = runner.context.order(task.trial).mix(max(task.part, 0), task.epoch)
    loader.begin([mix], task.epoch, 0, 1)
    return next(iter(loader))


def _are_same(left: Any, right: Any) -> bool:
    return all(
        are_same(value, other)
        for (_, value), (_, other) in zip(walk(left, ""), walk(right, ""), strict=True)
    )


def _make_warnings(runner: UnitRunner, task: Task, lost: list[str]) -> tuple[Warned, ...]:
    named = ", ".join(lost[:MOST_NAMED])
    text = (
        f"a hop loses {named}, which training changes: make it a buffer, or put it into state_dict"
    )
    code = getattr(runner.context.build, "__code__", None)
    file, line = getattr(code, "co_filename", "cerebro"), getattr(code, "co_firstlineno", 1)
    with runner.redirect_output(task.trial), runner.warnings.collect(task.trial) as warned:
        try:
            warnings.warn_explicit(text, UserWarning, file, line)
        except UserWarning:  # the user's filters make errors of warnings
            warned.append(Warned(("builtins:UserWarning",), text, file, line))
    return tuple(warned)
