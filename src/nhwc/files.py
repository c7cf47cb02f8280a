"""Save an optimized model to one file, and load it where its classes are not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from .container import damaged, read, write
from .environment import Environment
from .errors import FileError, NhwcError
from .formats import Format, to_format
from .graph import capture
from .memory import Memory
from .plan import Unplannable, make_plan
from .runtime import Optimized, Recipe, signature
from .serial import Foreign, dump, restore
from .verify import Truth, flatten, verify


def save(model: nn.Module, path: str | Path) -> None:
    """Write `model` to one file: its graph by operator names, its tensors raw, nothing pickled.

    What `optimize` and `fuse` return can be saved, and any model that can be captured whole. Which
    kernels were chosen stays behind: it is true of one machine only.
    """
    planned: list[Any] = []
    exact = False
    if isinstance(model, Optimized):
        planned, exact = [r.inputs for r in model.recipes], model.exact
        model = model.graph
    graph = model if isinstance(model, fx.GraphModule) else capture(model).module
    header, tensors = dump(graph)
    header |= {"planned": planned, "exact": exact}
    write(Path(path), header, tensors)


def load(path: str | Path) -> Optimized:
    """Load a model that `save` wrote, and choose its kernels for this machine.

    Nothing in the file is run but operators of torch that stand on a list. Anything that is not
    such a file, whole and undamaged, raises FileError.
    """
    path = Path(path)
    header, tensors = read(path)
    try:
        graph = restore(header, tensors)
        planned = [tuple(map(_example, inputs)) for inputs in header["planned"]]
        exact = bool(header["exact"])
    except NhwcError:
        raise
    except (Foreign, Exception) as error:
        raise damaged(path, f"it describes no model ({error})") from error
    return _planned(graph, planned, exact)


def _planned(graph: fx.GraphModule, examples: list[tuple[Any, ...]], exact: bool) -> Optimized:
    memory = Memory.of(Environment.here())
    recipes, programs = [], {}
    for inputs in examples:
        try:
            plan = make_plan(graph, inputs, memory, exact=exact)
            with torch.no_grad():
                answer = dict(flatten(graph(*inputs)))
        except (Unplannable, RuntimeError):
            continue  # The graph runs as it is, and says itself what is wrong with such inputs.
        if not verify(Truth((inputs,), (answer,), None), plan.program).passed:
            continue
        key = signature(inputs)
        recipes.append(Recipe(key, describe_inputs(inputs), plan.kernels))
        programs[key] = plan.program
    memory.save()
    return Optimized(graph, recipes, programs, exact=exact)


def describe_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Input shapes as plain values, from which `load` makes examples to plan for."""
    return tuple(
        {
            "shape": list(x.shape),
            "dtype": str(x.dtype).removeprefix("torch."),
            "last": x.ndim == 4 and not x.is_contiguous(),
        }
        if isinstance(x, Tensor)
        else x
        for x in inputs
    )


def _example(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    dtype = getattr(torch, plain["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise FileError(f"an input of type {plain['dtype']!r}")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(plain["shape"], generator=generator).to(dtype)
    return to_format(drawn, Format.CHANNELS_LAST) if plain["last"] else drawn
