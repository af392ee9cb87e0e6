"""Define the base class of callbacks that observe a search without changing it."""

from __future__ import annotations


class Observer:
    """A callback whose failures do not end the search.

    Subclasses define any of the hooks of a callback: ``on_run_start(run)``,
    ``on_trial_start(trial)``, ``on_unit_end(trial, metrics)``, ``on_epoch_end(trial, metrics)``,
    ``on_trial_end(trial)``, ``on_run_end(result)``. If a hook raises an exception, Cerebro warns
    once, and does not call the observer again in this run. An exception in any other callback ends
    the run.

    ``on_run_closed()``, which only observers have, is called last, when the run's folder is
    complete and released; ``on_commit()`` is called by the thread that writes the run's store
    whenever rows have become durable, and must return at once.

    A resumed run calls ``on_run_start`` again, with the trials as they are; it reports epochs that
    have not been reported before, unless their record was lost in a crash.

    Parameters
    ----------
    strict
        Whether a failure ends the run, as with any other callback.
    """

    strict = False

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict

    def close(self) -> None:
        """Release the observer's resources; called once, however the run has ended."""
