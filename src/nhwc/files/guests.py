"""Functions of torchvision, timm and einops that a saved graph may call.

A trace does not go into them. Each computes tensors from tensors and numbers. A file names them by
module and name, from this table alone; loading such a file needs the package, and no class of it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from ..errors import FileError
from ..graph.report import Opaque
from ..models.vision import mend_torchvision

_WINDOWS = "window_reverse"

GUESTS = {
    "einops.einops": "rearrange reduce repeat einsum",
    "torchvision.ops.stochastic_depth": "stochastic_depth",
    "torchvision.models.swin_transformer": "_patch_merging_pad _get_relative_position_bias "
    "shifted_window_attention",
    "torchvision.models.video.swin_transformer": "_get_window_and_shift_size "
    "_get_relative_position_bias _compute_pad_size_3d _compute_attention_mask_3d "
    "shifted_window_attention_3d",
    "torchvision.models.video.mvit": "_unsqueeze _squeeze _add_rel_pos _add_shortcut",
    "timm.layers.padding": "pad_same",
    "timm.layers.attention": "maybe_add_mask resolve_self_attn_mask",
    "timm.layers.pos_embed_sincos": "_build_grid get_mixed_grid make_coords_dinov3",
    "timm.layers.pos_embed": "resample_abs_pos_embed resample_abs_pos_embed_nhwc",
    "timm.models.crossvit": "scale_image",
    "timm.models.davit": _WINDOWS,
    "timm.models.gcvit": _WINDOWS,
    "timm.models.maxxvit": f"{_WINDOWS} grid_reverse window_reverse_nchw grid_reverse_nchw",
    "timm.models.hiera": "get_resized_mask",
    "timm.models.mvitv2": "reshape_pre_pool reshape_post_pool cal_rel_pos_type",
    "timm.models.nest": "deblockify",
    "timm.models.qwen3_vit": "resample_pos_embed_grid",
    "timm.models.swin_transformer": _WINDOWS,
    "timm.models.swin_transformer_v2": _WINDOWS,
    "timm.models.swin_transformer_v2_cr": _WINDOWS,
    "timm.models.vision_transformer_sam": "get_rel_pos",
}


def guest_name(function: Any) -> str | None:
    """The name of this function in a file; None if it is not in the table."""
    home, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    return f"{home}.{name}" if name in GUESTS.get(home, "").split() else None


def guest(name: str) -> Callable[..., Any] | None:
    """The function that a file calls `name`; None if the table has none."""
    home, _, leaf = name.rpartition(".")
    if leaf not in GUESTS.get(home, "").split():
        return None
    package = home.partition(".")[0]
    try:
        mend_torchvision()
        module = importlib.import_module(home)
    except ImportError:
        raise FileError(f"the model calls {name}. Install {package} to load it.") from None
    found: Callable[..., Any] | None = getattr(module, leaf, None)
    return found


def axes_named(name: str, given: Iterable[Any]) -> frozenset[str]:
    """The axes in the pattern of a function of einops, which takes their sizes by keywords.

    >>> sorted(axes_named("einops.einops.rearrange", ["b (h w) -> b h w"]))
    ['b', 'h', 'w']
    """
    patterns = [one for one in given if isinstance(one, str)] if name.startswith("einops.") else []
    return frozenset(axis for one in patterns for axis in re.findall(r"[a-zA-Z]\w*", one))


def guests_of(graph: fx.Graph) -> tuple[Opaque, ...]:
    """The functions of the table that `graph` calls, each a part that no trace of it goes into."""
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    names = dict.fromkeys(name for name in map(guest_name, calls) if name)
    return tuple(
        Opaque(name, "function", "its package keeps it closed to torch.fx") for name in names
    )
