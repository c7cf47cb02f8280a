"""Random steps that stand for two layers, as `step_cases` has them for one."""

import torch
import torch.nn.functional as F

from nhwc.kernels.convolutions.depthwise import Window
from nhwc.kernels.convolutions.expanded import Expansion, expanded_depthwise_step, serves
from nhwc.kernels.convolutions.projected import Depthwise, projected_depthwise_step

from .cases import ACTIVATIONS, STEADY
from .step_cases import CHANNELS, StepCase, finishing


def expanded_depthwise(choose):
    depth, c = choose.choice((1, 3, 8, 16, 17, 24, 40)), choose.choice(CHANNELS)
    k, stride = choose.choice([3, 5, 7]), choose.randint(1, 2)
    x = torch.randn(choose.randint(1, 3), depth, choose.randint(7, 15), choose.randint(13, 20))
    if choose.random() < 0.3:
        x.view(-1)[choose.randint(0, 9) :: 97] = choose.choice([float("nan"), float("inf")])
    padding = (choose.randint(0, k // 2), choose.randint(0, k // 2))
    window = Window((k, k), (stride, stride), padding)
    inner = choose.choice(STEADY)
    weight, bias = torch.randn(c, depth, 1, 1) / depth, torch.randn(c)
    expansion = Expansion(weight, bias if choose.random() < 0.7 else None, inner, 0.1)
    filters, shift = torch.randn(c, 1, k, k), torch.randn(c)

    def convolve(t, b, size):
        wide = F.conv2d(t, size(weight), None if b is None else size(b))
        wide = size(ACTIVATIONS[inner](wide)) if size is not torch.abs else wide
        return F.conv2d(wide, size(filters), size(shift), stride, padding, groups=c)

    total = convolve(x.double(), expansion.bias, torch.Tensor.double)
    sizes = convolve(x.abs(), expansion.bias, torch.abs)
    settings, extra, expected, sizes = finishing(choose, total, sizes)
    assert serves(depth, window, total.shape[3])

    def make(x, *rest):
        residual, y = (rest[0], rest[1]) if extra else (None, rest[0])
        step = expanded_depthwise_step
        return step(x, y, expansion, filters, shift, window=window, **settings, residual=residual)

    return StepCase([x, *extra], make, expected, sizes, units=32.0)


def projected_depthwise(choose):
    c, columns = choose.choice(CHANNELS), choose.choice(CHANNELS)
    k, stride = choose.choice([3, 5, 7]), choose.randint(1, 2)
    x = torch.randn(choose.randint(1, 3), c, choose.randint(7, 15), choose.randint(13, 20))
    if choose.random() < 0.3:
        x.view(-1)[choose.randint(0, 9) :: 97] = choose.choice([float("nan"), float("inf")])
    padding = (choose.randint(0, k // 2 + 1), choose.randint(0, k // 2))
    window = Window((k, k), (stride, stride), padding)
    inner = choose.choice(STEADY)
    filters, shift = torch.randn(c, 1, k, k) / k, torch.randn(c)
    depthwise = Depthwise(filters, shift if choose.random() < 0.7 else None, window, inner, 0.1)
    weight, bias = torch.randn(columns, c, 1, 1), torch.randn(columns)

    def convolve(t, size):
        shifts = None if depthwise.bias is None else size(shift)
        mid = F.conv2d(t, size(filters), shifts, stride, padding, groups=c)
        mid = size(ACTIVATIONS[inner](mid)) if size is not torch.abs else mid
        return F.conv2d(mid, size(weight), size(bias))

    total = convolve(x.double(), torch.Tensor.double)
    sizes = convolve(x.abs(), torch.abs)
    settings, extra, expected, sizes = finishing(choose, total, sizes)
    assert window.tile(total.shape[3])

    def make(x, *rest):
        residual, y = (rest[0], rest[1]) if extra else (None, rest[0])
        step = projected_depthwise_step
        return step(x, y, depthwise, weight, bias, **settings, residual=residual)

    return StepCase([x, *extra], make, expected, sizes, units=32.0)


MAKERS = (expanded_depthwise, projected_depthwise)
