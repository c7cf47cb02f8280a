"""Save an optimized model to one file, and load it where its classes are not known."""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..environment import Environment
from ..errors import InputError, NhwcError
from ..formats import Format, to_format
from ..graph import capture
from ..graph.captured import renamed
from ..graph.layers import assert_sizes
from ..graph.sized import capture_sized
from ..memory import Memory
from ..plan import Unplannable, make_plan
from ..ready import rewritable
from ..release import in_memory, trim, unread
from ..runtime import Optimized, Recipe, describe, signature
from ..verify import Truth, flatten, verify
from .container import damaged, read, write
from .plain import Foreign
from .serial import dump, restore


def save(model: nn.Module, path: str | Path) -> None:
    """Write `model` to one file: its graph by operator names, its tensors raw, nothing pickled.

    What `optimize` and `fuse` return can be saved, and any model that can be captured whole. Where
    only a graph for the shapes of the example could be, the file holds that one: the loaded model
    refuses others. Which kernels were chosen stays behind: it is true of one machine only.
    """
    recipes: tuple[Recipe, ...] = ()
    examples: tuple[tuple[str, ...], ...] = ()
    exact = False
    model = rewritable(model, "save")
    if isinstance(model, Optimized):
        recipes, examples, exact = model.recipes, model.examples, model.exact
        model = model.portable
    graph = model if isinstance(model, fx.GraphModule) else capture(model).module
    planned = [list(recipe.inputs) for recipe in recipes]
    try:
        header, tensors = dump(graph)
    except InputError as error:
        header, tensors = dump(_for_sizes(graph, examples, recipes, error))
    header |= {"planned": planned, "exact": exact}
    write(Path(path), header, tensors)
    unread(tensors)


def _for_sizes(
    graph: fx.GraphModule,
    examples: Sequence[tuple[str, ...]],
    recipes: Sequence[Recipe],
    error: InputError,
) -> fx.GraphModule:
    """The graph for the sizes of the one example, checked in front; `error` if there is none."""
    if not examples:
        raise InputError(f"{error} If it decides by sizes alone, save what nhwc.optimize returns.")
    made = next((recipe.graph for recipe in recipes if recipe.graph is not None), None)
    try:
        inputs = [_example(text) for text in examples[0]]
        sized = made or capture_sized(graph, inputs)[0]
    except Exception:
        raise error from None
    if len(examples) > 1:
        raise InputError(
            f"the model is optimized for {len(examples)} sets of shapes, each in a graph of its "
            "own; a file holds one. Optimize the model for one set of shapes and save that."
        )
    result = fx.GraphModule(sized, renamed(sized.graph), sized._get_name())
    places = result.graph.find_nodes(op="placeholder")
    # Arguments left out have defaults, which the graph is fixed to.
    for node, given in zip(places, inputs, strict=False):
        if isinstance(given, Tensor):
            with result.graph.inserting_after(places[-1]):
                result.graph.call_function(assert_sizes, (node, list(given.shape), given.dtype))
    return result


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
    recipes: list[Recipe] = []
    programs: dict[Hashable, Callable[..., Any]] = {}
    packed: set[int] = set()
    for inputs in examples:
        try:
            with torch.no_grad():
                answer = dict(flatten(graph(*inputs)))
            plan = make_plan(graph, inputs, memory, exact=exact)
        except (Unplannable, RuntimeError):
            continue  # The graph runs as it is, and says itself what is wrong with such inputs.
        if not verify(Truth((inputs,), (answer,), None), plan.program).passed:
            continue
        key = signature(inputs)
        recipes.append(Recipe(key, describe(inputs), plan.kernels))
        programs[key] = plan.program
        packed |= {id(weight) for weight in plan.weights(graph)}
    memory.save()
    for tensor in (*graph.parameters(), *graph.buffers()):
        if id(tensor) not in packed:
            tensor.data = in_memory(tensor.data)
    unread(graph.parameters())
    trim()
    return Optimized(graph, recipes, programs, exact=exact)


def _example(text: str) -> Any:
    """The tensor, or other value, that `describe` made this text of."""
    words = text.split(" ")
    dtype = getattr(torch, words[1], None) if len(words) > 1 else None
    if not isinstance(dtype, torch.dtype):
        return ast.literal_eval(text)
    shape = [int(size) for size in words[0].split("x") if size]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator).to(dtype)
    last = words[2:] == [str(Format.CHANNELS_LAST)]
    return to_format(drawn, Format.CHANNELS_LAST) if last else drawn
