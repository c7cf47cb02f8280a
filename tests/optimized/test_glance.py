"""A stamp that only glances at words of memory notices what a stamp that compares does."""

import pytest
import torch
from torch import fx, nn

from nhwc import kernels
from nhwc.optimized import glance
from nhwc.optimized import stamp as stamps
from nhwc.optimized.stamp import Stamp


@pytest.fixture(params=["glances", "compares"])
def looks(request, monkeypatch):
    if request.param == "compares":
        monkeypatch.setattr(kernels, "unavailable", lambda: "there is no compiler")
    return request.param


@pytest.fixture
def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.PReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers).eval().requires_grad_(False)


def _forward(net):
    net[0].forward = lambda x: x


def _forward_instead(net):
    del net[0].stride
    net[0].forward = lambda x: x


def _slot(net):
    net[4]._parameters["bias"] = nn.Parameter(torch.ones(3))


def _data(net, change):
    net[0].weight.data = change(net[0].weight.data)


CHANGES = {
    "a write that torch counts": lambda net: net[1].weight.add_(1),
    "a write to a buffer": lambda net: net[2].num_batches_tracked.add_(1),
    "a write through data": lambda net: net[1].weight.data.fill_(3),
    "a write to the last of three numbers": lambda net: net[4].bias.numpy().__setitem__(2, 5),
    "a write to the middle of a weight": lambda net: net[0].weight.numpy().__imul__(2),
    "other memory": lambda net: _data(net, torch.clone),
    "other strides": lambda net: _data(net, lambda weight: weight.transpose(2, 3)),
    "another type of the same bytes": lambda net: _data(net, lambda w: w.view(torch.int32)),
    "fewer numbers": lambda net: _data(net, lambda weight: weight[:4]),
    "another place in the same memory": lambda net: _data(
        net, lambda weight: weight.flatten().as_strided((7, 27), (27, 1), 27)
    ),
    "another storage": lambda net: net[0].weight.set_(net[0].weight.clone()),
    "swapped": lambda net: torch.utils.swap_tensors(net[0].weight, torch.zeros(8, 3, 3, 3)),
    "another parameter": lambda net: setattr(net[4], "bias", nn.Parameter(torch.ones(3))),
    "another parameter in the slot": _slot,
    "no parameter": lambda net: setattr(net[4], "bias", None),
    "another module": lambda net: net.__setitem__(3, nn.Flatten()),
    "one module more": lambda net: net.append(nn.ReLU()),
    "a buffer more": lambda net: net[2].register_buffer("more", torch.zeros(2)),
    "a hook": lambda net: net[3].register_forward_hook(print),
    "a hook before": lambda net: net[3].register_forward_pre_hook(print),
    "another class": lambda net: setattr(net[3], "__class__", nn.Identity),
    "a dict of other parameters": lambda net: setattr(
        net[4], "_parameters", {"weight": net[4].weight, "bias": None}
    ),
    "a dict of other modules": lambda net: setattr(net, "_modules", dict(net._modules)),
    "a dict of hooks": lambda net: setattr(net[3], "_forward_hooks", {1: print}),
    "other attributes": lambda net: setattr(net[3], "__dict__", dict(vars(net[3]))),
    "a forward of its own": _forward,
    "a forward in the place of another attribute": _forward_instead,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_noticed(change, looks, net):
    stamp = Stamp(net)
    assert stamp.holds()
    assert stamp.holds()
    change(net)
    assert not stamp.holds()
    assert not stamp.holds()
    assert Stamp(net).holds()


def test_a_hook_that_was_there_is_missed(looks, net):
    handle = net[3].register_forward_hook(lambda module, args, result: result * 2)
    stamp = Stamp(net)
    assert stamp.holds()
    assert stamp.holds()
    handle.remove()
    assert not stamp.holds()


def test_a_hook_on_the_whole_or_its_forward_is_never_missed(looks, net):
    handle = net.register_forward_pre_hook(print)
    stamp = Stamp(net)
    assert not stamp.holds()
    handle.remove()
    assert stamp.holds()
    net.forward = print
    assert not stamp.holds()
    assert not Stamp(net).holds()


def test_other_code_of_a_graph_is_noticed(looks, net):
    graph = fx.symbolic_trace(net)
    stamp = Stamp(graph)
    assert stamp.holds()
    assert stamp.holds()
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        output.args = (graph.graph.call_function(torch.neg, output.args),)
    graph.recompile()
    assert not stamp.holds()


def test_a_write_of_another_thread_before_the_first_glance_is_noticed(net, monkeypatch):
    stamp = Stamp(net)
    look = stamp._look

    def write_and_look():
        net[0].weight.add_(1)
        return look()

    monkeypatch.setattr(stamp, "_look", write_and_look)
    assert not stamp.holds()


MOVES = {
    "storage freed": lambda weight: weight.untyped_storage().resize_(0),
    "storage grown": lambda weight: weight.untyped_storage().resize_(1 << 25),
    "tensor grown": lambda weight: weight.resize_(4096, 2048),
    "shared with other processes": torch.Tensor.share_memory_,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_memory_that_a_storage_let_go_of_is_not_read(move, looks):
    """So many numbers are pages of their own: to read them once they are freed ends the process."""
    net = nn.Linear(2048, 2048).requires_grad_(False)
    stamp = Stamp(net)
    assert stamp.holds()
    assert stamp.holds()
    move(net.weight)
    assert not stamp.holds()
    assert not stamp.holds()


def test_a_glance_is_enough_while_nothing_changes(net, monkeypatch):
    stamp = Stamp(net)
    assert stamp.holds()
    monkeypatch.setattr(stamp, "_compare", pytest.fail)
    net(torch.ones(2, 3, 3, 3))
    net.eval().state_dict()
    assert stamp.holds()


def test_the_proof_draws_no_random_numbers(net):
    glance._proof.cache_clear()
    before = torch.get_rng_state()
    assert Stamp(net).holds()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_glance_mistakes_for_a_change_is_compared_once(net, monkeypatch):
    stamp = Stamp(net)
    assert stamp.holds()
    net[0]._buffers["more"] = 1
    del net[0]._buffers["more"]
    assert stamp.holds()
    monkeypatch.setattr(stamp, "_compare", pytest.fail)
    assert stamp.holds()


@pytest.mark.parametrize("change", glance._CHANGES)
def test_a_layout_that_hides_a_change_is_not_used(change, net, monkeypatch):
    """If another release of torch or Python keeps its state elsewhere, the facts are compared."""
    seen = glance._is_seen
    monkeypatch.setattr(glance, "_is_seen", lambda one: one is not change and seen(one))
    glance._proof.cache_clear()
    try:
        stamp = Stamp(net)
        assert stamp.holds()
        net[0].weight.add_(1)
        assert not stamp.holds()
        with pytest.raises(glance.Unsure):
            glance.Glance([], [], [])
    finally:
        glance._proof.cache_clear()


def test_attributes_that_no_glance_sees_are_compared(net, monkeypatch):
    """As since Python 3.13."""
    monkeypatch.setattr(stamps, "sees_attributes", lambda: False)
    stamp = Stamp(net)
    assert stamp.holds()
    monkeypatch.setattr(stamp, "_compare", pytest.fail)
    net[0].name = "stem"
    assert stamp.holds()
    net[0].forward = print
    assert not stamp.holds()


UNSURE = {
    "six dimensions": torch.zeros(1, 2, 1, 2, 1, 2),
    "no memory": torch.zeros(2, 2, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("weight", UNSURE.values(), ids=UNSURE)
def test_weights_that_no_glance_can_judge_are_compared(weight, net):
    net.register_buffer("weight", weight)
    stamp = Stamp(net)
    assert stamp.holds()
    assert stamp.holds()
    net[0].weight.add_(1)
    assert not stamp.holds()


def test_other_strides_of_six_dimensions_are_noticed(net):
    net.register_buffer("weight", torch.zeros(2, 2, 1, 2, 1, 2).transpose(0, 1))
    stamp = Stamp(net)
    assert stamp.holds()
    assert stamp.holds()
    net.weight.data = net.weight.data.transpose(1, 3)
    assert not stamp.holds()


def test_weights_made_under_inference_mode(net):
    with torch.inference_mode():
        net[4].bias = nn.Parameter(torch.ones(3), requires_grad=False)
        stamp = Stamp(net)
        assert stamp.holds()
        assert stamp.holds()
        net[4].bias.add_(1)
        assert not stamp.holds()


def test_a_half_precision_weight_of_odd_size(looks):
    net = nn.PReLU(3).half().requires_grad_(False)
    stamp = Stamp(net)
    assert stamp.holds()
    net.weight.numpy()[2] = 3
    assert not stamp.holds()
