"""The size of what a convolution or a pooling returns is torch's."""

import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from nhwc.operators.windows import places

small = st.integers(1, 4)


@given(st.integers(1, 20), small, small, st.integers(0, 2), small)
def test_places_of_a_convolution(length, size, stride, padding, dilation):
    assume(length + 2 * padding > dilation * (size - 1))
    settings = {"stride": stride, "padding": padding, "dilation": dilation}
    y = F.conv1d(torch.zeros(1, 1, length), torch.zeros(1, 1, size), **settings)
    assert places(length, size, **settings) == y.shape[2]


@given(st.integers(1, 20), small, small, st.integers(0, 2), small)
def test_places_of_a_pooling_that_may_reach_over_the_end(length, size, stride, padding, dilation):
    assume(2 * padding <= size and length + 2 * padding > dilation * (size - 1))
    settings = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": True}
    y = F.max_pool1d(torch.zeros(1, 1, length), size, **settings)
    assert places(length, size, **settings) == y.shape[2]
