"""Every verb on every hostile model: right, or refused in one line; the model left as it was."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhwc
from nhwc import InputError, ModelFailed, NhwcError
from nhwc.zoo import randomize_batchnorm_

from ..optimizing import force
from ..processor import needing
from .hostile import CASES, Case, Does, Halve, Own, Picture, Raising, block, image

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def build(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = case.make()
    if not case.refused:
        randomize_batchnorm_(model)
    return model.eval()


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that a user could notice of a model, as plain data that `==` compares."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = [list(getattr(module, kind)) for kind in _HOOKS]
        seen[f"module {name}"] = (id(module), type(module), module.training, hooks)
        for key, value in vars(module).items():
            if isinstance(value, (int, float, str, list, tuple, Tensor, type(None))):
                seen[f"attribute {name}.{key}"] = _portrait_of(value)
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    for name, tensor in tensors:
        seen[f"tensor {name}"] = _portrait_of(tensor)
    return seen


def _portrait_of(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return (id(value), [_portrait_of(item) for item in value])
    if not isinstance(value, Tensor):
        return repr(value) if isinstance(value, (int, float, str, type(None))) else id(value)
    known = (id(value), type(value), value.requires_grad, value.dtype, str(value.device))
    if torch.nn.parameter.is_lazy(value) or value.is_meta:
        return known
    grad = value.grad if value.is_leaf else None
    grad = None if grad is None else _portrait_of(grad)
    data = value.detach().flatten().tolist() if value.layout is torch.strided else None
    return (*known, value.stride(), value.data_ptr(), grad, data)


def surroundings() -> tuple[Any, ...]:
    name, keys, *rest = numpy.random.get_state(legacy=True)
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        (name, keys.tolist(), *rest),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    )


def answers(model: Any, case: Case, calls: int = 2) -> list[Any]:
    """What a few calls in a row answer, and what they leave of the inputs."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        random.seed(0)
        found = []
        for _ in range(calls):
            inputs = case.inputs()
            found.append((model(*inputs, **case.kwargs()), inputs))
        return found


def same(found: Any, expected: Any, path: str = "answer") -> None:
    alike = isinstance(found, Tensor) if isinstance(expected, Tensor) else False
    assert alike or type(found) is type(expected) or isinstance(expected, dict), path
    if isinstance(expected, Tensor):
        assert found.layout == expected.layout, path
        if expected.layout is not torch.strided:
            found, expected = found.to_dense(), expected.to_dense()
        near = 5e-2 if expected.dtype is torch.bfloat16 else 2e-4
        if not expected.is_meta:
            torch.testing.assert_close(found, expected, rtol=near, atol=near)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            same(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (numpy.ndarray, numpy.generic)):
        plain = torch.tensor if expected.dtype.kind == "f" else numpy.ndarray.tolist
        same(plain(found), plain(expected), path)
    elif isinstance(expected, (list, tuple, deque)):
        assert len(found) == len(expected), path
        for index, pair in enumerate(zip(found, expected, strict=True)):
            same(*pair, f"{path}[{index}]")
    elif hasattr(expected, "__dataclass_fields__") or isinstance(
        expected, (SimpleNamespace, Picture)
    ):
        same(vars(found), vars(expected), path)
    else:
        assert found == expected, path


def one_sentence(error: BaseException) -> bool:
    return "\n" not in str(error) and len(str(error)) < 500


def audit(model: nn.Module, case: Case) -> None:
    return nhwc.audit(model, *case.inputs(), kwargs=case.kwargs()).to_dict() and None


def fuse(model: nn.Module, case: Case) -> nn.Module:
    return nhwc.fuse(model)


def optimize(model: nn.Module, case: Case) -> nn.Module:
    return force(model, *case.inputs())


def optimize_twice(model: nn.Module, case: Case) -> nn.Module:
    return force(force(model, *case.inputs()), *case.inputs())


def optimize_fused(model: nn.Module, case: Case) -> nn.Module:
    return force(nhwc.fuse(model), *case.inputs())


def fuse_optimized(model: nn.Module, case: Case) -> nn.Module:
    return nhwc.fuse(force(model, *case.inputs()))


def audit_optimized(model: nn.Module, case: Case) -> None:
    audit(force(model, *case.inputs()), case)


VERBS = (
    audit,
    fuse,
    optimize,
    optimize_twice,
    optimize_fused,
    fuse_optimized,
    audit_optimized,
)


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad",
    "ignore:The PyTorch API of nested tensors",
    "ignore:torch.quantize_per_tensor",
    "ignore:torch.ao.quantization is deprecated",
)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize(
    "name", [needing(torch.bfloat16, name) if "half" in name else name for name in CASES]
)
def test_right_or_refused(name: str, verb: Any):
    case = CASES[name]
    model = build(case)
    before, around = portrait(model), surroundings()
    first, _, then = verb.__name__.partition("_")
    words = case.refused.get(first) or (case.refused.get("optimize") if then else None)
    made = None
    if words is None:
        made = verb(model, case)
    else:
        with pytest.raises(NhwcError, match=words) as refusal:
            verb(model, case)
        assert one_sentence(refusal.value)
    assert surroundings() == around
    after = portrait(model)
    assert {k: v for k, v in after.items() if v != before.get(k)} == {}
    assert set(after) == set(before)
    if made is not None:
        same(answers(made, case), answers(build(case), case))


@pytest.mark.parametrize("verb", [nhwc.audit, nhwc.optimize], ids=["audit", "optimize"])
@pytest.mark.parametrize(
    "error",
    [Own(3, "and more"), KeyError("k"), StopIteration(), AssertionError(), ValueError("x" * 9000)],
    ids=lambda error: type(error).__name__,
)
def test_what_a_model_raises_is_said_in_a_sentence(verb: Any, error: Exception):
    model = Raising(error).eval()
    before, around = portrait(model), surroundings()
    with pytest.raises(ModelFailed, match=type(error).__name__) as refusal:
        verb(model, image())
    assert one_sentence(refusal.value)
    assert refusal.value.__cause__ is error
    assert (portrait(model), surroundings()) == (before, around)


@pytest.mark.parametrize("verb", [nhwc.audit, nhwc.optimize], ids=["audit", "optimize"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=["interrupt", "exit"])
def test_who_stops_the_program_is_not_held_up(verb: Any, error: BaseException):
    model = Raising(error).eval()
    before, around = portrait(model), surroundings()
    with pytest.raises(type(error)):
        verb(model, image())
    assert (portrait(model), surroundings()) == (before, around)


def test_training_mode():
    model = randomize_batchnorm_(nn.Sequential(block(), block(4, 4)))
    model[1].eval()
    before = portrait(model)
    nhwc.audit(model, image())
    nhwc.audit(model, image(), backward=True)
    (folded,), (left,) = nhwc.fuse(model).report.applied, nhwc.fuse(model).report.skipped
    assert folded.where == "1.1"
    assert "training mode" in left.reason
    with pytest.raises(InputError, match=r"training mode.*model\.eval\(\)") as refusal:
        nhwc.optimize(model, image())
    assert one_sentence(refusal.value)
    assert portrait(model) == before


@pytest.mark.filterwarnings("ignore:gradients are wanted")
def test_a_custom_autograd_function_does_not_crash_the_tracer():
    class Halving(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block()

        def forward(self, x: Tensor) -> Tensor:
            return Halve.apply(self.block(x))

    case = Case(Halving)
    model = build(case)
    same(answers(nhwc.fuse(model), case), answers(model, case))
    same(answers(force(model, image()), case), answers(model, case))


def test_example_inputs_are_not_written_to():
    model, x = nn.Sequential(nn.ReLU(inplace=True), block()).eval(), image()
    before = x.clone()
    nhwc.optimize(model, x, also=[x[:1]])
    nhwc.audit(model, x)
    assert torch.equal(x, before)


def rss() -> int:
    import os
    from pathlib import Path

    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_two_hundred_calls_leak_nothing():
    model = randomize_batchnorm_(nn.Sequential(block(3, 32), block(32, 32))).eval()
    x = image(4, 3, 96, 96)
    fast = force(model, x)
    with torch.inference_mode():
        for _ in range(20):
            fast(x)
        before = rss()
        for _ in range(200):
            fast(x)
    # One output left behind by each call would be over 900 MB.
    assert rss() - before < 32e6


class Strided(nn.Conv2d):
    """A layer of torch's with a constructor and a helper of its own, as torchvision's Conv3d's."""

    def __init__(self, channels: int):
        super().__init__(3, channels, 3, stride=2, bias=False)

    @staticmethod
    def get_stride() -> int:
        return 2


class Doubled(Strided):
    def _conv_forward(self, *args: Any) -> Tensor:
        return 2 * super()._conv_forward(*args)


def test_a_layer_that_only_has_another_constructor_is_saved_as_what_it_is(tmp_path):
    model = build(Case(lambda: nn.Sequential(Strided(4), nn.ReLU())))
    nhwc.save(nhwc.fuse(model), tmp_path / "saved")
    case = Case(nn.Identity)
    same(answers(nhwc.load(tmp_path / "saved"), case), answers(model, case))


def test_a_layer_that_computes_otherwise_is_not_saved_as_its_base(tmp_path):
    model = build(Case(lambda: nn.Sequential(Doubled(4), nn.ReLU())))
    case = Case(nn.Identity)
    try:
        nhwc.save(model, tmp_path / "saved")
    except NhwcError:
        return
    same(answers(nhwc.load(tmp_path / "saved"), case), answers(model, case))


def forward_set(conv):
    was = conv.forward
    conv.forward = lambda x: was(x).relu() + 1


def helper_set(conv):
    """As code does that makes images tile."""

    def tiled(x, weight, bias):
        around = F.pad(x, (1, 1, 1, 1), mode="circular")
        return F.conv2d(around, weight, bias).relu() + 1

    conv._conv_forward = tiled


@pytest.mark.parametrize("set_on", [forward_set, helper_set])
@pytest.mark.parametrize("verb", [nhwc.fuse, lambda model: force(model, image())])
def test_what_is_set_on_a_layer_alone_is_run(verb, set_on):
    case = Case(block)
    model = build(case)
    set_on(model[0])
    same(answers(verb(model), case), answers(model, case))


def branching(name):
    """What is set on a layer in the place of this method, and cannot be traced."""

    def set_on(layer):
        was = getattr(layer, name)
        own = lambda x, *rest: was(x, *rest).relu() + 1 if x.isfinite().all() else x
        setattr(layer, name, own)
        return layer

    return set_on


UNTRACED = {
    "identity": lambda: branching("forward")(nn.Identity()),
    "softmax": lambda: branching("forward")(nn.Softmax(1)),
    "relu": lambda: branching("forward")(nn.ReLU()),
    "norm": lambda: branching("forward")(nn.GroupNorm(2, 8)),
    "convolution": lambda: branching("_conv_forward")(nn.Conv2d(8, 8, 3)),
}


@pytest.mark.parametrize("layer", UNTRACED)
@pytest.mark.parametrize("verb", [nhwc.fuse, lambda model: nhwc.optimize(model, image())])
def test_a_layer_with_code_of_its_own_is_none_of_its_class(verb, layer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), UNTRACED[layer](), nn.BatchNorm2d(8)).eval()
    model[2].running_mean.normal_(), model[2].running_var.uniform_(0.5, 2)
    changed = verb(model)
    assert [one.path for one in changed.report.opaque] == ["1"]
    torch.testing.assert_close(changed(image()), model(image()), rtol=1e-4, atol=1e-4)


def test_asking_for_a_shape_does_not_stand_in_the_way_of_a_plan():
    def asserted(self: Any, y: Tensor, x: Tensor) -> Tensor:
        torch._assert(y.ndim == 4, "four dimensions")
        return self.act(y)

    case = Case(lambda: Does(asserted, block=nn.Conv2d(3, 4, 3), act=nn.ReLU(inplace=True)))
    model = build(case)
    fast = force(model, image())
    assert fast.report.plans[0].reason == ""
    same(answers(fast, case), answers(model, case))


class OfRange(nn.Module):
    """It takes what it was given at first, and perhaps only that."""

    def __init__(self, accepts):
        super().__init__()
        self.conv, self.accepts = nn.Conv2d(3, 8, 3), accepts

    def forward(self, x):
        if not self.accepts(x):
            raise ValueError("no image")
        return self.conv(x).relu()


@pytest.mark.parametrize(
    "accepts",
    [
        lambda x: x.min() >= 0 and x.max() <= 1,
        lambda x: x.flatten()[0] == 0.5 and x.double().mean() < 0.6,
    ],
)
@torch.no_grad()
def test_a_model_that_checks_its_inputs_is_held_against_inputs_that_it_takes(accepts):
    x = torch.rand(1, 3, 8, 8)
    x[0, 0, 0, 0] = 0.5
    model = OfRange(accepts).eval()
    fast = nhwc.optimize(model, x)
    assert {check.input for check in fast.report.verification.checks} == {0, 1, 2}
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(nhwc.ModelFailed, match="no image"):
        nhwc.optimize(model, x - 2)


CALLS = {"count": 0}


class CountsOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        CALLS["count"] += 1
        return self.conv(x) * CALLS["count"]


@torch.no_grad()
def test_what_each_call_counts_outside_of_the_model_is_named():
    said = "each call of CountsOutside writes CALLS, which lies outside of the model"
    with pytest.raises(nhwc.VerificationError, match=said):
        nhwc.optimize(CountsOutside().eval(), image())


class ReadsTheClock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return self.conv(x) * (1 + time.perf_counter_ns() % 1_000_003)


@torch.no_grad()
def test_a_model_that_answers_otherwise_each_time_is_told_so():
    said = "two calls of ReadsTheClock on the same input differ in output, so that no plan"
    with pytest.raises(nhwc.VerificationError, match=said):
        nhwc.optimize(ReadsTheClock().eval(), image())
