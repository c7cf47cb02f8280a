"""Open an opaque part: replace its children by graphs where its code cannot tell the difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import fx, jit, nn

from ..code.mentions import Mentions, mentions_of
from ..modules.leaves import HOLDERS, runs_layer

TraceChild = Callable[[nn.Module, str], nn.Module | None]

_INSPECTING = {"isinstance", "issubclass", "type", "hasattr", "getattr", "vars", "dir", "__class__"}


def open_shell(
    shell: nn.Module, path: str, trace: TraceChild, above: tuple[Mentions, ...] = ()
) -> str:
    """Replace children of `shell` with graphs of them, in place; its own code stays as it is.

    A child is replaced only if the code around it does nothing but call it: a graph has neither
    the methods nor the class of the module it was made of. Otherwise its own children are tried.
    If the code may look through all its parts, or passes itself to other code, nothing is
    replaced and the reason is returned.
    """
    if isinstance(shell, jit.ScriptModule) or runs_layer(shell):
        return ""
    said = mentions_of(shell, {name for one in above for name in one.read_off_others})
    if said.unseen:
        return said.unseen
    above = (*above, said)
    for name, child in list(shell.named_children()):
        below = f"{path}.{name}" if path else name
        if isinstance(child, fx.GraphModule):
            continue
        if not _runs(child) or not _only_called(name, child, shell, above):
            open_shell(child, below, trace, above)
        else:
            graph = trace(child, below)
            if graph is not None:
                shell._modules[name] = graph
    return ""


def _runs(module: nn.Module) -> bool:
    """Whether the module is called at all, with inputs only; a ModuleList just holds others."""
    held = (nn.ModuleList, nn.ModuleDict, jit.ScriptModule)
    return not isinstance(module, held) and _takes_only_inputs(module)


def _takes_only_inputs(module: nn.Module) -> bool:
    """Whether `forward` has no defaults, to which a graph would be fixed."""
    parameters = inspect.signature(module.forward).parameters.values()
    return all(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _only_called(
    name: str, child: nn.Module, holder: nn.Module, above: tuple[Mentions, ...]
) -> bool:
    own = _own_names(child)
    kinds = {base.__name__ for base in type(child).__mro__[: type(child).__mro__.index(nn.Module)]}
    for said in above:
        if own & said.read_off_others or kinds & said.names:
            return False
        # A part in a container can be reached without its name.
        if isinstance(holder, HOLDERS) and said.names & _INSPECTING:
            return False
    return type(child).__call__ is nn.Module.__call__ and name not in above[-1].otherwise


def _own_names(module: nn.Module) -> set[str]:
    """Return the names of attributes that this module has and a graph of it would not have.

    Those of torch's containers (`append`, `items`) are left out: plain lists and dicts have them.
    """
    bases = type(module).__mro__
    users = (base for base in bases if not base.__module__.startswith(("torch.", "builtins")))
    names = {name for base in users for name in vars(base)} - set(dir(nn.Module))
    names |= {key for key in vars(module) if not key.startswith("_")} - {"training"}
    names |= {*module._modules, *module._parameters, *module._buffers}
    return names - {"forward", "0", "1", "2"}
