import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import nhwc
from nhwc import Format, audit, convert_, format_of, to_format
from nhwc.formats import CHANNELS_LAST_OF, strides_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.int64, torch.complex64)
TARGETS = {
    4: (Format.CONTIGUOUS, Format.CHANNELS_LAST),
    5: (Format.CONTIGUOUS, Format.CHANNELS_LAST_3D),
}
MEMORY = {
    Format.CONTIGUOUS: torch.contiguous_format,
    Format.CHANNELS_LAST: torch.channels_last,
    Format.CHANNELS_LAST_3D: torch.channels_last_3d,
}

shapes = st.integers(4, 5).flatmap(
    lambda n: st.lists(st.integers(0, 4), min_size=n, max_size=n).map(tuple)
)


@st.composite
def tensors(draw):
    """Tensors of every shape with 0 and 1 in every position, permuted, sliced and expanded."""
    shape = draw(shapes)
    values = torch.arange(torch.Size(shape).numel())
    tensor = values.reshape(shape).to(draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        order = draw(st.permutations(range(len(shape))))
        tensor = tensor.permute(order)
    dim = draw(st.integers(0, len(shape) - 1))
    if tensor.shape[dim] > 1 and draw(st.booleans()):
        tensor = tensor.narrow(dim, draw(st.integers(0, 1)), tensor.shape[dim] - 1)
    if draw(st.booleans()):
        tensor = tensor.to(memory_format=MEMORY[CHANNELS_LAST_OF[len(shape)]])
    return tensor


@given(tensors())
def test_format_of_agrees_with_torch(tensor):
    last = CHANNELS_LAST_OF[tensor.ndim]
    is_last = tensor.numel() == 0 or tensor.is_contiguous(memory_format=MEMORY[last])
    truth = (tensor.is_contiguous(), is_last)
    assert (
        format_of(tensor)
        is {
            (True, True): Format.AMBIGUOUS,
            (True, False): Format.CONTIGUOUS,
            (False, True): last,
            (False, False): Format.OTHER,
        }[truth]
    )


@given(tensors(), st.integers(0, 1))
def test_to_format_says_the_format_and_keeps_the_values(tensor, which):
    target = TARGETS[tensor.ndim][which]
    result = to_format(tensor, target)
    assert result.stride() == strides_of(tensor.shape, target)
    assert result.is_contiguous(memory_format=MEMORY[target])
    assert torch.equal(result, tensor)
    assert format_of(result, hint=target) is target


@given(tensors(), st.integers(0, 1))
def test_to_format_copies_only_where_data_must_move(tensor, which):
    target = TARGETS[tensor.ndim][which]
    result = to_format(tensor, target)
    if tensor.is_contiguous(memory_format=MEMORY[target]) and tensor.numel():
        assert result.data_ptr() == tensor.data_ptr()


@given(shapes)
def test_a_dense_tensor_survives_the_round_trip(shape):
    plain = torch.rand(shape)
    there = to_format(plain, TARGETS[len(shape)][1])
    back = to_format(there, Format.CONTIGUOUS)
    assert back.stride() == strides_of(shape, Format.CONTIGUOUS)
    assert torch.equal(back, plain)


@pytest.mark.parametrize(
    "shape", [(2, 1, 4, 4), (2, 3, 1, 1), (2, 1, 1, 1), (1, 1, 1, 1), (0, 3, 2, 2)]
)
def test_ambiguous_tensors(shape):
    x = torch.empty(shape)
    assert format_of(x) is Format.AMBIGUOUS
    assert format_of(x, hint=Format.CHANNELS_LAST) is Format.CHANNELS_LAST
    assert format_of(x, hint=Format.CONTIGUOUS) is Format.CONTIGUOUS
    assert format_of(x, hint=Format.CHANNELS_LAST_3D) is Format.AMBIGUOUS


def test_a_hint_does_not_overrule_the_strides():
    assert format_of(torch.empty(2, 3, 4, 4), hint=Format.CHANNELS_LAST) is Format.CONTIGUOUS


@pytest.mark.parametrize("format", [Format.CONTIGUOUS, Format.CHANNELS_LAST])
def test_an_image_inside_of_vmap_has_a_format(format):
    images = torch.stack([to_format(torch.rand(2, 3, 4, 4), format)] * 2)
    asked = []
    torch.vmap(lambda image: asked.append(format_of(image)) or image)(images)
    assert asked == [format]


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 1, 4, 4), (2, 3, 1, 1), (2, 3, 2, 4, 4)])
def test_an_image_inside_of_vmap_can_be_marked(shape):
    last = TARGETS[len(shape)][1]
    strides = []

    def marked(image):
        result = to_format(image, last)
        strides.append(result.stride())
        return result.square().sum(), to_format(result, Format.CONTIGUOUS)

    images = torch.rand(5, *shape)
    sums, back = torch.vmap(marked)(images)
    torch.vmap(torch.func.grad(lambda image: marked(image)[0]))(images)
    assert strides == [strides_of(shape, last)] * 2
    assert torch.equal(back, images)
    torch.testing.assert_close(sums, images.square().flatten(1).sum(1))


class Again(nn.Module):
    """Tokens made an image again, and marked as the audit advises."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 4, 3)

    def forward(self, tokens):
        image = tokens.transpose(1, 2).reshape(-1, 3, 5, 5)
        return self.mix(to_format(image, Format.CHANNELS_LAST))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_marks_its_images_is_one_graph_of_torch_compile(dynamic):
    net, tokens = Again(), torch.rand(1, 25, 3)
    fast = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    exported = [torch.export.export(net, (tokens,), strict=one).module() for one in (False, True)]
    for made in (fast, *exported):
        torch.testing.assert_close(made(tokens), net(tokens))
        assert made(tokens).stride() == net(tokens).stride()


def test_an_image_inside_of_vmap_can_be_marked_behind_torch_compile():
    images = torch.rand(5, 2, 3, 4, 4)
    marked = torch.vmap(lambda image: to_format(image, Format.CHANNELS_LAST) * 2)
    fast = torch.compile(marked, backend="eager", fullgraph=True)
    torch.testing.assert_close(fast(images), images * 2)


@pytest.mark.parametrize("ndim", [0, 1, 2, 3, 6])
def test_other_dimensions_are_contiguous_or_other(ndim):
    x = torch.empty((2,) * ndim)
    assert format_of(x) is Format.CONTIGUOUS
    if ndim > 1:
        assert format_of(x.transpose(0, 1)) is Format.OTHER


def test_a_channel_slice_has_no_format():
    x = torch.empty(2, 4, 3, 3).to(memory_format=torch.channels_last)
    assert format_of(x[:, :2]) is Format.OTHER
    assert format_of(x.to_sparse()) is Format.OTHER


def test_autograd_flows_through_to_format():
    for shape in [(2, 3, 4, 4), (2, 1, 4, 4), (2, 3, 1, 1)]:
        x = torch.rand(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda t: to_format(t, Format.CHANNELS_LAST).sin(), x)


class Marked(nn.Module):
    def forward(self, x):
        return to_format(x, Format.CHANNELS_LAST) * 2


def test_a_model_that_marks_its_images_is_a_graph_like_others():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Marked(), nn.Conv2d(4, 1, 3), Marked()
    net = nn.Sequential(*layers)
    fused = nhwc.fuse(net.eval())
    assert not fused.report.opaque
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(fused(x), net(x))
    assert fused(x).stride() == torch.fx.symbolic_trace(net)(x).stride() == net(x).stride()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 3, 1, 1), (2, 3, 4, 4)])
def test_what_is_traced_marks_images_of_other_sizes_too(shape):
    traced = torch.jit.trace(Marked(), torch.rand(shape))
    for x in (torch.rand(shape), torch.rand(3, 5, 6, 7)):
        assert torch.equal(traced(x), x * 2)
        assert traced(x).stride() == Marked()(x).stride()


@pytest.mark.parametrize(
    ("tensor", "format", "message"),
    [
        (torch.empty(2, 3), Format.CHANNELS_LAST, "has 2 dimensions; channels_last needs 4"),
        (torch.empty(2, 3, 4, 4), Format.CHANNELS_LAST_3D, "needs 5"),
        (torch.empty(2, 3, 4, 4), Format.OTHER, "none to ask for"),
        (torch.empty(2, 3, 4, 4).to_sparse(), Format.CONTIGUOUS, r"Call \.to_dense\(\) first"),
    ],
)
def test_to_format_refuses_clearly(tensor, format, message):
    with pytest.raises(nhwc.InputError, match=message):
        to_format(tensor, format)


CONVOLUTIONS = [
    (nn.Conv2d(8, 4, 3), Format.CHANNELS_LAST),
    (nn.Conv2d(8, 4, 1), Format.CHANNELS_LAST),
    (nn.ConvTranspose2d(8, 4, 3), Format.CHANNELS_LAST),
    (nn.Conv2d(8, 8, 3, groups=8), Format.CHANNELS_LAST),
    (nn.Conv3d(8, 4, 3), Format.CHANNELS_LAST_3D),
    (nn.ConvTranspose3d(8, 4, 3), Format.CHANNELS_LAST_3D),
]


@pytest.mark.parametrize(("conv", "format"), CONVOLUTIONS)
def test_convert_and_back(conv, format):
    plain = copy.deepcopy(conv)
    weight = conv.weight
    optimizer = torch.optim.SGD(conv.parameters(), lr=0.1)
    assert convert_(conv) is conv
    assert conv.weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert weight.stride() == strides_of(weight.shape, format)
    assert format_of(weight, hint=format) is format
    assert torch.equal(weight, plain.weight)
    assert convert_(conv, Format.CONTIGUOUS).weight.stride() == plain.weight.stride()


def test_convert_leaves_everything_else():
    net = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Linear(4, 4), nn.BatchNorm2d(4), nn.Embedding(3, 4))
    before = [p.stride() for p in net.parameters()]
    convert_(net)
    assert [p.stride() for p in net.parameters()] == before


def test_convert_only_3d():
    net = nn.ModuleList([nn.Conv2d(8, 4, 3), nn.Conv3d(8, 4, 3)])
    convert_(net, Format.CHANNELS_LAST_3D)
    assert [format_of(conv.weight) for conv in net] == [Format.CONTIGUOUS, Format.CHANNELS_LAST_3D]


def test_tied_weights_stay_tied_and_state_dicts_stay_unchanged():
    net = nn.ModuleList([nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)])
    net[1].weight = net[0].weight
    state = {key: value.clone() for key, value in net.state_dict().items()}
    convert_(net)
    assert net[1].weight is net[0].weight
    torch.testing.assert_close(net.state_dict(), state)
    net.load_state_dict(state)
    assert format_of(net[0].weight) is Format.CHANNELS_LAST


def test_parameters_over_the_same_memory_go_on_sharing_it():
    one, two = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    two.weight = nn.Parameter(one.weight.data)
    convert_(nn.Sequential(one, two))
    assert format_of(two.weight) is Format.CHANNELS_LAST
    with torch.no_grad():
        one.weight.add_(1)
    assert torch.equal(one.weight, two.weight)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: format_of(x, hint=torch.channels_last), "it is no nhwc.Format. Use Format.CON"),
        (lambda x: format_of(x, hint=Format.OTHER), "other cannot be asked for: it describes"),
        (lambda x: to_format(x, torch.channels_last), "torch.channels_last cannot be asked for"),
        (lambda x: to_format(x, "channels_last"), "it is no nhwc.Format"),
        (lambda x: to_format(x.numpy(), Format.CONTIGUOUS), "a ndarray has no memory format. Make"),
        (lambda x: format_of([x]), "a list has no memory format"),
        (lambda x: to_format(nested(x), Format.CONTIGUOUS), "a nested tensor has no memory format"),
        (lambda x: convert_(nn.Conv2d(1, 1, 1), "channels_last"), "it is no nhwc.Format"),
        (convert_, "cannot convert a Tensor in place: it is no torch.nn.Module"),
        (lambda x: nhwc.optimize("resnet18", x), r"nhwc\.load_model\('resnet18'\) makes one of a"),
        (lambda x: nhwc.strict(x).__enter__(), "cannot watch a Tensor: it is no torch.nn.Module"),
    ],
)
def test_what_is_of_the_wrong_type_is_said_in_one_line(call, message):
    with pytest.raises(nhwc.InputError, match=message):
        call(torch.rand(1, 1, 4, 4))


def nested(x):
    return torch.nested.nested_tensor([x, x], layout=torch.jagged)


def test_a_gradient_follows_its_weight():
    conv = nn.Conv2d(4, 4, 3)
    conv(torch.rand(1, 4, 8, 8)).sum().backward()
    assert format_of(convert_(conv).weight.grad) is Format.CHANNELS_LAST


FUSED = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.AdamW: {"amsgrad": True},
    torch.optim.Adagrad: {},
}


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("back", [False, True])
def test_an_optimizer_that_has_stepped_stays_valid(kind, back):
    """Fused kernels add momentum in the order of memory, whatever the strides say."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 1)).double()
    images = torch.randn(2, 3, 8, 8, dtype=torch.double)

    def trained(convert):
        model = copy.deepcopy(net)
        optimizer = kind(model.parameters(), fused=True, **FUSED[kind])
        for step in range(6):
            if convert and step == 2:
                convert_(model)
            if convert and back and step == 4:
                convert_(model, Format.CONTIGUOUS)
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        return model

    for plain, last in zip(trained(False).parameters(), trained(True).parameters(), strict=True):
        torch.testing.assert_close(plain, last, rtol=0, atol=1e-12)


def test_an_audit_leaves_what_an_optimizer_remembers_as_it_is():
    net = nn.Conv2d(3, 8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    net(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    remembered = optimizer.state[net.weight]["momentum_buffer"]
    audit(net, torch.randn(1, 3, 8, 8), compare=True, backward=True, reorders=True)
    assert optimizer.state[net.weight]["momentum_buffer"] is remembered
    assert format_of(remembered) is Format.CONTIGUOUS


def test_weights_in_shared_memory_stay_there():
    net = nn.Conv2d(3, 8, 3).share_memory()
    assert convert_(net).weight.is_shared()
    assert not convert_(nn.Conv2d(3, 8, 3)).weight.is_shared()


def test_parametrized_weights_are_computed_in_the_format():
    conv = register_parametrization(nn.Conv2d(4, 8, 3), "weight", nn.Tanh())
    want = conv.weight.detach().clone()
    convert_(conv)
    assert format_of(conv.weight) is Format.CHANNELS_LAST
    torch.testing.assert_close(conv.weight, want)


def test_a_lazy_convolution_is_refused_by_name():
    with pytest.raises(nhwc.InputError, match=r"^0 \(LazyConv2d\) has no weight yet"):
        convert_(nn.Sequential(nn.LazyConv2d(4, 3)))


def test_convert_to_no_target():
    with pytest.raises(
        nhwc.InputError, match="other cannot be asked for: it describes strides that are found"
    ):
        convert_(nn.Conv2d(3, 4, 3), Format.OTHER)


class NamesItselfThis(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))

    def forward(this, x):  # noqa: N805
        return torch.nn.functional.conv2d(x, this.weight)


def test_weights_are_found_in_methods_whose_first_argument_has_another_name():
    net = nhwc.convert_(NamesItselfThis())
    assert nhwc.format_of(net.weight) is nhwc.Format.CHANNELS_LAST
