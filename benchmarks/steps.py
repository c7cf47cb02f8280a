"""The kernels that are no dense convolution, layer by layer: ours beside torch's best.

    python -m benchmarks.steps --threads 2

Both in one process, in turns, on channels-last data, checked against each other first. Depthwise
convolutions run against oneDNN's with prepacked weights; a whole call is timed on both sides.
"""

import argparse

import torch
import torch.nn.functional as F

from nhwc.kernels.convolutions.depthwise import depthwise_step
from nhwc.kernels.layers import copies, elementwise, linear, pooling
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.tape.invoke import Invocation
from nhwc.kernels.tape.steps import Step, View
from nhwc.machine.environment import Environment
from nhwc.machine.timing import interleave

DEPTHWISE = (
    *((32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 3, 2), (192, 28, 3, 1)),
    *((384, 14, 3, 1), (576, 14, 3, 2), (960, 7, 3, 1), (240, 28, 5, 1), (144, 56, 5, 2)),
    *((672, 14, 5, 1), (1152, 7, 5, 1), (96, 56, 7, 1), (384, 14, 7, 1), (58, 28, 3, 1)),
)
POOLS = ((64, 112, 3, 2, 1), (192, 28, 3, 1, 1), (64, 224, 2, 2, 0))
IMAGES = ((64, 56), (24, 56), (512, 7), (116, 28))
LINEAR = ((1, 512, 1000), (1, 2048, 1000), (4, 1280, 1000), (1, 96, 4))


def image(n, c, h, w):
    return torch.randn(n, c, h, w).to(memory_format=torch.channels_last)


def depthwise(c, size, k, stride):
    x, weight, bias = image(1, c, size, size), torch.randn(c, 1, k, k), torch.randn(c)
    settings = [k // 2] * 2, [stride] * 2, [1, 1], c
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *settings, list(x.shape))

    def theirs():
        args = (x, packed, bias, *settings, "relu", [], "")
        return torch.ops.mkldnn._convolution_pointwise(*args)

    def step(x, y):
        where = {"stride": (stride,) * 2, "padding": (k // 2,) * 2, "activation": Activation.RELU}
        return depthwise_step(x, y, weight, bias, **where)

    return f"depthwise {k}x{k} s{stride} {c}@{size}", [x], step, theirs


def maxpool(c, size, k, stride, padding):
    x = image(1, c, size, size)
    where = {"size": (k, k), "stride": (stride,) * 2, "padding": (padding,) * 2}
    return (
        f"maxpool {k}x{k} s{stride} {c}@{size}",
        [x],
        lambda x, y: pooling.maxpool_step(x, y, **where),
        lambda: F.max_pool2d(x, k, stride, padding),
    )


def per_image(c, size):
    x, other, gate = image(1, c, size, size), image(1, c, size, size), torch.rand(1, c, 1, 1)
    scale, shift = torch.rand(c), torch.randn(c)
    mean, variance = torch.zeros(c), torch.ones(c) - 1e-5
    where = f"{c}@{size}"

    def normed():
        return F.batch_norm(x, mean, variance, scale, shift).relu_()

    def affine(x, y):
        return elementwise.affine_step(x, y, scale, shift, activation=Activation.RELU)

    def added(x, other, y):
        return elementwise.add_step(x, other, y, activation=Activation.RELU)

    def shuffled():
        pair = torch.stack([x, other], 2)
        return pair.reshape(1, 2 * c, size, size)

    def silu(x, y):
        return elementwise.activation_step(x, y, Activation.SILU)

    def interleaved(x, other, y):
        return copies.interleave_steps([x, other], y)

    yield f"batch norm, relu {where}", [x], affine, normed
    yield f"add, relu {where}", [x, other], added, lambda: (x + other).relu_()
    yield f"silu {where}", [x], silu, lambda: F.silu(x)
    yield f"gate {where}", [x, gate], elementwise.multiply_step, lambda: x * gate
    yield f"cat, shuffle {where}", [x, other], interleaved, shuffled
    yield (
        f"global mean {where}",
        [x],
        pooling.global_mean_step,
        lambda: F.adaptive_avg_pool2d(x, 1),
    )


def linear_layer(n, inputs, outputs):
    x, weight, bias = torch.randn(n, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    return (
        f"linear {inputs}->{outputs} batch {n}",
        [x],
        lambda x, y: linear.linear_step(x, y, weight, bias),
        lambda: F.linear(x, weight, bias),
    )


def cases():
    yield from (depthwise(*shape) for shape in DEPTHWISE)
    yield from (maxpool(*shape) for shape in POOLS)
    for shape in IMAGES:
        yield from per_image(*shape)
    yield from (linear_layer(*shape) for shape in LINEAR)


def bound(inputs, step, like):
    """The step as a call on `inputs`, and the tensor that it writes."""
    y = torch.empty_like(like, memory_format=torch.preserve_format)
    if y.ndim == 4:
        y = y.to(memory_format=torch.channels_last)
    buffers = {str(i): tensor for i, tensor in enumerate([*inputs, y])}
    shapes = [(*tensor.shape, 1, 1)[:4] for tensor in buffers.values()]
    views = [View(name, shape, shape[1]) for name, shape in zip(buffers, shapes, strict=True)]
    made = step(*views)
    call = Invocation.of([made] if isinstance(made, Step) else made, torch.get_num_threads())
    return lambda: call(buffers), y


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(Environment.here())
    with torch.inference_mode():
        for name, inputs, step, theirs in cases():
            expected = theirs()
            ours, y = bound(inputs, step, expected)
            ours()
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
            times = interleave({"torch": theirs, "ours": ours}, rounds=args.rounds)
            micro = {key: 1e6 * samples.median_s for key, samples in times.items()}
            ratio = micro["torch"] / micro["ours"]
            print(
                f"{name:32} torch {micro['torch']:7.1f} us  ours {micro['ours']:7.1f}  {ratio:.2f}x"
            )


if __name__ == "__main__":
    main()
