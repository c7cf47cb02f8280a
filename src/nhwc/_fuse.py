"""`fuse`: the same model with its batch norms folded into its convolutions, for inference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .graph.modules.leaves import runs_hooks
from .graph.report import FuseReport, PassReport, Site
from .graph.tracing.captured import Captured, capture, graphs
from .machine.environment import beside
from .models.kinds import rewritable
from .optimized import Optimized
from .passes import FOLDING, Pass, run_passes


def fuse(model: nn.Module, *, passes: Sequence[Pass] = FOLDING) -> fx.GraphModule:
    """Return a copy of `model` as a graph, each batch norm folded into the convolution beside it.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> fused = fuse(net)
    >>> [type(layer).__name__ for layer in fused.children()]
    ['Conv2d', 'ReLU']
    >>> fused.report.applied
    (Site(where='1', what='0 + 1', applied=True, reason=''),)

    The input model is left as it is, and shares no memory with the result. `report` tells of every
    batch norm whether it was folded, or why not, and which parts could not be looked into.
    """
    model = rewritable(model, "fuse")
    if isinstance(model, Optimized) and not runs_hooks(model):
        model = model.portable
    captured = capture(model)
    unseen = _unseen(captured)
    with beside(captured.module.parameters()):
        reports = run_passes(captured.module, passes)
    report = FuseReport((*captured.baked, *reports, unseen), captured.opaque, captured.notes)
    return attach_report(captured.module, report)


def attach_report(gm: fx.GraphModule, report: object) -> fx.GraphModule:
    """Set `gm.report`, in a way that copies and pickles of `gm` keep it."""
    gm.report = report  # type: ignore[assignment]
    # GraphModule's own deepcopy carries over only what is named here.
    gm.meta.setdefault("_user_preserved_attributes", {})["report"] = report
    return gm


def _unseen(captured: Captured) -> PassReport:
    """The batch norms that stand in no graph, because the code around them could not be traced."""
    in_graphs = {
        id(gm.get_submodule(str(node.target)))
        for _, gm in graphs(captured.module)
        for node in gm.graph.find_nodes(op="call_module")
    }
    # A model that is opaque as a whole hangs below the graph that calls it, as `model`.
    prefix = "model." if any(not part.path for part in captured.opaque) else ""
    sites = []
    for name, module in captured.module.named_modules():
        if isinstance(module, _BatchNorm) and id(module) not in in_graphs:
            path = name.removeprefix(prefix)
            around = [part for part in captured.opaque if _inside(path, part.path)]
            part = max(around, key=lambda part: len(part.path), default=None)
            why = f"{part.path or 'the model'} is not a graph: {part.reason}" if part else "not run"
            sites.append(Site(path, type(module).__name__, False, why))
    return PassReport("fold_bn_in_opaque_parts", tuple(sites))


def _inside(path: str, part: str) -> bool:
    return not part or path.startswith(f"{part}.")
