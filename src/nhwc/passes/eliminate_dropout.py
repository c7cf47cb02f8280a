"""Remove dropout in all its forms where it is not in training mode and so does nothing."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from ..graph import erase, module_of
from ..graph.modules.leaves import is_leaf, opaque_by_nature
from ..graph.report import PassReport, Site
from ._folding_sites import input_of, name_of
from ._reporting import reported

# For each function: the position of its argument `training`, and its default.
_FUNCTIONS: dict[Any, tuple[int, bool]] = {
    F.dropout: (2, True),
    F.dropout1d: (2, True),
    F.dropout2d: (2, True),
    F.dropout3d: (2, True),
    F.alpha_dropout: (2, False),
    F.feature_alpha_dropout: (2, False),
}


def eliminate_dropout(gm: fx.GraphModule) -> PassReport:
    """Remove nn.Dropout, F.dropout, their variants, and torchvision's stochastic depth."""
    sites = []
    for node in list(gm.graph.nodes):
        training = _training(node)
        value = input_of(node)
        if training is None or value is None:
            continue
        reason = "it is in training mode: call model.eval() first" if training is not False else ""
        module = module_of(node)
        if module is not None and opaque_by_nature(module):
            reason = "it has hooks"
        sites.append(Site(name_of(node), "dropout", not reason, reason))
        if not reason:
            erase(node, value)
    return reported(gm, "eliminate_dropout", sites)


def _training(node: fx.Node) -> object:
    """Return whether this dropout drops, or the node that decides it; None for other nodes."""
    module = module_of(node)
    if isinstance(module, _DropoutNd) and is_leaf(module):
        return module.training
    if node.op != "call_function":
        return None
    if node.target not in _FUNCTIONS and not _is_stochastic_depth(node.target):
        return None
    place, default = _FUNCTIONS.get(node.target, (3, True))
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get("training", default)


def _is_stochastic_depth(target: object) -> bool:
    home = getattr(target, "__module__", "")
    return home == "torchvision.ops.stochastic_depth" and not isinstance(target, nn.Module)
