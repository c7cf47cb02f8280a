"""Verbs are refused where torch wraps, fakes or records each tensor, and fake models everywhere."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import nhwc


def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()


VERBS = {
    "fuse": lambda model, x: nhwc.fuse(model),
    "optimize": nhwc.optimize,
    "audit": nhwc.audit,
}
image = torch.rand(1, 3, 8, 8)


def within_grad(call):
    torch.func.grad(lambda x: call(x).sum())(image)


def within_vmap(call):
    torch.vmap(call)(image[None])


def within_fake_tensors(call):
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(image)


def within_a_trace(call):
    torch.jit.trace(call, image, check_trace=False)


AROUND = {
    within_grad: "inside of a transform of torch.func",
    within_vmap: "inside of a transform of torch.func",
    within_fake_tensors: "within FakeTensorMode, in which tensors have no numbers",
    within_a_trace: "while torch.jit.trace records",
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("around", AROUND, ids=lambda around: around.__name__)
def test_no_verb_works_where_tensors_are_not_what_they_seem(verb, around):
    model = net()
    expected, said = model(image), []

    def call(x):
        with pytest.raises(nhwc.InputError) as caught:
            VERBS[verb](model, x)
        said.append(str(caught.value))
        return x * 2

    around(call)
    assert f"cannot {verb} a model {AROUND[around]}" in said[0]
    assert torch.equal(model(image), expected)


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_without_numbers_is_refused(verb):
    with FakeTensorMode():
        model = net()
    with pytest.raises(nhwc.InputError, match="of Sequential has no numbers: the model was made"):
        VERBS[verb](model, image)


@pytest.mark.parametrize("verb", ["optimize", "audit"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_an_input_without_numbers_is_refused(verb):
    with FakeTensorMode():
        x = torch.rand(1, 3, 8, 8)
    with pytest.raises(nhwc.InputError, match="the input is a fake tensor"):
        VERBS[verb](net(), x)
