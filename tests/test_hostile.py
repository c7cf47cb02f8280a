"""Every verb on every hostile model: right, or refused in one line; the model left as it was."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import nhwc
from nhwc import NhwcError
from nhwc.graph import graphs
from nhwc.zoo import randomize_batchnorm_

from .hostile import CASES, Case, Own, Raising, block, image
from .test_optimize import force

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
        near = 5e-2 if expected.dtype is torch.bfloat16 else 2e-4
        if not expected.is_meta:
            torch.testing.assert_close(found, expected, rtol=near, atol=near)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            same(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for index, pair in enumerate(zip(found, expected, strict=True)):
            same(*pair, f"{path}[{index}]")
    elif hasattr(expected, "__dataclass_fields__"):
        same(vars(found), vars(expected), path)
    else:
        assert found == expected, path


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
@pytest.mark.parametrize("name", CASES)
def test_right_or_refused(name: str, verb: Any):
    case = CASES[name]
    model = build(case)
    before, around = portrait(model), surroundings()
    words = case.refused.get(verb.__name__.split("_")[0])
    try:
        made = verb(model, case)
        assert words is None, "this should have been refused"
    except NhwcError as error:
        made = None
        assert words is not None, error
        assert words in str(error)
        assert "\n" not in str(error)
        assert len(str(error)) < 400
    assert surroundings() == around
    after = portrait(model)
    assert {k: v for k, v in after.items() if v != before.get(k)} == {}
    assert set(after) == set(before)
    if made is not None:
        same(answers(made, case), answers(build(case), case))
