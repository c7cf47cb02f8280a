"""Check that a verb can take a model: by its kind, its parameters' shapes and their device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.jit._trace import TracedModule
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..errors import InputError, of_kind
from .trees import some


def module_of(model: object, verb: str) -> nn.Module:
    """The module that `verb` works on: the graph of an exported program, or the model itself.

    >>> module_of(print, "audit")
    Traceback (most recent call last):
    nhwc.errors.InputError: cannot audit a builtin_function_or_method: it is no torch.nn.Module.
    """
    _check_around(verb)
    if isinstance(model, ExportedProgram):
        model = model.module()
    if isinstance(model, fx.GraphModule) and "eval" in vars(model):
        return _usable(model)
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, torch.jit.ScriptFunction):
        raise InputError(
            f"cannot {verb} a TorchScript function: it is no torch.nn.Module. "
            "Pass the module whose forward it is."
        )
    todo = f" nhwc.load_model({model!r}) makes one of a name." if isinstance(model, str) else ""
    raise InputError(f"cannot {verb} {of_kind(model)}: it is no torch.nn.Module.{todo}")


def given_by_name(kwargs: object) -> dict[str, Any]:
    """A dict of its own of what is given by name.

    >>> given_by_name([1])
    Traceback (most recent call last):
    nhwc.errors.InputError: kwargs is no dict of arguments by name. Give one: kwargs={'scale': 2.0}.
    """
    given = {} if kwargs is None else kwargs
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InputError("kwargs is no dict of arguments by name. Give one: kwargs={'scale': 2.0}.")
    return dict(given)


def true_or_false(**flags: object) -> None:
    """Refuse the first of `flags` that is neither, by its name.

    >>> true_or_false(exact="no")
    Traceback (most recent call last):
    nhwc.errors.InputError: exact='no' is neither True nor False.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{name}={value!r:.80} is neither True nor False.")


def _check_around(verb: str) -> None:
    """Refuse to work where new tensors are not what they seem: torch may even crash there."""
    around = ""
    if peek_interpreter_stack() is not None:
        around = "inside of a transform of torch.func (grad, vmap), which wraps each new tensor"
    elif torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        around = "within FakeTensorMode, in which tensors have no numbers"
    elif torch._C._get_tracing_state() is not None:
        around = "while torch.jit.trace records, which would record all that is tried"
    if around:
        raise InputError(f"cannot {verb} a model {around}. Do it before, and outside.")


def rewritable(model: object, verb: str) -> nn.Module:
    """Do the same as `module_of`, but refuse compiled TorchScript, which no verb can rewrite.

    >>> rewritable(torch.jit.script(nn.Sequential(nn.ReLU())), "fuse")
    Traceback (most recent call last):
    nhwc.errors.InputError: cannot fuse a TorchScript module (scripted): ... it was made from.
    """
    module = module_of(model, verb)
    if isinstance(script := unwrapped(module), torch.jit.ScriptModule):
        kind = "traced" if isinstance(script, TracedModule) else "scripted"
        raise InputError(
            f"cannot {verb} a TorchScript module ({kind}): its code is compiled. "
            "Pass the torch.nn.Module that it was made from."
        )
    return module


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in a wrapper that only calls it: torch.compile's, or one for several devices.

    In training, the latter also adds up gradients.
    """
    inside: Any = getattr(model, "_orig_mod", None)
    parallel = type(model) in (nn.DataParallel, DistributedDataParallel)
    if parallel and not (model.training or model._forward_hooks or model._forward_pre_hooks):
        inside = model.module
    return model if inside is None else unwrapped(inside)


def _usable(exported: fx.GraphModule) -> fx.GraphModule:
    """The same graph in a module that allows `train()` and `eval()`, which torch's own refuses.

    It still checks the sizes that it was exported for.
    """
    graph = fx.GraphModule(exported, exported.graph, "Exported")
    graph._modules = {name: _apart(part) for name, part in graph._modules.items()}
    # Its calls say whether they train, and no flag can change that: the flag repeats it.
    return graph.train(any(map(_trains, graph.graph.nodes)))


def _apart(part: nn.Module | None) -> nn.Module | None:
    """A module of the same tensors whose flags are its own, and those of its parts."""
    if part is None:
        return None
    other = copy.copy(part)
    other._modules = {name: _apart(inner) for name, inner in part._modules.items()}
    return other


def _trains(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = {
        **dict(zip([a.name for a in schema.arguments], node.args, strict=False)),
        **node.kwargs,
    }
    return given.get("training") is True or given.get("train") is True


def check_initialized(model: nn.Module) -> None:
    """Refuse a lazy model that has not been run yet: running it would change it."""
    lazy = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)]
    if lazy:
        raise InputError(
            f"{some(lazy)} of {type(model).__name__} has no shape yet: the module is lazy. "
            "Run the model once on an example input first."
        )
    fake = [name for name, p in model.named_parameters() if isinstance(p, FakeTensor)]
    if fake:
        raise InputError(
            f"{some(fake)} of {type(model).__name__} has no numbers: the model was made within "
            "FakeTensorMode. Make it outside."
        )


def check_devices(model: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Refuse a model or inputs on the meta device, and inputs on another device than the model."""
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise InputError(
            "the input is a fake tensor, which has no numbers. Make it outside of FakeTensorMode."
        )
    own = {t.device for t in (*model.parameters(), *model.buffers())}
    if torch.device("meta") in own or any(t.is_meta for t in tensors):
        raise InputError(
            "the model or its input is on the meta device, where nothing is computed. "
            "Materialise it: model.to_empty(device='cpu')."
        )
    if len(own) == 1 and not all(t.device in own for t in tensors):
        where, other = next(iter(own)), tensors[0].device
        raise InputError(
            f"the model is on {where}, the input on {other}. Move one: input.to({str(where)!r})."
        )
