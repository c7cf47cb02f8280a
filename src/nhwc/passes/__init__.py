"""The rewrites, one per file, and the order they run in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from ..graph import graphs
from ..graph.report import PassReport, Site
from .drop_masks import drop_masks
from .drop_states import drop_states
from .eliminate_dropout import eliminate_dropout
from .eliminate_identity import eliminate_identity
from .fold_bn_into_conv import fold_bn_into_conv
from .fold_bn_into_linear import fold_bn_into_linear
from .fold_constants import fold_constants
from .fold_mixing import fold_mixing
from .fold_scale import fold_scale
from .fold_scale_before import fold_scale_before
from .fold_scale_behind_relu import fold_scale_behind_relu
from .fuse_bn_activation import fuse_bn_activation
from .fuse_epilogue import fuse_epilogue
from .fuse_norm_activation import fuse_norm_activation
from .join_activation import join_activation
from .join_attention import join_attention
from .join_norm import join_norm
from .join_positions import join_positions
from .join_response_norm import join_response_norm
from .join_samples import join_samples
from .join_scores import join_scores
from .lift_functional import lift_functional
from .lift_products import lift_products
from .mend_arithmetic import mend_arithmetic
from .mend_cat_format import mend_cat_format
from .mend_channel_shuffle import mend_channel_shuffle
from .mend_contiguous import mend_contiguous
from .mend_frames import mend_frames
from .mend_grid_sample import mend_grid_sample
from .mend_group_norm import mend_group_norm
from .mend_instance_norm import mend_instance_norm
from .mend_interpolate import mend_interpolate
from .mend_pad import mend_pad
from .mend_permute import mend_permute
from .mend_reduction import mend_reduction
from .mend_repeat import mend_repeat
from .mend_softmax import mend_softmax
from .mend_tokens import mend_tokens
from .mend_writes import mend_writes
from .merge_branches import merge_branches
from .move_mixing import move_mixing
from .narrow_tokens import narrow_tokens
from .number_masks import number_masks
from .plain_names import plain_names
from .split_attention import split_attention

Pass = Callable[[fx.GraphModule], PassReport]

FOLDING: tuple[Pass, ...] = (
    eliminate_dropout,
    eliminate_identity,
    mend_writes,
    fold_constants,
    lift_functional,
    fold_bn_into_conv,
    fold_bn_into_linear,
)
"""`fuse` runs these. They fold batch norms and remove whatever separates one from its layer, and
what keeps constants from being computed."""

MENDING: tuple[Pass, ...] = (
    mend_permute,
    mend_channel_shuffle,
    mend_frames,
    mend_interpolate,
    mend_cat_format,
    mend_contiguous,
    mend_arithmetic,
    mend_tokens,
    mend_reduction,
    mend_softmax,
    mend_repeat,
    mend_pad,
    mend_grid_sample,
    mend_instance_norm,
    mend_group_norm,
)
"""These replace operators that lose channels last by modules that keep it.

A pass that asks whether a value was reshaped comes before `mend_tokens` and `mend_frames`, which
make layers of reshapes: to the second, the groups of a channel shuffle could be frames.
"""

PASSES: tuple[Pass, ...] = (
    *FOLDING,
    plain_names,
    join_activation,
    lift_products,
    merge_branches,
    move_mixing,
    fold_mixing,
    drop_states,
    split_attention,
    number_masks,
    drop_masks,
    join_positions,
    join_attention,
    join_scores,
    narrow_tokens,
    join_response_norm,
    join_norm,
    join_samples,
    fold_scale,
    fold_scale_behind_relu,
    fold_scale_before,
    *MENDING,
    fuse_epilogue,
    fuse_bn_activation,
    fuse_norm_activation,
)
"""All passes, in the order in which `optimize` runs them."""


def exact_passes(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Those of `passes` that leave infinite numbers where they are, and multiply none by zero."""
    inexact = (move_mixing, fold_mixing, join_positions)
    return tuple(one for one in passes if one not in inexact)


def run_passes(gm: fx.GraphModule, passes: Sequence[Pass] = PASSES) -> tuple[PassReport, ...]:
    """Run `passes` in their order on `gm`, and on the graphs inside its opaque parts, in place."""
    reports = []
    for rewrite in passes:
        sites: list[Site] = []
        start = time.perf_counter()
        for path, graph in list(graphs(gm)):
            report = rewrite(graph)
            sites += (_below(path, site) for site in report.sites)
        reports.append(PassReport(rewrite.__name__, tuple(sites), time.perf_counter() - start))
    return tuple(reports)


def _below(path: str, site: Site) -> Site:
    return replace(site, where=f"{path}.{site.where}") if path else site
