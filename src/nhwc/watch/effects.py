"""Tell what one operator call did to the memory format: from inputs, outputs and their past."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..formats import Format
from ..formats.source import CONVOLUTIONS
from .calls import Call, TensorSpec


class Effect(Enum):
    """The effect of a call on the format of the image that went through it."""

    KEEPS = "keeps"
    VIEWS = "views"
    """Moved no data: permute, slice, reshape of dense memory."""
    LOSES = "loses"
    """Channels last went in; another layout came out."""
    MISREADS = "misreads"
    """The only channels-last input had ambiguous strides, and was taken for contiguous."""
    CONVERTS = "converts"
    """The code asked for it: `.contiguous()`, a `memory_format`, a reshape that must copy."""
    RESTORES = "restores"
    """Contiguous went in, channels last came out: this call paid for the conversion back."""
    PLAIN = "plain"
    """Contiguous in, contiguous out."""
    NEUTRAL = "neutral"
    """The operands are no images but vectors, matrices or scalars."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class CallEffect:
    """The effect of a call, and the earlier call that made it necessary, if one did."""

    effect: Effect
    origin: int | None = None


MIXING = frozenset(
    [
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "bmm",
        "mm",
        "baddbmm",
        "addmm",
        "einsum",
        "tensordot",
        "linear",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
    ]
)
"""Operators whose output's dimensions are not their input's: they have no format to keep.

That is another question than whether their number is the same: `linear` keeps that.
"""

_EXPLICIT = frozenset(
    [
        "contiguous",
        "to",
        "clone",
        "_to_copy",
        "reshape",
        "flatten",
        "unflatten",
        "view_as",
        "reshape_as",
        "ravel",
        "copy_",
        "movedim",
        "swapaxes",
        "channel_shuffle",
        "native_channel_shuffle",
    ]
)
"""Operators that the user's code calls for the layout they give, or that must copy to do what they
are called for. Most of what may be a view (`operators.kinds`) is none of these: it never copies.
"""

_RESHAPING = frozenset(
    ["reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "movedim", "swapaxes"]
)
"""Those of them that copy to NCHW where they must copy, however what they are given is marked."""

_FRESH = ("new_", "empty_strided")
"""Prefixes of operators that take only the type and the device of the image they are given."""


def short_name(operator: str) -> str:
    """The last part of an operator's name.

    >>> short_name("torch.nn.functional.conv2d"), short_name("aten::cat")
    ('conv2d', 'cat')
    """
    return operator.rpartition("::")[2].rpartition(".")[2]


class Tracker:
    """Follows the format of every tensor's memory through a sequence of calls.

    A view shares the past of the memory it looks at. So a permutation followed by its inverse, or a
    computation on a slice, is judged by where the data came from.
    """

    def __init__(self) -> None:
        self._kept: dict[int, bool] = {}
        self._unmarked: set[int | None] = set()
        self._origin: dict[int | None, int | None] = {}

    def follow(self, call: Call) -> CallEffect:
        """Return what `call` did. Calls come in the order they were made."""
        outcome = self._judge(call)
        if call.moves_data:
            kept = outcome.effect in (Effect.KEEPS, Effect.RESTORES)
            lost_here = outcome.effect in (Effect.LOSES, Effect.MISREADS, Effect.CONVERTS)
            self._kept[call.index] = kept
            self._origin[call.index] = call.index if lost_here else outcome.origin
            if kept:
                self._origin[call.index] = None
                images = [o for o in call.outputs if len(o.shape) >= 4]
                if all(o.densest is None for o in images):
                    self._unmarked.add(call.index)
        return outcome

    def is_last(self, spec: TensorSpec) -> bool:
        """Whether the memory under `spec` has the channel densest, as far as can be known."""
        # A slice of the channels lies so too, whoever made what it is a slice of.
        if spec.format.is_last or (spec.densest == 1 and spec.marked):
            return True
        if spec.source == -1:
            # With one channel or one pixel both formats fit; the owner may have marked one of them.
            return spec.format is Format.AMBIGUOUS and spec.marked
        return spec.source is not None and self._kept.get(spec.source, False)

    def _judge(self, call: Call) -> CallEffect:
        # Tensors without strides (oneDNN's own, sparse) have none of our formats.
        images = [i for i in call.inputs if i.source is not None and len(i.strides) >= 4]
        made = [o for o in call.outputs if o.source is not None and len(o.strides) >= 4]
        if not call.moves_data:
            return self._in_place(call, images)
        if call.backward:
            weights = {i.shape for i in call.inputs if i.source is None}
            made = [o for o in made if o.shape not in weights]
            # What is spread over an image from one pixel had no format to keep.
            images = [i for i in images if not (i.source in self._unmarked and i.spread)]
        name = short_name(call.operator)
        if not made or not images or name.startswith(_FRESH):
            return CallEffect(Effect.NEUTRAL)
        if not call.backward:
            # A gate or a bias that is broadcast over an image does not decide the image's layout,
            # nor does the weight of a convolution, be it computed anew in each call.
            given = call.inputs[:1] if name in CONVOLUTIONS else call.inputs
            images = [i for i in images if i in given] or images
            images = [i for i in images if i.shape == made[0].shape] or images
        last = [i for i in images if self.is_last(i)]
        origin = next((self._origin.get(i.source) for i in images if not self.is_last(i)), None)
        out = made[0]
        if last and not (call.backward and len(last) < len(images)):
            found = [self._after_last(call, last, o, origin) for o in _judged(call, made, images)]
            lost = [one for one in found if one.effect not in (Effect.KEEPS, Effect.NEUTRAL)]
            return next(iter(lost or found), CallEffect(Effect.KEEPS))
        if out.format.is_last:
            # `zeros_like` and its kind fill in new numbers: they copy nothing from the image.
            return (
                CallEffect(Effect.KEEPS) if _is_like(name) else CallEffect(Effect.RESTORES, origin)
            )
        return CallEffect(Effect.PLAIN, origin)

    def _in_place(self, call: Call, images: list[TensorSpec]) -> CallEffect:
        name = short_name(call.operator)
        # An assignment to a part, x[:, :4] = y, returns nothing.
        assigns = name == "__setitem__"
        made = call.inputs[:1] if assigns else call.outputs
        if not images or not made:
            return CallEffect(Effect.NEUTRAL)
        target = made[0]
        # Masks and indices are no images. `copy_` changes the type of one.
        others = [i for i in images if i != target and i.densest is not None]
        others = [i for i in others if i.dtype == target.dtype or name == "copy_"]
        if target not in images or (assigns and not others):
            return CallEffect(Effect.NEUTRAL if assigns else Effect.VIEWS)
        last = any(self.is_last(other) for other in others)
        # Other operators compute with what was there, unless they are given it as `out`.
        fills = assigns or name == "copy_" or target != images[0]
        if self.is_last(target):
            if last or not others or not fills:
                return CallEffect(Effect.KEEPS)
            return CallEffect(Effect.RESTORES, self._origin.get(others[0].source))
        # What is added to an image that lost the format before is not to blame.
        blamed = fills or not (call.backward or self._origin.get(target.source) is not None)
        converts = last and blamed and target.densest is not None
        return CallEffect(Effect.CONVERTS if converts else Effect.PLAIN)

    def _after_last(
        self, call: Call, last: list[TensorSpec], out: TensorSpec, origin: int | None
    ) -> CallEffect:
        # A tensor that was ambiguous when it was made is not known to be channels last, nor is a
        # view of it.
        known = [i for i in last if i.densest is not None and i.source not in self._unmarked]
        known = [i for i in known if not i.format.is_last or i.marked]
        name = short_name(call.operator)
        if name in MIXING and out.densest is None:
            return CallEffect(Effect.NEUTRAL)
        if out.densest is None or out.format.is_last:
            return CallEffect(Effect.KEEPS)
        if name in MIXING:
            # Rows of channels stay rows of channels; a product over columns leaves none.
            stays = all(any(_ends_densest(i) for i in side) for side in (last, [out]))
            return CallEffect(Effect.KEEPS if stays else Effect.NEUTRAL)
        if call.asked is Format.CONTIGUOUS:
            return CallEffect(Effect.CONVERTS)
        if any(_lies_alike(i, out) for i in last):
            # Whatever it was taken for was made of it before.
            return CallEffect(Effect.KEEPS)
        if not known and name in _RESHAPING:
            return CallEffect(Effect.CONVERTS)
        if not known and name != "contiguous":
            marked = all(i.marked for i in last)
            return CallEffect(Effect.LOSES if marked else Effect.MISREADS)
        if any(_same_layout(i, out) for i in known):
            return CallEffect(Effect.KEEPS)
        if name in _EXPLICIT:
            return CallEffect(Effect.CONVERTS)
        return CallEffect(Effect.LOSES, origin)


def _judged(call: Call, made: list[TensorSpec], images: list[TensorSpec]) -> list[TensorSpec]:
    """The results that may be lost: one, or of several those that lie as no image given does.

    A list of images in both formats may become another such list.
    """
    if call.backward or len(made) == 1:
        return made[:1]
    fresh = (one for one in made if one.source == call.index)
    return [one for one in fresh if not any(_lies_alike(image, one) for image in images)]


def _ends_densest(spec: TensorSpec) -> bool:
    return spec.densest == len(spec.shape) - 1


def _is_like(name: str) -> bool:
    return name.endswith("_like")


def _lies_alike(before: TensorSpec, after: TensorSpec) -> bool:
    """Whether each number of `after` lies where that of `before` does."""
    steps = zip(before.shape, before.strides, after.strides, strict=False)
    return before.shape == after.shape and all(a == b for size, a, b in steps if size > 1)


def _same_layout(before: TensorSpec, after: TensorSpec) -> bool:
    if len(before.shape) == len(after.shape):
        dense = before.densest
        # Channels that were summed to one cannot lie wrongly: a size of 1 fits every layout.
        return dense == after.densest or (dense is not None and after.shape[dense] == 1)
    # Between different numbers of dimensions only "the last one is densest" can be compared.
    return _ends_densest(before) == _ends_densest(after)
