"""Writes into slices of fresh tensors: which become new tensors, and which stay as they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import Format, format_of, fuse
from nhwc.graph import puts_back, written_into
from nhwc.optimized.returned import return_as
from nhwc.passes.fold_constants import fold_constants
from nhwc.passes.mend_writes import mend_writes

from ..fusing import Block, assert_same, rewrite
from ..optimizing import force

X = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0))


def block(function, **parts):
    return Block(lambda self, x: function(self, x), **parts).eval()


def _half_of_a_bias(self, x):
    bias = self.layer.bias.clone()
    bias[2:4].zero_()
    return nn.functional.linear(x.movedim(1, -1), self.layer.weight, bias)


def _lines(self, x):
    y = x * 2
    y[:, :, 1:3].mul_(3)
    y[..., 0].clamp_(0, 1)
    return y + 1


def _box(self, x):
    """As detectors add a reference to a box: Python assigns what it has written already."""
    y = x * 2
    part = y[..., :2].add_(x[..., 2:])
    y[..., :2] = part
    return y.sigmoid() + 1


def _queries(self, x):
    """As attention scales its queries, which are seen in another order of their dimensions."""
    queries = (x * 2).flatten(2).transpose(1, 2)
    queries.mul_(0.5)
    return queries @ x.flatten(2)


def _one_hot(self, x):
    """As codebooks choose their entries: what `to` returns may be what it was called on."""
    nearest = x.flatten(1).argmax(1, keepdim=True)
    chosen = torch.zeros(x.shape[0], 120).to(x)
    chosen.scatter_(1, nearest, 1)
    return chosen + x.flatten(1)


def _copied_and_filled(self, x):
    y = x * 2
    y[:, :2].copy_(x[:, 2:4])
    y[:, 2:3].fill_(0.5)
    y[:, 3:4].copy_(x[:, :1], non_blocking=True)
    return y + 1


GOES = {
    "copied and filled": (_copied_and_filled, 3),
    "one of a codebook": (_one_hot, 1),
    "queries": (_queries, 1),
    "centre of a box": (_box, 1),
    "half of a bias": (_half_of_a_bias, 1),
    "lines, then a column": (_lines, 2),
}


@pytest.mark.parametrize("name", GOES)
def test_a_write_becomes_a_new_tensor(name):
    function, count = GOES[name]
    model = block(function, layer=nn.Linear(6, 6))
    graph, (report, _) = rewrite(model, mend_writes, fold_constants)
    assert [site.applied for site in report.sites] == [True] * count
    written = [one for one in map(written_into, graph.graph.nodes) if one is not None]
    assert all(one.target == "clone" and len(one.users) == 1 for one in written)
    assert_same(model, graph, X)


def _of_the_input(self, x):
    x[:, 1:2].zero_()
    return x + 1


def _of_a_view(self, x):
    y = (x + 1).flatten(2)
    y[:, 1:2].zero_()
    return y


def _taken_before(self, x):
    y = x + 1
    part = y[:, :3]
    y[:, 1:2].zero_()
    return y.sum(1) + part.sum(1)


def _read_by_others(self, x):
    y = x + 1
    return y + y[:, 1:2].zero_()


def _written_again(self, x):
    y = x + 1
    y[:, 1:2].mul_(2).relu_()
    return y


def _compared_and_read(self, x):
    """Without a write the comparison would answer in booleans."""
    y = x + 1
    chosen = y[:, 1:2].gt_(1)
    return y.sum(1) + chosen.sum(1), chosen


def _one_of_two(self, x):
    values, places = (x + 1).max(1)
    values.neg_()
    return values, places


def _one_of_a_layers(self, x):
    values, places = self.pool(x + 1)
    values.mul_(2)
    return values, places


def _squeezed(self, x):
    """What `squeeze_` writes is the shape of what it is called on, and no number."""
    y = x + 1
    y[:, :1].squeeze_(1)
    y[:, 1:].transpose_(2, 3)
    return y * 2


def _squeezed_as_a_whole(self, x):
    y = x + 1
    z = y.sum()
    y.unsqueeze_(1)
    return y * z


def _of_more_dimensions(self, x):
    y = x + 1
    y[:, None].mul_(3)
    return y


STAYS = {
    "one dimension more": (
        _of_more_dimensions,
        "an index that is no slice makes a copy, or a dimension more",
    ),
    "one of two results": (_one_of_two, "what it writes into may be one of several results"),
    "one of a layer's": (_one_of_a_layers, "what it writes into may be one of several results"),
    "a comparison that is read": (_compared_and_read, "what it returns is read"),
    "the input": (_of_the_input, "what it writes into may be a part of another tensor"),
    "a view": (_of_a_view, "what it writes into may be a part of another tensor"),
    "another part": (_taken_before, "another name of the same memory is read again"),
    "a part that is written again": (_written_again, "what it returns may be written into"),
    "a part that is read": (_read_by_others, "what it returns is read"),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_write_that_others_may_see_stays(name):
    function, reason = STAYS[name]
    model = block(function, pool=nn.MaxPool2d(2, return_indices=True))
    graph, (report,) = rewrite(model, mend_writes)
    assert [site.reason for site in report.sites] == [reason]
    assert_same(model, graph, X)


@pytest.mark.parametrize("function", [_squeezed, _squeezed_as_a_whole])
def test_what_changes_shapes_stays(function):
    model = block(function)
    graph, (report,) = rewrite(model, mend_writes)
    assert not report.applied
    assert_same(model, graph, X)


def _seen_through_another_view(self, x):
    y = x * 2
    y.transpose(1, 2).mul_(0.5)
    return y


def _of_the_inputs_view(self, x):
    x.transpose(1, 2).mul_(0.5)
    return x + 1


def _overwritten_by_name(self, x):
    y = x * 2
    z = self.conv(y)
    y.copy_(other=x[:1])
    return y.sum() + z


def _of_another_type(self, x):
    """Without a write the sum would be in float64."""
    y = (x * 2).transpose(1, 2)
    y.add_(x.transpose(1, 2).double())
    return y


def _compared(self, x):
    y = (x * 2).transpose(1, 2)
    y.gt_(0.5)
    return y


def _counted(self, x):
    y = (x > 0).int().transpose(1, 2)
    y.cumsum_(1)
    return y


@pytest.mark.parametrize("function", [_seen_through_another_view, _of_the_inputs_view])
def test_a_write_into_a_view_stays_if_it_may_be_seen(function):
    model = block(function)
    graph, (report,) = rewrite(model, mend_writes)
    assert report.sites == ()
    assert_same(model, graph, X)


def _in_place(self, x):
    y = x * 2
    z = self.conv(y)
    return self.relu(y).sum() + z


def _in_place_by_name(self, x):
    y = x * 2
    z = self.conv(y)
    return F.hardswish(y, inplace=True).sum() + z


def _in_place_by_place(self, x):
    y = x * 2
    z = self.conv(y)
    return F.leaky_relu(y, 0.2, True).sum() + z


def _by_an_underscore(self, x):
    y = x * 2
    z = self.conv(y)
    return F.elu_(y, 0.5).sum() + z


def _added(self, x):
    y = x * 2
    z = self.conv(y)
    y.add_(x.double())
    return y.sum() + z


def _overwritten(self, x):
    y = x * 2
    z = self.conv(y)
    y.copy_(x[:1])
    return y.sum() + z + x.sum()


READ_BEFORE = [_in_place, _in_place_by_name, _in_place_by_place, _by_an_underscore, _added]
READ_BEFORE += [_overwritten, _overwritten_by_name, _of_another_type, _compared, _counted]


@pytest.mark.parametrize("function", READ_BEFORE)
def test_what_others_have_read_is_written_anew(function):
    model = block(function, conv=nn.Conv2d(6, 3, 3), relu=nn.ReLU(inplace=True))
    graph, (report,) = rewrite(model, mend_writes)
    assert report.sites
    assert all(site.applied for site in report.sites)
    names = [str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes]
    assert not any(name.endswith("_") for name in names)
    assert model.relu.inplace
    assert_same(model, graph, X)


def _scaled(self, x):
    x.div_(2)
    return x + 1


def _scaled_and_shifted(self, x):
    early = x.mean()
    x.sub_(0.5).div_(0.25)
    y = x * early
    x.add_(1)
    return y + x.permute(0, 2, 3, 1).sum()


def _by_a_layer(self, x):
    return self.relu(x) + x


def _by_a_function(self, x):
    y = nn.functional.leaky_relu(x, 0.1, inplace=True)
    torch.add(y, 1, out=x)
    return x.flatten(1) + 1


PUT_BACK = {_scaled: 1, _scaled_and_shifted: 4, _by_a_layer: 1, _by_a_function: 2}


def _called(model, x):
    """What the model answers, and what it left in its input."""
    x = x.clone(memory_format=torch.preserve_format)
    return model(x), x


@pytest.mark.parametrize("function", PUT_BACK)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_what_is_written_into_the_input_is_put_back(function, layout):
    model = block(function, relu=nn.ReLU(inplace=True))
    graph, (report, again) = rewrite(model, mend_writes, mend_writes)
    assert [site.applied for site in report.sites] == [True] * PUT_BACK[function]
    assert again.sites == ()
    assert [node for node in graph.graph.nodes if puts_back(node)]
    x = X.to(memory_format=layout)
    torch.testing.assert_close(_called(graph, x), _called(model, x), rtol=0, atol=0)


def test_an_input_of_integers_is_refused_as_by_the_model():
    model = block(_scaled)
    graph, _ = rewrite(model, mend_writes)
    for one in (model, graph):
        with pytest.raises(RuntimeError, match="can't be cast"):
            one((X * 100).int())


def _with_a_copy(self, x):
    """A value, and a copy of it that was written into, as a part leaves its input."""
    y = self.conv(x)
    copied = y.clone()
    copied.relu_()
    return y, copied


def _in_a_whole(self, x):
    y, copied = _with_a_copy(self, x)
    z = copied + 1
    y.copy_(copied)
    return y * z


def _nothing_is_written(self, x):
    y = self.conv(x)
    y.copy_(y.clone())
    return y * 2


def _read_between(self, x):
    y, copied = _with_a_copy(self, x)
    z = y + 1
    y.copy_(copied)
    return y * z


def _copy_is_written_again(self, x):
    y, copied = _with_a_copy(self, x)
    y.copy_(copied)
    copied.add_(1)
    return y * copied


def _value_is_written_again(self, x):
    y, copied = _with_a_copy(self, x)
    y.copy_(copied)
    y.flatten(1).add_(1)
    return y * copied


def _copy_is_returned(self, x):
    y, copied = _with_a_copy(self, x)
    y.copy_(copied)
    return y, copied


def _whole_is_read(self, x):
    y = self.conv(x)
    part = y[:, :2]
    copied = part.clone()
    copied.mul_(2)
    z = y * 3
    part.copy_(copied)
    return y.sum() + z


def _whole_is_written(self, x):
    y = self.conv(x)
    part = y[0]
    copied = part.clone()
    copied.mul_(2)
    y.add_(5)
    part.copy_(copied)
    return y * 1


@pytest.mark.parametrize(
    "function",
    [
        _whole_is_read,
        _whole_is_written,
        _in_a_whole,
        _nothing_is_written,
        _read_between,
        _copy_is_written_again,
        _value_is_written_again,
        _copy_is_returned,
    ],
)
def test_a_copy_that_is_put_back_into_an_inner_value_is_none(function):
    model = block(function, conv=nn.Conv2d(6, 4, 3))
    graph, _ = rewrite(model, mend_writes)
    clones = [node for node in graph.graph.nodes if node.target == "clone"]
    assert bool(clones) == (function not in (_in_a_whole, _nothing_is_written))
    torch.testing.assert_close(graph(X), model(X), rtol=0, atol=0)


def _returned(self, x):
    x.div_(2)
    return x


def _returned_as_a_view(self, x):
    return x.div_(2).flatten(1)


def _seen_through_a_view(self, x):
    part = x[:, :1]
    x.div_(2)
    return x + part


def _after_a_view(self, x):
    x.div_(2)
    x.flatten(1).add_(1)
    return x + 1


SHOWN = {
    _returned: "the input is returned, or a view of it",
    _returned_as_a_view: "the input is returned, or a view of it",
    _seen_through_a_view: "a view of the input is read again",
    _after_a_view: "it writes into a view of the input",
}


@pytest.mark.parametrize("function", SHOWN)
def test_a_write_that_the_result_shows_stays_in_the_input(function):
    model = block(function)
    graph, (report,) = rewrite(model, mend_writes)
    assert {site.reason for site in report.sites} == {SHOWN[function]}
    torch.testing.assert_close(_called(graph, X), _called(model, X), rtol=0, atol=0)


def test_an_argument_that_is_fixed_is_no_second_input():
    class Options(nn.Module):
        def forward(self, x, by=2.0, mask=None, flip=False):
            x.div_(by)
            y = x + 1 if mask is None else x * mask
            return y.flip(1) if flip else y

    fused = fuse(Options(), passes=(mend_writes,))
    assert [site.applied for site in fused.report.passes[0].sites] == [True]
    torch.testing.assert_close(_called(fused, X), _called(Options(), X), rtol=0, atol=0)
    with pytest.raises(AssertionError, match=r"by is fixed to 2\.0"):
        fused(X.clone(), 3.0)


def test_a_result_that_is_compared_may_be_the_input():
    class Compares(nn.Module):
        def forward(self, x, y):
            x.div_(2)
            return x + (y == 1)

    _, (report,) = rewrite(Compares(), mend_writes)
    assert [site.applied for site in report.sites] == [False]


def test_a_result_is_given_its_layout_before_the_input_is_put_back():
    class Turned(nn.Module):
        def forward(self, x):
            x.div_(2)
            return x + 1

    graph, _ = rewrite(Turned(), mend_writes)
    wanted = X.to(memory_format=torch.channels_last)
    return_as(graph, (X,), {"output": wanted})
    assert format_of(graph(X.clone())) is Format.CHANNELS_LAST
    assert [node for node in graph.graph.nodes if puts_back(node)]


def test_two_inputs_may_be_one():
    class Both(nn.Module):
        def forward(self, x, y):
            x.div_(2)
            return x + y

    graph, (report,) = rewrite(Both(), mend_writes)
    assert [site.reason for site in report.sites] == ["two inputs may share memory"]
    x, y = X.clone(), X.clone()
    assert torch.equal(graph(x, x), Both()(y, y))


class FillsInPlace(nn.Module):
    """Writes into what it has read, by one of the methods whose other forms lose channels last."""

    def __init__(self, write):
        super().__init__()
        self.conv, self.write = nn.Conv2d(3, 8, 3), write

    def forward(self, x):
        y = self.conv(x)
        return self.write(y, y > 0)


WRITES = {
    "masked_fill_": lambda y, mask: y.masked_fill_(mask, 0.5),
    "scatter_": lambda y, mask: y.scatter_(1, mask.long(), 0.5),
    "index_add_": lambda y, mask: y.index_add_(1, torch.tensor([1]), mask[:, :1] * 2.0),
    "index_copy_": lambda y, mask: y.index_copy_(1, torch.tensor([1]), mask[:, :1] * 2.0),
}


@torch.no_grad()
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_keeps_its_strides(name):
    last = {"memory_format": torch.channels_last}
    model, x = FillsInPlace(WRITES[name]).eval().to(**last), torch.randn(2, 3, 8, 8).to(**last)
    for ours in (fuse(model), force(model, x)):
        torch.testing.assert_close(ours(x), model(x), rtol=1e-4, atol=1e-4, check_stride=True)
