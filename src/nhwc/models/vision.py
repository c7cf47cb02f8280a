"""torchvision imported, also beside a torch that its compiled operators do not match.

Of the compiled operators, torchvision's detection models need only `nms` and `roi_align`. Those
here return the same, slower.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import missing

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, "
    "SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor",
}


def import_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators do not match this torch.

    A torchvision from the package index beside a CPU-only torch dies at import, because it
    registers fake implementations for operators its library failed to define. Here it gets
    their schemas, and those operators that its models call, written in plain torch.
    """
    mend_torchvision()
    try:
        return importlib.import_module("torchvision")
    except ImportError:
        raise missing("torchvision", "zoo") from None


def mend_torchvision() -> None:
    """Make a later `import torchvision` by somebody else's code succeed, where it is installed.

    It is not imported here: that takes longer than all of nhwc, and most code does without.
    """
    if "torchvision" not in sys.modules and _MENDED not in sys.meta_path:
        sys.meta_path.insert(0, _MENDED)


class _Mended(MetaPathFinder):
    """Finds torchvision where it lies, and mends it while it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_run_mended, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


_MENDED = _Mended()


def _run_mended(run: Callable[[ModuleType], None], module: ModuleType) -> None:
    with _declaring_what_is_missing():
        run(module)
    _supply()


@contextlib.contextmanager
def _declaring_what_is_missing() -> Iterator[None]:
    """Give each operator of torchvision a schema before somebody registers something for it.

    A second import could not do so: torch 2.11 remembers what the first one registered.
    """
    register = torch.library.register_fake

    def declared(op: Any, *given: Any, **more: Any) -> Any:
        name = op.removeprefix("torchvision::") if isinstance(op, str) else op
        if name != op and not hasattr(torch.ops.torchvision, name):
            _declare(name)
        return register(op, *given, **more)

    torch.library.register_fake = declared
    try:
        yield
    finally:
        torch.library.register_fake = register


def _declare(operator: str) -> torch.library.Library:
    """Give an operator of torchvision a schema, so that torchvision can be imported."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(_SCHEMAS.get(operator, f"{operator}(Tensor input) -> Tensor"))
    _DECLARED.append(library)
    return library


def _supply() -> None:
    """Let torchvision call the operators below, unless it has its own or has them already."""
    if hasattr(torch.ops.torchvision, "roi_align"):
        return
    library = _declare("roi_align")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    library.impl("nms", nms, "CompositeExplicitAutograd")
    for name in ("boxes", "roi_align"):
        # Each module asks by a name of its own whether the operators are there.
        module = importlib.import_module(f"torchvision.ops.{name}")
        # Functions, since TorchScript compiles them.
        vars(module).update(_has_ops=_has_ops, _assert_has_ops=_assert_has_ops)


def _has_ops() -> bool:
    return True


def _assert_has_ops() -> None:
    """Torchvision's own raises where its operators are missing."""


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The indices of boxes (x1, y1, x2, y2) that overlap no better box that is kept; best first.

    >>> boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 3], [5, 5, 9, 9]])
    >>> nms(boxes, torch.tensor([0.5, 0.9, 0.7]), 0.6)
    tensor([1, 2])
    """
    order = scores.argsort(descending=True, stable=True)
    sorted_boxes = boxes[order]
    low, high = sorted_boxes[:, :2], sorted_boxes[:, 2:]
    area = (high - low).prod(1)
    sides = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
    shared = sides.clamp(min=0).prod(2)
    overlaps = (shared / (area[:, None] + area - shared) > iou_threshold).triu(1)
    kept, before = torch.ones_like(order, dtype=torch.bool), None
    # A box depends only on the better ones before it: a round that changes nothing is the last.
    while before is None or not torch.equal(kept, before):
        kept, before = ~overlaps[kept].any(0), kept
    return order[kept]


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """The mean of bilinear samples in each cell of each box; a roi is (image, x1, y1, x2, y2)."""
    corners = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    start, size = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if not aligned:
        size = size.clamp(min=1)
    cell = size / size.new_tensor([pooled_width, pooled_height])
    # The number of samples in a cell, across and down.
    samples = cell.detach().ceil().clamp(min=0).long()
    if sampling_ratio > 0:
        samples = torch.full_like(samples, sampling_ratio)
    result = input.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    groups = torch.cat((rois[:, :1].detach().long(), samples), 1)
    for group in groups.unique(dim=0):
        image, across, down = group.tolist()
        chosen = (groups == group).all(1).nonzero()[:, 0]
        if across and down:
            x = _places(start[chosen, 0], cell[chosen, 0], pooled_width, across)
            y = _places(start[chosen, 1], cell[chosen, 1], pooled_height, down)
            means = F.avg_pool2d(_sampled(input[image], x, y), (down, across))
            result = result.index_copy(0, chosen, means)
    return result


def _places(start: Tensor, cell: Tensor, cells: int, samples: int) -> Tensor:
    """Where the samples of each box lie, in pixels: boxes x (cells * samples)."""
    steps = (torch.arange(cells * samples, device=start.device).to(start) + 0.5) / samples
    return start[:, None] + steps * cell[:, None]


def _sampled(image: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`image` at each (y, x), boxes x channels x ys x xs; zero more than a pixel outside of it."""
    height, width = image.shape[1:]
    grid = torch.stack(
        (
            _normalized(x, width)[:, None, :].expand(-1, y.shape[1], -1),
            _normalized(y, height)[:, :, None].expand(-1, -1, x.shape[1]),
        ),
        -1,
    )
    # One call with the grids of all boxes below one another: they read the same image.
    values: Tensor = F.grid_sample(
        image[None], grid.flatten(0, 1)[None], padding_mode="border", align_corners=True
    )
    values = values[0].unflatten(1, y.shape).movedim(1, 0)
    rows, columns = (y >= -1) & (y <= height), (x >= -1) & (x <= width)
    return values * rows[:, None, :, None] * columns[:, None, None, :]


def _normalized(places: Tensor, size: int) -> Tensor:
    """Pixel positions in grid_sample's units with align_corners: -1 is the first, 1 the last."""
    return places.clamp(0, size - 1) * (2 / max(size - 1, 1)) - 1


# A Library undefines its operators when it is collected.
_DECLARED: list[torch.library.Library] = []
