"""Drop copies to NCHW where whoever reads the result takes any format.

The code of a model says `.contiguous()` to be able to view the result, or from habit (CSPNet's
stages do); `.to(memory_format=torch.contiguous_format)` and `.clone(...)` are the same.
"""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from ..graph import erase, module_of
from ..graph.modules.mended import Cat
from ..graph.nodes.writes import written_into
from ..graph.report import PassReport, Site
from ._folding_sites import input_of, name_of, written_between
from ._matching import activation_of
from ._reporting import reported

_READERS = (_ConvNd, _BatchNorm, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, Cat)


def mend_contiguous(gm: fx.GraphModule) -> PassReport:
    """Take out each copy to NCHW that only convolutions, norms, pools and `cat` read.

    Activations may stand between. The last goes first: then the one that it copied can go.
    """
    sites = []
    for node in reversed(list(gm.graph.nodes)):
        value = input_of(node)
        if value is None or not _converts(node):
            continue
        reason = _needed(node)
        sites.append(Site(name_of(node), str(node.target), not reason, reason))
        if not reason:
            erase(node, value)
    return reported(gm, "mend_contiguous", sites[::-1])


def _converts(node: fx.Node) -> bool:
    """Whether this call does no more than to ask for NCHW."""
    if node.op != "call_method" or node.target not in ("contiguous", "to", "clone"):
        return False
    asked = [*node.args[1:], *node.kwargs.values()]
    if not asked:
        return node.target == "contiguous"
    return all(given is torch.contiguous_format for given in asked)


def _needed(node: fx.Node) -> str:
    """Why the copy has to stay; empty if nothing is lost with it."""
    strange = [user for user in node.users if not _takes_any_format(user)]
    if strange:
        return f"{name_of(strange[0])} may need it"
    return written_between(node.all_input_nodes, node, max(node.users, default=node))


def _takes_any_format(user: fx.Node) -> bool:
    if activation_of(user) is not None and written_into(user) is None:
        return bool(user.users) and all(map(_takes_any_format, user.users))
    if user.op == "call_module":
        return isinstance(module_of(user), _READERS)
    return user.target in (torch.cat, torch.concat)
