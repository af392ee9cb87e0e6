"""Pickle the answers of workers."""

from __future__ import annotations

import pickle

import cloudpickle


def pickled_event(event: object) -> bytes:
    """Pickle an event, or a message that contains one.

    Use cloudpickle, which takes three times as long, only for objects of the user's code.
    """
    try:
        return pickle.dumps(event, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return cloudpickle.dumps(event, pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]
