"""Notice during a run that a trial changes a number or an array that a hop would lose.

The hop check before a search tries one configuration on a few batches. So after each unit the
values of the user's own objects (see `OwnNumbers`) are compared with those that `build` made. This
takes microseconds, and usually none differs.

If one differs and is not in the state, the trial's model is built twice more, gets the trial's
state, and continues on a batch: once with the trial's value, and once as a hop would leave it. A
number is lost if it still differs and if the two models continued differently. So numbers that the
next step computes anew, and counters that nothing depends on, are not reported.

Arrays may be used only later, so they are looked at up to `ARRAY_LOOKS` times. A list or queue that
still differs is lost even before anything depends on it. A mapping may be a cache, and is lost only
if the two models continued differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import cerebro._core as _core
from cerebro.machine import generators
from cerebro.model import get_whole_pass
from cerebro.worker.contents import (
    OwnNumbers,
    are_equal,
    are_same,
    find_arrays,
    id_of,
    is_gathered,
    walk,
)
from cerebro.worker.messages import Task, Warned
from cerebro.worker.models import LiveModel, end_epoch
from cerebro.worker.runner import UnitRunner
from cerebro.worker.trial_warnings import warn_at_build

MOST_NAMED = 3
ARRAY_LOOKS = 4  # looks at an attribute with arrays, each when the trial is twice as old


def warn_of_lost_numbers(runner: UnitRunner, task: Task) -> tuple[Warned, ...]:
    """Return a warning if the trial's last unit changed numbers that a hop loses, once for each."""
    live = runner.models.get(task.trial)
    if live is None or live.own_numbers is None:
        return ()
    try:
        own, examined = live.own_numbers, runner.notes[task.trial].examined
        age = task.position + 1
        changed = {
            path: value
            for path, value in own.find_changed().items()
            if _is_due(examined.get(path, []), age, path in own.arrays)
        }
        if not changed:
            return ()
        examined |= {path: [*examined.get(path, []), age] for path in changed}
        lost = _find_lost(runner, task, live, own, changed)
        examined |= {path: ARRAY_LOOKS * [age] for path in lost}
        return _make_warnings(runner, task, lost) if lost else ()
    except Exception:
        return ()


def _is_due(looks: list[int], age: int, is_array: bool) -> bool:
    return not looks or (is_array and len(looks) < ARRAY_LOOKS and age >= 2 * looks[-1])


def _find_lost(
    runner: UnitRunner, task: Task, live: LiveModel, own: OwnNumbers, changed: Mapping[str, Any]
) -> list[str]:
    """Return the paths of the numbers and arrays that a hop loses and on which training depends."""
    state = live.model.state_dict()
    saved = _list_saved_numbers(state)
    memory = {id_of(value) for _, value in walk(state, "")}

    def is_saved(path: str, value: Any) -> bool:
        if path in own.arrays:
            return all(id_of(array) in memory for array in find_arrays(value))
        return (_last_part_of(path), value) in saved

    changed = {path: value for path, value in changed.items() if not is_saved(path, value)}
    if not changed or not _is_comparable(runner, task, live):
        return []
    with runner.leave_no_trace():
        first = runner.build(task.trial, task.config, task.epochs, stream=task.stream)
        assert first.own_numbers is not None
        # Objects that all models share, such as a clock, have the same values in a model just
        # built.
        built = first.own_numbers.built
        changed = {
            path: value
            for path, value in changed.items()
            if not are_equal(built.get(path), own.mark(path, value))
        }
        if not changed:
            return []
        without = _continue_training(runner, task, first, {})
        del first  # memory then holds at most one model besides the trial's
        numbers = {path: value for path, value in changed.items() if path not in own.arrays}
        arrays = {path: value for path, value in changed.items() if path in own.arrays}
        lost = []
        for values, find_lost in ((numbers, _find_lost_numbers), (arrays, _find_lost_arrays)):
            if values:
                again = runner.build(task.trial, task.config, task.epochs, stream=task.stream)
                lost += find_lost(values, without, _continue_training(runner, task, again, values))
                del again
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
        if are_equal(without.built.get(path), them.built.get(path))
        and not are_equal(without.marks.get(path), them.marks.get(path))
    ]


def _find_lost_arrays(
    arrays: Mapping[str, Any], without: _Continued, them: _Continued
) -> list[str]:
    alike = without.is_like(them)
    return [
        path
        for path, value in arrays.items()
        if without.marks.get(path) != them.marks.get(path) and (not alike or is_gathered(value))
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
    if varies or runner.notes[task.trial].is_inexact:
        return False
    return 2 * live.held_bytes <= context.share.live_bytes  # one model more at a time


class _Continued(NamedTuple):
    built: Mapping[str, Any]
    marks: Mapping[str, Any]
    results: Any
    state_hash: str

    def is_like(self, other: _Continued) -> bool:
        pairs = zip(walk(self.results, ""), walk(other.results, ""), strict=True)
        alike = (are_same(value, another) for (_, value), (_, another) in pairs)
        return self.state_hash == other.state_hash and all(alike)


def _continue_training(
    runner: UnitRunner, task: Task, live: LiveModel, numbers: Mapping[str, Any]
) -> _Continued:
    """Load the trial's state into a model just built, set `numbers`, and continue on a batch."""
    ended = task.step == runner.context.units_per_epoch - 1
    if not ended:
        runner.begin_again(live, task.epoch)
    live = runner.load_anew(live, task, runner.slots.open(task.trial).view(), task.epoch)
    model, values = live.model, live.own_numbers
    assert values is not None
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
    state_hash = _core.hash_state(_core.pack_state(runner.copy_to_host(live)))
    return _Continued(values.built, values.read_marks(), results, state_hash)


def _make_first_batch(runner: UnitRunner, live: LiveModel, task: Task) -> Any:
    loader = runner.loaders.make(live.model, task.config, training=True, trial=task.trial)
    mix = runner.context.order(task.trial).mix(max(task.part, 0), task.epoch)
    loader.begin([mix], task.epoch, 0, 1)
    return next(iter(loader))


def _make_warnings(runner: UnitRunner, task: Task, lost: list[str]) -> tuple[Warned, ...]:
    named = ", ".join(lost[:MOST_NAMED])
    text = (
        f"a hop loses {named}, which training changes: make it a buffer, or put it into state_dict"
    )
    with runner.redirect_output(task.trial), runner.warnings.collect(task.trial) as warned:
        warn_at_build(text, runner.context.build)
    return tuple(warned)
