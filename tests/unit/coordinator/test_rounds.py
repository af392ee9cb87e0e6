"""`Rounds`: reports in an order that timing cannot change."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro.coordinator.search_loop import Report, Rounds

EPOCHS = 6
Call = tuple[str, int, int]


class Trials:
    """Simulated trials: each trains an epoch at a time, in whatever order `choose` says.

    What becomes of a trial after an epoch is a pure function of its number and the calls so
    far, as with a searcher; `fates` says how it ends: an epoch at which it fails, is paused
    or stopped.
    """

    def __init__(self, fates: list[tuple[str, int]], width: int, *, ordered: bool = True) -> None:
        self.fates = fates
        self.width = width
        self.rounds = Rounds(ordered=ordered)
        self.calls: list[Call] = []
        self.training: dict[int, int] = {}  # trial: epoch
        self.paused: list[int] = []
        self.asked = 0
        self.ahead = 0

    def advance(self) -> None:
        while True:
            report = self.rounds.take()
            if report is not None:
                self.deliver(report)
            elif not self.rounds.is_over or not (self.ask() | self.rounds.begin()):
                return

    def deliver(self, report: Report) -> None:
        self.calls.append(("report", report.trial, report.epoch))
        fate, epoch = self.fates[report.trial]
        if report.ended or report.epoch + 1 == EPOCHS or (fate, epoch) == ("stop", report.epoch):
            return
        if (fate, epoch) == ("pause", report.epoch):
            self.paused.append(report.trial)
            return
        self.training[report.trial] = report.epoch + 1
        self.rounds.join(report.trial)

    def ask(self) -> bool:
        asked = False
        while self.rounds.live < self.width:
            if self.asked < len(self.fates):
                trial, epoch = self.asked, 0
                self.asked += 1
            elif self.paused:
                # As a searcher would: by all it has heard, not by who came first.
                self.paused.sort()
                trial = self.paused.pop(len(self.calls) % len(self.paused))
                epoch = self.fates[trial][1] + 1
            else:
                break
            self.calls.append(("begin", trial, epoch))
            self.training[trial] = epoch
            self.rounds.join(trial)
            asked = True
        return asked

    def finish_an_epoch(self, trial: int) -> None:
        epoch = self.training.pop(trial)
        failed = self.fates[trial] == ("fail", epoch)
        self.rounds.arrive(Report(trial, epoch, {"loss": 1.0}, ended=failed))

    def run(self, choose: random.Random, restore: bool = False) -> list[Call]:
        self.advance()
        while self.training:
            self.finish_an_epoch(choose.choice(sorted(self.training)))
            if restore:
                self.restore()
            self.advance()
        assert self.rounds.live == 0
        return self.calls

    def restore(self) -> None:
        """Go on with what a store would have of the rounds; arrived reports arrive again."""
        waiting = self.rounds._arrived
        state = json.loads(json.dumps(self.rounds.state_dict()))
        self.rounds = Rounds(ordered=self.rounds.ordered)
        self.rounds.load_state_dict(state)
        for trial in sorted(waiting, reverse=True):
            self.rounds.arrive(waiting[trial])


fates = st.lists(
    st.tuples(st.sampled_from(["none", "fail", "pause", "stop"]), st.integers(0, EPOCHS - 2)),
    min_size=1,
    max_size=12,
)


@given(fates, st.integers(1, 9), st.integers(0, 2**32), st.booleans())
def test_any_order_of_arrival_gives_the_same_calls(fates, width, seed, restore):
    lowest_first = random.Random(0)
    lowest_first.choice = min
    assert Trials(fates, width).run(random.Random(seed), restore) == Trials(fates, width).run(
        lowest_first
    )


@given(fates, st.integers(1, 9), st.integers(0, 2**32), st.booleans())
def test_every_epoch_is_reported_once_and_in_order(fates, width, seed, ordered):
    calls = Trials(fates, width, ordered=ordered).run(random.Random(seed))
    for trial, (fate, epoch) in enumerate(fates):
        last = epoch if fate in ("fail", "stop") else EPOCHS - 1
        reported = [call[2] for call in calls if call[:2] == ("report", trial)]
        assert reported == list(range(last + 1))


@given(fates, st.integers(1, 9), st.integers(0, 2**32))
def test_reports_are_delivered_by_round_and_trial_number(fates, width, seed):
    """Within a round numbers rise; a trial has one report in each round that it is live in."""
    simulated = Trials(fates, width)
    rounds: list[tuple[int, int]] = []
    deliver = simulated.deliver

    def watched(report: Report) -> None:
        rounds.append((simulated.rounds.number, report.trial))
        deliver(report)

    simulated.deliver = watched
    simulated.run(random.Random(seed))
    assert rounds == sorted(rounds)
    assert len(set(rounds)) == len(rounds)


def test_a_trial_continues_without_waiting_for_the_round():
    rounds = Rounds()
    for trial in (0, 1, 2):
        rounds.join(trial)
    assert rounds.begin()
    rounds.arrive(Report(1, 0, {}))
    assert rounds.take() is None, "trial 0 comes first"
    rounds.arrive(Report(0, 0, {}))
    assert rounds.take() == Report(0, 0, {})
    rounds.join(0)
    assert rounds.take() == Report(1, 0, {})
    rounds.join(1)
    rounds.arrive(Report(0, 1, {}))
    assert rounds.take() is None, "round 0 is not over"
    assert not rounds.is_over
    assert not rounds.begin()
    rounds.arrive(Report(2, 0, {}))
    assert rounds.take() == Report(2, 0, {})
    assert rounds.is_over
    assert rounds.live == 2
    assert rounds.begin()
    assert rounds.number == 1
    assert rounds.take() == Report(0, 1, {})
    assert rounds.take() is None


def test_without_an_order_reports_are_delivered_as_they_arrive():
    rounds = Rounds(ordered=False)
    for trial in (0, 1):
        rounds.join(trial)
    rounds.arrive(Report(1, 0, {}))
    assert rounds.is_over
    assert rounds.take() == Report(1, 0, {})
    assert rounds.live == 1
    assert rounds.take() is None
    assert not rounds.begin()


@pytest.mark.parametrize("ordered", [False, True])
def test_the_state_records_which_reports_are_due(ordered):
    rounds = Rounds(ordered=ordered)
    for trial in (3, 1):
        rounds.join(trial)
    rounds.begin()
    rounds.arrive(Report(1, 4, {}))
    assert rounds.take() == Report(1, 4, {})
    rounds.join(7)
    state = rounds.state_dict()
    assert state["due"] + state["next"] == [3, 7]
    fresh = Rounds(ordered=ordered)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert fresh.live == 2
