"""A call is told by the memory of what it made, for as long as calls are recorded."""

import torch

from nhwc.models.trees import storage_of
from nhwc.watch.recorder import Recorder


def test_no_memory_is_taken_for_what_was_freed_before():
    x = torch.ones(2, 3)
    with Recorder(None):
        # Unless something holds them, the place of one is given to the next.
        places = [storage_of(x * 2) for _ in range(1000)]
    assert len({*places}) == 1000
