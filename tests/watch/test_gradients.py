"""A backward pass seen from the nodes of its graph, and the first step of a loop."""

import pytest
import torch
from torch import nn

from nhwc import convert_
from nhwc._audit.step import StepWatch
from nhwc.render.step_text import step_text


def step(net, optimizer=torch.optim.SGD, spoil=None, **options):
    """Train `net` for one step under a watch."""
    convert_(net)
    made_by = optimizer(net.parameters(), lr=0.1, **options)
    watch, images = StepWatch(net, "net"), torch.randn(2, 3, 12, 12)
    images = images.to(memory_format=torch.channels_last)
    with watch.forward((images,)) as results:
        results.append(net(images))
    results[0].square().mean().backward()
    made_by.step()
    if spoil:
        spoil(net, made_by)
    return watch.result([made_by])


def body(*more):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *more)


def test_a_clean_step_is_clean_from_end_to_end():
    found = step(body(nn.Conv2d(8, 4, 1)), momentum=0.9)
    assert found.clean
    assert (found.weights, found.checked) == (2, 2)
    behind = [call for call in found.audit.calls if call.backward]
    assert [call.operator for call in behind] == [
        "autograd::convolution_backward",
        "autograd::relu_backward",
        "autograd::native_batch_norm_backward",
        "autograd::convolution_backward",
    ]
    # Each is charged to the module that made its node.
    assert [call.site.module for call in behind] == ["3", "2", "1", "0"]
    assert "the first step kept the format (" in step_text(found)


class Sorted(torch.autograd.Function):
    """Keeps the format forward, and loses it backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.contiguous()


class Backwards(nn.Module):
    def forward(self, x):
        return Sorted.apply(x)


def test_a_format_that_is_lost_only_backward_is_found():
    found = step(body(Backwards(), nn.Conv2d(8, 4, 3)))
    (lost,) = found.backward
    assert (lost.kind, lost.operator) == ("lost", "autograd::sorted_backward")
    assert lost in found.audit.lost
    assert "autograd::sorted_backward loses channels last in" in step_text(found)


def test_an_image_spread_from_one_pixel_lost_nothing():
    gated = body(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.Sigmoid())
    assert step(gated).backward == ()


def contiguous_state(net, optimizer):
    state = optimizer.state[net[0].weight]
    state["momentum_buffer"] = state["momentum_buffer"].contiguous()


def contiguous_gradient(net, optimizer):
    net[0].weight.grad = net[0].weight.grad.contiguous()


@pytest.mark.parametrize("spoil", [contiguous_state, contiguous_gradient])
def test_gradients_and_states_in_another_format_are_named(spoil):
    found = step(body(), spoil=spoil, momentum=0.9)
    named = (found.states, found.gradients)
    assert named == ((("0.weight",), ()) if spoil is contiguous_state else ((), ("0.weight",)))
    assert not found.clean
    assert "of 0.weight" in step_text(found)
    assert found.to_dict()["audit"]["model"] == "net"
