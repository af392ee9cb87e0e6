"""How often a searcher's state is written down, and how one catches up from an older state."""

from __future__ import annotations

from typing import Any

import pytest

from cerebro.coordinator.searcher_record import (
    CHARACTERS_PER_WORD,
    SMALL_STATE,
    Notes,
    Word,
    catch_up,
)
from cerebro.errors import InputError
from cerebro.searchers import ASHA, Suggestion
from cerebro.space import Space, loguniform

SPACE = Space({"lr": loguniform(1e-4, 1e-1)})


def written(searcher: Any, words: int, size_of: Any) -> list[int]:
    """Sizes of the states that are written down in a search that says so much."""
    notes, sizes = Notes(searcher), []
    for word in range(words):
        notes.said += 1
        if notes.are_due:
            sizes.append(size_of(word))
            notes.written(sizes[-1])
    return sizes


def test_the_cost_is_proportional_to_what_is_said() -> None:
    for words in (1_000, 10_000, 100_000):
        sizes = written(ASHA(), words, lambda word: 40 * word)
        assert sum(sizes) <= words * (CHARACTERS_PER_WORD + SMALL_STATE + 40)
        assert words - sizes[-1] / 40 <= words * 40 / CHARACTERS_PER_WORD + 1  # to be told again


def test_small_states_are_always_written_down() -> None:
    assert len(written(ASHA(), 1_000, lambda word: SMALL_STATE)) == 1_000


def test_what_is_not_repeatable_is_always_written_down() -> None:
    class Elsewhere(ASHA):
        repeatable = False

    assert len(written(Elsewhere(), 1_000, lambda word: 40 * word)) == 1_000


def test_whoever_goes_on_writes_the_state_down_at_once() -> None:
    notes = Notes(ASHA(), 500)
    notes.said += 1
    assert notes.are_due and not notes.are_complete
    notes.written(1_000_000)
    assert notes.are_complete and not notes.are_due


def ready() -> ASHA:
    searcher = ASHA()
    searcher.setup(SPACE, seed=0, epochs=9, n_trials=4, metric="loss", mode="min", points=())
    return searcher


def config(trial: int) -> dict[str, Any]:
    return SPACE.sample(0, trial)


TOLD = {(trial, 0): {"loss": float(trial)} for trial in range(3)}
WORDS = [
    *[Word(trial, 0, "begin", 1) for trial in range(3)],
    *[Word(trial, 0, "pause", None) for trial in range(3)],
    Word(0, 1, "resume", 3),
]


def told(trial: int, epoch: int) -> dict[str, float]:
    return TOLD[trial, epoch]


def test_a_searcher_catches_up() -> None:
    searcher = ready()
    catch_up(searcher, WORDS, told=told, config_of=config, epochs=9)
    assert searcher.suggest() == Suggestion(config(3), 1)


@pytest.mark.parametrize(
    ("at", "word", "message"),
    [
        (1, Word(1, 0, "begin", 3), "it said begin trial 1 until 3 epochs are done, and now Sugg"),
        (1, Word(1, 0, "clone", 1), "it said clone trial 1"),
        (5, Word(2, 0, "continue", None), r"it said continue \(trial 2, epoch 0\), and now <Deci"),
        (6, Word(1, 1, "resume", 3), "it said resume trial 1 until 3"),
        (6, Word(3, 0, "begin", 3), "it said begin trial 3 .* and now Suggestion"),
    ],
)
def test_what_is_not_said_again_is_told(at: int, word: Word, message: str) -> None:
    words = [*WORDS[:at], word]
    with pytest.raises(InputError, match=f"ASHA does not say again what is on record: {message}"):
        catch_up(ready(), words, told=told, config_of=config, epochs=9)


def test_another_configuration_is_told() -> None:
    with pytest.raises(InputError, match="it said begin trial 0"):
        catch_up(ready(), WORDS, told=told, config_of=lambda trial: {"lr": 0.5}, epochs=9)
