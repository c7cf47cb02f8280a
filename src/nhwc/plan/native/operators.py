"""Which of our kernels computes an operator without weights, by what its node calls.

The tables name the function that lowers each call. Its file says how.
"""

from __future__ import annotations

import re
from operator import getitem

from torch import fx, nn

from ...graph.modules.frames import FromFrames, ToFrames
from ...graph.modules.layers import Fused
from ...graph.modules.leaves import computes_as, runs_hooks
from ...graph.modules.mended import (
    Cat,
    ChannelNorm,
    ChannelShuffle,
    GlobalResponse,
    GroupNorm,
    InstanceNorm,
    Interleave,
    SpelledNorm,
)
from ...graph.modules.ordered import Repeat, Softmax
from ...operators.kinds import arithmetic_of
from ..implementation import Implementation
from ..padding import PADDING
from ..recording import Record
from ..specs import Layer
from . import arithmetic, fused, norms, placing, pooling
from .calls import Lower, OperatorCall, kernels_in
from .transposed import TRANSPOSED, transposed
from .windows import MODULES as WINDOWS
from .windows import average_pool, max_pool, resize

_FUNCTIONS: dict[str, Lower] = {
    "add": arithmetic.add,
    "mul": arithmetic.multiply,
    "sub": arithmetic.subtract,
    "div": arithmetic.divide,
    **dict.fromkeys(("pow", "square"), arithmetic.square),
    **dict.fromkeys(("cat", "concat", "concatenate"), placing.cat),
    **dict.fromkeys(("chunk", "split", "tensor_split"), placing.split),
    **dict.fromkeys(("flatten", "view", "reshape"), placing.flatten),
    **dict.fromkeys(("pad", "flip", "repeat", "repeat_interleave"), placing.moved),
    **dict.fromkeys(("to", "float", "type_as", "clone", "detach"), placing.same),
    **dict.fromkeys(("max_pool2d", "max_pool3d"), pooling.of_function(max_pool)),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), pooling.of_function(average_pool)),
    **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_avg_pool3d"), pooling.adaptive_pool),
    "assert_sizes": placing.unchanged,
    "interpolate": pooling.of_function(resize),
    "mean": pooling.mean,
    **dict.fromkeys(("softmax", "log_softmax"), norms.softmax),
    "normalize": norms.normalize,
    "over_root_mean_square": norms.over_root,
}
"""By the name of a function or method; arithmetic by the one name that all its spellings have."""

_MODULES: dict[type[nn.Module], Lower] = {
    **{kind: pooling.of_module(make) for kind, make in WINDOWS.items()},
    **dict.fromkeys((nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), pooling.adaptive_pool),
    nn.Flatten: placing.flatten,
    Cat: placing.cat,
    Interleave: placing.interleave,
    ChannelShuffle: placing.shuffle,
    **dict.fromkeys((Repeat, *PADDING), placing.moved),
    **dict.fromkeys((ToFrames, FromFrames), placing.frames),
    Softmax: norms.softmax_of_module,
    Fused: fused.fused,
}
"""By the kind of a module."""

_EXACTLY: dict[type[nn.Module], Lower] = {
    **dict.fromkeys(TRANSPOSED, transposed),
    nn.PReLU: arithmetic.prelu,
    ChannelNorm: norms.channel_norm,
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), norms.layer_norm),
    **dict.fromkeys((nn.GroupNorm, GroupNorm, InstanceNorm), norms.group_norm),
    GlobalResponse: norms.response,
    SpelledNorm: norms.spelled_norm,
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d), placing.unchanged),
}
"""By the kind of a module, where one with a `forward` of its own does not count."""


def operator(graph: fx.GraphModule, record: Record, layer: Layer) -> tuple[Implementation, ...]:
    """Our kernels for a layer without weights, if there are any."""
    call = OperatorCall(graph, record, layer)
    lower = _of_module(call) if call.module is not None else _of_call(call)
    return kernels_in(lower(call)) if lower else ()


def _of_call(call: OperatorCall) -> Lower | None:
    if call.node.op == "call_function" and call.node.target is getitem:
        return placing.item
    name = arithmetic_of(call.name) or call.name
    if name in _FUNCTIONS:
        return _FUNCTIONS[name] if _fits(name, call) else None
    return arithmetic.activation


def _of_module(call: OperatorCall) -> Lower | None:
    module = call.module
    if runs_hooks(module):
        return None
    kinds = [kind for kind in _MODULES if isinstance(module, kind)]
    kinds += [kind for kind in _EXACTLY if computes_as(module, kind)]
    if not kinds:
        return arithmetic.activation
    known = _MODULES | _EXACTLY
    return known[kinds[0]] if _fits(kinds[0].__name__, call) else None


def _fits(name: str, call: OperatorCall) -> bool:
    """Whether what is called so, as `max_pool3d`, is given a batch.

    Torch takes a single volume, too: its channels stand where those of an image do not.
    """
    sides = re.search(r"(\d)d$", name)
    return sides is None or len(call.seen(0).shape) == int(sides[1]) + 2
