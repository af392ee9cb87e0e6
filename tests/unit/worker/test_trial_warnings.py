"""`cerebro.worker.trial_warnings`: what workers note, under whose filters, and how it is shown."""

from __future__ import annotations

import sys
import types
import warnings

import pytest

from cerebro.worker import trial_warnings
from cerebro.worker.messages import Warned
from cerebro.worker.trial_warnings import ShownWarnings, Watch, carry_filters, show


@pytest.fixture(autouse=True)
def own_filters(monkeypatch):
    monkeypatch.setattr(trial_warnings, "_carried", [])
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


def category(module, base=UserWarning):
    return type("Odd", (base,), {"__module__": module})


def noted(watch, *raised, trial=0):
    with watch.collect(trial) as found:
        for message, kind in raised:
            warnings.warn(message, kind, stacklevel=1)
    return [each.text for each in found]


def test_each_warning_is_collected_once_per_trial():
    watch = Watch()
    assert noted(watch, ("a", UserWarning)) == ["a"]
    assert noted(watch, ("a", UserWarning)) == []
    assert noted(watch, ("a", UserWarning), trial=1) == ["a"]
    watch.forget(0)
    assert noted(watch, ("a", UserWarning)) == ["a"]


def test_a_filter_holds_for_a_category_that_is_not_imported_yet(monkeypatch):
    odd = category("a_library_of_late")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", odd)
        carried = carry_filters()
    watch = Watch(carried)
    assert noted(watch, ("a", odd), ("b", UserWarning)) == ["b"]
    monkeypatch.setitem(sys.modules, "a_library_of_late", types.SimpleNamespace(Odd=odd))
    watch.take_filters()
    assert warnings.filters[0][2] is odd
    assert noted(watch, ("a", odd), ("c", UserWarning)) == ["c"]


def test_a_filter_of_several_categories_travels():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (UserWarning, DeprecationWarning))
        carried = carry_filters()
    watch = Watch(carried)
    kinds = (UserWarning, DeprecationWarning, RuntimeWarning)
    assert noted(watch, *((kind.__name__, kind) for kind in kinds)) == ["RuntimeWarning"]


def test_earlier_runs_filters_are_removed_and_the_process_filters_stay():
    warnings.filterwarnings("ignore", "own")
    Watch((("ignore", None, "builtins:UserWarning", None, 0),))
    assert [entry[2] for entry in warnings.filters] == [UserWarning, Warning]
    watch = Watch(())
    assert noted(watch, ("a", UserWarning), ("own", UserWarning)) == ["a"]


def test_a_filter_that_makes_errors_of_warnings_does_so_in_a_trial():
    watch = Watch((("error", None, "builtins:UserWarning", None, 0),))
    with pytest.raises(UserWarning, match="a"):
        noted(watch, ("a", UserWarning))


def test_a_users_showwarning_stays_in_place(monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    seen = []
    watch = Watch()
    with watch.collect(0):
        warnings.showwarning = lambda message, *rest, **more: seen.append(str(message))
        warnings.warn("a", stacklevel=1)
    warnings.warn("b", stacklevel=1)
    assert seen == ["a", "b"]


def test_a_warning_is_shown_as_its_nearest_known_category():
    names = ("no_such_library:Odd", "builtins:DeprecationWarning", "builtins:Warning")
    made_of_two = ("builtins:UnicodeWarning", "builtins:Warning")
    with warnings.catch_warnings(record=True) as shown:
        show(Warned(names, "gone", "train.py", 7), "trial 3: ")
        show(Warned(made_of_two, "odd", "train.py", 8))
        show(Warned(("nowhere:Odd",), "lost", "train.py", 9))
    assert [(str(w.message), w.category, w.lineno) for w in shown] == [
        ("trial 3: gone", DeprecationWarning, 7),
        ("odd", UnicodeWarning, 8),
        ("lost", UserWarning, 9),
    ]


def test_a_run_shows_each_warning_once_and_three_texts_per_line():
    told = ShownWarnings()
    texts = ["a", "b", "a", "c", "d"]
    with warnings.catch_warnings(record=True) as shown:
        for number, text in enumerate(texts):
            told.show([Warned(("builtins:UserWarning",), text, "train.py", 7)], f"trial {number}")
        told.show([Warned(("builtins:UserWarning",), "d", "train.py", 8)], "trial 9")
    assert [str(warning.message) for warning in shown] == [
        "trial 0: a",
        "trial 1: b",
        "trial 3: c",
        "trial 9: d",
    ]
