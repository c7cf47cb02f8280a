"""Programs: memory planned by lifetime, concatenation without copies, one call for a model."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from nhwc import Format, InputError, VerificationError, format_of
from nhwc.kernels.convolutions.conv import conv2d_candidates
from nhwc.kernels.convolutions.depthwise import depthwise_step
from nhwc.kernels.convolutions.spec import ConvSpec
from nhwc.kernels.layers import copies, elementwise, linear, pooling
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.programs.bound import _planes
from nhwc.kernels.programs.builder import Builder
from nhwc.kernels.programs.pool import from_nothing
from nhwc.kernels.tape.arena import LINE, Lifetime, least, place
from nhwc.kernels.tape.steps import View

lives = st.builds(
    lambda size, first, length: Lifetime(size, first, first + length),
    st.integers(0, 500),
    st.integers(0, 12),
    st.integers(0, 6),
)


@given(st.lists(lives, max_size=20))
def test_buffers_that_live_together_lie_apart(lifetimes):
    offsets, total = place(lifetimes)
    placed = list(zip(lifetimes, offsets, strict=True))
    assert all(o % LINE == 0 and o + life.bytes <= total for life, o in placed)
    for index, (life, offset) in enumerate(placed):
        for other, start in placed[:index]:
            apart = offset + life.bytes <= start or start + other.bytes <= offset
            assert apart or not life.meets(other) or not (life.bytes and other.bytes)
    assert least(lifetimes) <= total


def test_large_buffers_lie_where_there_is_room():
    """Where no half of the memory stays in a cache, middles are not worth more of it."""
    chain = [(6, 1, 2), (6, 0, 1), (10, 3, 5)]

    def bytes_of(scale):
        lifetimes = [Lifetime(scale * size, first, last) for size, first, last in chain]
        return place(lifetimes)[1] / scale, least(lifetimes) / scale

    assert bytes_of(LINE) == (14, 12)
    assert bytes_of(1 << 22) == (12, 12)


def test_memory_is_used_again():
    chain = [Lifetime(1000, step, step + 1) for step in range(10)]
    assert place(chain)[1] == 2 * 1024


def test_what_takes_the_place_of_another_has_its_middle_there():
    large, small = Lifetime(16 * LINE, 0, 1), Lifetime(4 * LINE, 2, 3)
    assert place([large, small]) == ([0, 6 * LINE], 16 * LINE)
    beside = [Lifetime(16 * LINE, 0, 3), Lifetime(8 * LINE, 0, 1), Lifetime(2 * LINE, 2, 3)]
    assert place(beside) == ([0, 16 * LINE, 19 * LINE], 24 * LINE)


def names(program):
    return [step.kernel.name for step in program.schedule.steps]


def activation(kind):
    return lambda x, y: elementwise.activation_step(x, y, kind)


def mixed(n=2, c=10):
    """Slices, a concatenation, a depthwise convolution with a residual, pooling, a linear layer."""
    torch.manual_seed(0)
    weight, bias = torch.randn(c, 1, 3, 3), torch.randn(c)
    last = torch.randn(5, c)
    builder = Builder()
    x = builder.input((n, c, 9, 7))
    left, right = builder.slice(x, 0, 4), builder.slice(x, 4, c)
    a, b = builder.buffer((n, 4, 9, 7)), builder.buffer((n, c - 4, 9, 7))
    builder.add(activation(Activation.RELU), left, a)
    builder.add(activation(Activation.SILU), right, b)
    whole = builder.cat([b, a])
    y = builder.buffer((n, c, 9, 7))

    def depthwise(x, y, residual):
        return depthwise_step(x, y, weight, bias, padding=(1, 1), residual=residual)

    builder.add(depthwise, whole, y, x)
    mean, scores = builder.buffer((n, c)), builder.buffer((n, 5))
    builder.add(pooling.global_mean_step, y, mean)
    builder.add(lambda x, y: linear.linear_step(x, y, last), mean, scores)
    builder.output(y)
    builder.output(scores, (n, 5))

    def reference(x):
        whole = torch.cat([F.silu(x[:, 4:]), F.relu(x[:, :4])], 1)
        y = F.conv2d(whole, weight, bias, padding=1, groups=c) + x
        return y, y.mean((2, 3)) @ last.T

    return builder.build(), reference


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_a_program_computes_its_steps(isa, format):
    program, reference = mixed()
    for _ in range(3):
        x = torch.randn(2, 10, 9, 7).to(memory_format=format)
        results = program(x)
        for result, expected in zip(results, reference(x), strict=True):
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert format_of(results[0]) is Format.CHANNELS_LAST
    assert names(program) == ["input", "sum", "sum", "depthwise3s1t7", "global_mean", "linear"]


@pytest.mark.parametrize(
    "shape", [(2, 21, 9, 37), (1, 5, 3, 16), (1, 40, 7, 33), (3, 2, 1, 3), (1, 64, 19, 31)], ids=str
)
@pytest.mark.parametrize("lies", ["contiguous", "channels_last", "every second"])
def test_an_image_comes_in_and_goes_out_in_planes(isa, shape, lies):
    x = torch.randn(shape)
    if lies == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif lies == "every second":
        x = torch.randn(*shape[:3], 2 * shape[3])[..., ::2]
    builder = Builder()
    y = builder.buffer(shape)
    builder.add(elementwise.copy_step, builder.input(shape), y)
    builder.output(y, format=Format.CONTIGUOUS)
    (result,) = builder.build()(x)
    assert result.is_contiguous()
    assert torch.equal(result, x)


def test_strided_inputs_and_fresh_outputs():
    program, reference = mixed()
    base = torch.randn(2, 20, 9, 14)
    x = base[:, ::2, :, ::2]
    first, second = program(x), program(x * 2)
    torch.testing.assert_close(first[0], reference(x)[0], rtol=1e-5, atol=1e-5)
    assert first[0].data_ptr() != second[0].data_ptr()
    torch.testing.assert_close(x, base[:, ::2, :, ::2])


def first_layer(n, h, w, stride, residual=False):
    spec = ConvSpec(
        *(n, 3, h, w, 3, 3, 3),
        stride=(stride, stride),
        padding=(1, 1),
        has_residual=residual,
    )
    kernel = next(one for one in conv2d_candidates(spec) if one.name == "stem")
    weight, bias = torch.randn(3, 3, 3, 3), torch.randn(3)
    packed = kernel.pack(weight, bias)
    builder = Builder()
    x, y = builder.input((n, 3, h, w)), builder.buffer((n, 3, spec.out_h, spec.out_w))
    more = (x,) if residual else ()
    builder.add(lambda x, y, *more: kernel.steps(x, y, packed, *more), x, y, *more)
    builder.output(y)

    def reference(x):
        y = F.conv2d(x, weight, bias, stride, padding=1)
        return y + x if residual else y

    return builder.build(), reference


@pytest.mark.parametrize(
    ("n", "h", "w", "stride", "residual"),
    [(1, 30, 64, 2, False), (2, 17, 41, 1, False), (3, 5, 33, 2, False), (2, 9, 40, 1, True)],
)
def test_a_first_layer_reads_its_input_where_it_lies(isa, n, h, w, stride, residual):
    program, reference = first_layer(n, h, w, stride, residual)
    x = torch.randn(n, 3, h, w)
    wide = torch.randn(n, 6, h, 2 * w)[:, ::2, :, ::2]
    for tensor in (x, x.to(memory_format=torch.channels_last), wide, x + 1, x[:, [2, 1, 0]]):
        torch.testing.assert_close(program(tensor)[0], reference(tensor), rtol=1e-4, atol=1e-4)
    begins = [0] * len(program.schedule.steps)
    # What it adds it reads channels last.
    assert bool(_planes(program.schedule, begins, program.schedule.inputs[0])) is not residual


def test_several_threads_call_one_program(threads):
    threads(2)
    program, reference = mixed()
    inputs = [torch.randn(2, 10, 9, 7) for _ in range(40)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: program(x)[0], inputs))
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, reference(x)[0], rtol=1e-5, atol=1e-5)


def test_the_thread_count_may_change(threads):
    program, reference = mixed()
    x = torch.randn(2, 10, 9, 7)
    for count in (1, 3, 2):
        threads(count)
        torch.testing.assert_close(program(x)[1], reference(x)[1], rtol=1e-5, atol=1e-5)


def _in_child(program, x, queue):
    queue.put(program(x)[0].sum().item())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_call(threads):
    threads(2)
    program, _ = mixed()
    x = torch.randn(2, 10, 9, 7)
    expected = program(x)[0].sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(program, x, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == pytest.approx(expected, rel=1e-4)


def test_wrong_inputs():
    program, _ = mixed()
    with pytest.raises(InputError, match="takes 1 inputs; got 2"):
        program(torch.zeros(2, 10, 9, 7), torch.zeros(1))
    with pytest.raises(InputError, match=r"input 0 is \(1, 10, 9, 7\)"):
        program(torch.zeros(1, 10, 9, 7))
    with pytest.raises(InputError, match="recorded for"):
        program(torch.zeros(2, 10, 9, 7, dtype=torch.float64))
    with pytest.raises(InputError, match="input 0 requires a gradient"):
        program(torch.zeros(2, 10, 9, 7, requires_grad=True))


@pytest.mark.parametrize("between", [False, True], ids=["the result", "what lies between"])
def test_from_nothing_shows_what_a_step_leaves_out(between):
    """Memory that is used again may hold what is right, left by whoever computed it."""
    builder = Builder()
    x, y = builder.input((2, 8, 4, 4)), builder.buffer((2, 8, 4, 4))
    builder.add(elementwise.copy_step, builder.slice(x, 0, 5), builder.slice(y, 0, 5))
    if between:
        whole, y = y, builder.buffer((2, 8, 4, 4))
        builder.add(elementwise.add_step, x, whole, y)
    builder.output(y)
    program = builder.build()
    image = torch.randn(2, 8, 4, 4)
    with from_nothing():
        (found,) = program(image)
    assert torch.equal(found[:, :5], image[:, :5] * (1 + between))
    assert found[:, 5:].isnan().all()


def test_memory_that_was_taken_under_inference_mode_can_be_wiped():
    program, reference = mixed()
    x = torch.randn(2, 10, 9, 7)
    with torch.inference_mode():
        program(x)
    with from_nothing():
        torch.testing.assert_close(program(x)[0], reference(x)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("where", "shift"), [("a result", -8), ("a result", 8), ("the block", -512)]
)
def test_what_is_written_beside_memory_is_seen(where, shift):
    """Memory of others would be spoiled without any sign of it."""
    builder = Builder()
    x, y = builder.input((1, 8, 1, 4)), builder.buffer((1, 8, 1, 4))
    misplaced = lambda x, y: elementwise.copy_step(x, replace(y, offset=y.offset + shift))
    builder.add(misplaced, x, y)
    if where == "the block":
        between, y = y, builder.buffer((1, 8, 1, 4))
        builder.add(elementwise.copy_step, between, y)
    builder.output(y)
    program = builder.build()
    with from_nothing(), pytest.raises(VerificationError, match="wrote beside its memory"):
        program(torch.randn(1, 8, 1, 4))


def test_a_part_that_is_counted_otherwise_lies_within_the_whole():
    """Some channels of one pixel may be a pixel of these: the buffer is no smaller for that."""
    builder = Builder()
    x, both, y = builder.input((1, 8, 1, 1)), builder.buffer((1, 32, 1, 1)), (1, 16, 1, 1)
    low, high = builder.slice(both, 0, 16), builder.slice(both, 16, 32)
    for part in (0, 8, 16, 24):
        builder.add(elementwise.copy_step, x, builder.slice(both, part, part + 8))
    y = builder.buffer(y)
    count = lambda view: view.as_numbers(1, view.shape[1], 1, 1)
    builder.add(lambda a, b, y: elementwise.add_step(count(a), count(b), y), low, high, y)
    builder.output(y)
    program = builder.build()
    (life,) = [life for item, life in program.schedule.lives(1).items() if item is both]
    assert life.bytes == 4 * 32
    image = torch.randn(1, 8, 1, 1)
    with from_nothing():
        (found,) = program(image)
    assert torch.equal(found, 2 * torch.cat([image, image], 1))


def test_numbers_that_are_counted_otherwise_are_waited_for():
    """Channel 16 of one pixel is the first of the second pixel, if pixels have sixteen."""
    written = View("buffer", (1, 16, 1, 1), 32, 16)
    one_by_one = View("buffer", (32, 1, 1, 1), 1)
    apart = View("buffer", (16, 1, 1, 1), 1)
    writer = elementwise.copy_step(View("x", (1, 16, 1, 1), 16), written)
    for read, disturbed in ((one_by_one, True), (apart, False)):
        target = View("y", read.shape, 1)
        assert elementwise.copy_step(read, target).disturbs(writer) is disturbed


def test_a_chain_of_concatenations_is_one_buffer():
    builder = Builder()
    x = builder.input((1, 8, 4, 4))
    parts = [builder.buffer((1, 8, 4, 4))]
    builder.add(activation(Activation.RELU), x, parts[0])
    for _ in range(4):
        joined = builder.cat(parts)
        new = builder.buffer((1, 8, 4, 4))
        last = joined.shape[1]

        def pick(x, y, last=last):
            return elementwise.activation_step(x.channels(last - 8, last), y, Activation.SILU)

        builder.add(pick, joined, new)
        parts.append(new)
    builder.output(builder.cat(parts))
    program = builder.build()
    assert names(program) == ["input"] + ["sum"] * 5
    x = torch.randn(1, 8, 4, 4)
    expected = [F.relu(x)]
    for _ in range(4):
        expected.append(F.silu(expected[-1]))
    torch.testing.assert_close(program(x)[0], torch.cat(expected, 1), rtol=1e-5, atol=1e-6)


def test_concatenation_copies_what_cannot_move():
    builder = Builder()
    x = builder.input((1, 8, 4, 4))
    part = builder.buffer((1, 8, 4, 4))
    builder.add(activation(Activation.RELU), x, part)
    builder.output(part)
    builder.output(builder.cat([x, part, builder.slice(part, 2, 5), part]))
    program = builder.build()
    x = torch.randn(1, 8, 4, 4)
    y = F.relu(x)
    assert torch.equal(program(x)[0], y)
    assert torch.equal(program(x)[1], torch.cat([x, y, y[:, 2:5], y], 1))
    with pytest.raises(InputError, match="only channels may differ"):
        builder.cat([part, builder.buffer((1, 8, 2, 2))])


def test_shuffles_and_outputs_of_every_shape():
    builder = Builder()
    x = builder.input((2, 12, 3, 5))
    y = builder.buffer((2, 12, 3, 5))
    builder.add(lambda x, y: copies.shuffle_steps(x, y, 3), x, y)
    builder.output(y, (2, 180))
    builder.output(y, format=Format.CONTIGUOUS)
    builder.output(x)
    builder.output(builder.slice(y, 2, 7))
    results = builder.build()(x := torch.randn(2, 12, 3, 5))
    y = F.channel_shuffle(x, 3)
    expected = [y.flatten(1), y, x, y[:, 2:7]]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert format_of(results[1]) is Format.CONTIGUOUS


def test_a_linear_layer_over_pixels_of_a_concatenation():
    builder = Builder()
    x = builder.input((2, 6, 3, 4))
    part = builder.buffer((2, 6, 3, 4))
    builder.add(activation(Activation.RELU), x, part)
    whole = builder.dense(builder.cat([part, x]))
    weight = torch.randn(7, 144)
    y = builder.buffer((2, 7))
    builder.add(lambda x, y: linear.linear_step(x, y, weight), whole, y)
    builder.output(y, (2, 7))
    x = torch.randn(2, 6, 3, 4)
    expected = torch.cat([x.relu(), x], 1).flatten(1) @ weight.T
    torch.testing.assert_close(builder.build()(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_independent_steps_are_one_phase():
    builder = Builder()
    x = builder.input((1, 8, 4, 4))
    parts = [builder.buffer((1, 8, 4, 4)) for _ in range(3)]
    for part in parts:
        builder.add(activation(Activation.RELU), x, part)
    builder.output(builder.cat(parts))
    program = builder.build()
    assert len(program.schedule.phases) == 2  # they meet after the input alone


def test_results_are_of_the_type_that_kernels_write():
    program, reference = mixed()
    x = torch.randn(2, 10, 9, 7)
    expected = reference(x)
    torch.set_default_dtype(torch.float64)
    try:
        results = program(x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(results, list(expected), rtol=1e-5, atol=1e-5)
