"""How often a searcher's state is written down, and how one catches up from an older state."""

from __future__ import annotations

from typing import Any

import pytest

from cerebro.coordinator.searcher_record import (
    CHARACTERS_PER_DECISION,
    SMALL_STATE,
    StateSaving,
    replay_decisions,
)
from cerebro.coordinator.searcher_record import StoredDecision as Stored
from cerebro.errors import InputError
from cerebro.searchers import ASHA, Suggestion
from cerebro.space import Space, loguniform

SPACE = Space({"lr": loguniform(1e-4, 1e-1)})


def written(searcher: Any, words: int, size_of: Any) -> list[int]:
    """Sizes of the states that are written down in a search that says so much."""
    notes, sizes = StateSaving(searcher), []
    for word in range(words):
        notes.decisions += 1
        if notes.is_due:
            sizes.append(size_of(word))
            notes.note_saved(sizes[-1])
    return sizes


def test_saving_cost_is_proportional_to_the_decisions() -> None:
    for words in (1_000, 10_000, 100_000):
        sizes = written(ASHA(), words, lambda word: 40 * word)
        assert sum(sizes) <= words * (CHARACTERS_PER_DECISION + SMALL_STATE + 40)
        assert (
            words - sizes[-1] / 40 <= words * 40 / CHARACTERS_PER_DECISION + 1
        )  # to be told again


def test_small_states_are_always_written_down() -> None:
    assert len(written(ASHA(), 1_000, lambda word: SMALL_STATE)) == 1_000


def test_states_of_unrepeatable_searchers_are_always_saved() -> None:
    class Elsewhere(ASHA):
        repeatable = False

    assert len(written(Elsewhere(), 1_000, lambda word: 40 * word)) == 1_000


def test_the_state_is_saved_at_once_on_resume() -> None:
    notes = StateSaving(ASHA(), 500)
    notes.decisions += 1
    assert notes.is_due and not notes.is_complete
    notes.note_saved(1_000_000)
    assert notes.is_complete and not notes.is_due


def ready() -> ASHA:
    searcher = ASHA(reduction_factor=3)
    searcher.setup(SPACE, seed=0, epochs=9, n_trials=4, metric="loss", mode="min", points=())
    return searcher


def config(trial: int) -> dict[str, Any]:
    return SPACE.sample(0, trial)


TOLD = {(trial, 0): {"loss": float(trial)} for trial in range(3)}
WORDS = [
    *[Stored(trial, 0, "begin", 1) for trial in range(3)],
    *[Stored(trial, 0, "pause", None) for trial in range(3)],
    Stored(0, 1, "resume", 3),
]


def told(trial: int, epoch: int) -> dict[str, float]:
    return TOLD[trial, epoch]


def test_replayed_decisions_restore_a_searcher() -> None:
    searcher = ready()
    replay_decisions(searcher, WORDS, reported=told, config_of=config, epochs=9)
    assert searcher.suggest() == Suggestion(config(3), 1)


@pytest.mark.parametrize(
    ("at", "word", "message"),
    [
        (
            1,
            Stored(1, 0, "begin", 3),
            "it decided begin trial 1 until 3 epochs are done, and now Sugg",
        ),
        (1, Stored(1, 0, "clone", 1), "it decided clone trial 1"),
        (
            5,
            Stored(2, 0, "continue", None),
            r"it decided continue \(trial 2, epoch 0\), and now <Deci",
        ),
        (6, Stored(1, 1, "resume", 3), "it decided resume trial 1 until 3"),
        (6, Stored(3, 0, "begin", 3), "it decided begin trial 3 .* and now Suggestion"),
    ],
)
def test_a_decision_that_is_not_repeated_is_refused(at: int, word: Stored, message: str) -> None:
    words = [*WORDS[:at], word]
    with pytest.raises(InputError, match=f"ASHA does not repeat its stored decisions: {message}"):
        replay_decisions(ready(), words, reported=told, config_of=config, epochs=9)


def test_a_replayed_configuration_that_differs_is_refused() -> None:
    with pytest.raises(InputError, match="it decided begin trial 0"):
        replay_decisions(
            ready(), WORDS, reported=told, config_of=lambda trial: {"lr": 0.5}, epochs=9
        )
