"""What writes rows of numbers without gaps, in front of a concatenation."""

import pytest
import torch
import torch.nn.functional as F

from nhwc import kernels
from nhwc.kernels.convolutions.conv import kernel_for
from nhwc.kernels.convolutions.spec import ConvSpec


@pytest.mark.parametrize(("name", "c", "k"), [("few", 4, 1), ("few", 4, 2), ("narrow", 1, 1)])
@pytest.mark.parametrize("first", [True, False])
def test_the_copy_into_the_whole_is_a_step_of_its_own(name, c, k, first):
    x = torch.randn(2, c, 9, 40).to(memory_format=torch.channels_last)
    weight, other = torch.randn(k, c, 5, 5), torch.randn(7, c, 1, 1)
    builder = kernels.Builder()
    image = builder.input(x.shape)

    def convolve(name, weight, padding, y):
        spec = ConvSpec(2, c, 9, 40, len(weight), *weight.shape[2:], padding=padding)
        kernel = kernel_for(name, spec)
        packed = kernel.pack(weight, None)
        builder.add(lambda x, y: kernel.steps(x, y, packed), image, y)
        return y

    parts = [
        convolve(name, weight, (2, 2), builder.dense(builder.buffer((2, k, 9, 40)))),
        convolve("pointwise", other, (0, 0), builder.buffer((2, 7, 9, 40))),
    ]
    expected = [F.conv2d(x, weight, padding=2), F.conv2d(x, other)]
    order = slice(None, None, 1 if first else -1)
    builder.output(builder.cat(parts[order]))
    [found] = builder.build()(x)
    torch.testing.assert_close(found, torch.cat(expected[order], 1), rtol=1e-4, atol=1e-4)
