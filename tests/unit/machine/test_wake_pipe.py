"""`WakePipe`: a pipe is readable from `wake` until `clear`."""

from __future__ import annotations

import os

import pytest

from cerebro.machine.signals import PIPE_BYTES, WakePipe, wait_for


@pytest.mark.parametrize("times", [1, 2, PIPE_BYTES, PIPE_BYTES + 1, 3 * PIPE_BYTES])
def test_a_pipe_is_readable_until_it_is_cleared(times):
    pipe = WakePipe()
    assert wait_for([pipe.fileno()], 0.0) == set()
    for _ in range(times):
        pipe.wake()
    assert wait_for([pipe.fileno()], 10.0) == {pipe.fileno()}
    pipe.clear()
    assert wait_for([pipe.fileno()], 0.0) == set()
    pipe.clear()  # an empty one
    pipe.close()
    pipe.wake()  # a closed one


def test_only_the_readable_descriptors_are_returned():
    pipes = [WakePipe() for _ in range(3)]
    pipes[1].wake()
    assert wait_for([pipe.fileno() for pipe in pipes], 10.0) == {pipes[1].fileno()}


def test_a_descriptor_whose_other_end_is_closed_counts_as_readable():
    ours, theirs = os.pipe()
    os.close(theirs)
    assert wait_for([ours], 10.0) == {ours}
    os.close(ours)
