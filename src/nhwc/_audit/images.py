"""Tell calls on images from others: the scores of an attention have four dimensions too."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..watch.calls import Call, TensorSpec
from ..watch.effects import MIXING, CallEffect, Effect, short_name

_ON_PIXELS = re.compile(
    "conv|pool|(batch|group|instance)_norm|interpolate|upsample|pixel|grid_sample|pad|fold"
)


def only_of_images(calls: Sequence[Call], outcomes: Sequence[CallEffect]) -> list[CallEffect]:
    """`outcomes`, with those of calls on no image made neutral.

    Tensors of four or more dimensions form groups, which end at products of two values. A group is
    one of images if an operator on pixels makes or uses one of its tensors, or if one of them is an
    input of the model or is used by no later call.
    """
    groups = _Groups(len(calls))
    used = {spec.source for call in calls for spec in call.inputs}
    images = []
    for call in calls:
        given = [spec.source for spec in call.inputs if _is_large(spec)]
        if not _multiplies(call):
            for source in given:
                if source is not None and source >= 0:
                    groups.join(call.index, source)
        made = call.moves_data and any(_is_large(spec) for spec in call.outputs)
        ends = made and call.index not in used
        if ends or -1 in given or _ON_PIXELS.search(short_name(call.operator)):
            images.append(call.index)
    pictured = {groups.of(index) for index in images}
    kept = [groups.of(call.index) in pictured for call in calls]
    return [
        _within(kept, outcome) if stays else CallEffect(Effect.NEUTRAL)
        for outcome, stays in zip(outcomes, kept, strict=True)
    ]


def _within(kept: list[bool], outcome: CallEffect) -> CallEffect:
    """`outcome`, without its origin if that call worked on no image."""
    known = outcome.origin is None or kept[outcome.origin]
    return outcome if known else CallEffect(outcome.effect)


def _is_large(spec: TensorSpec) -> bool:
    return len(spec.shape) >= 4


def _multiplies(call: Call) -> bool:
    """Whether it multiplies two values, no weights; the product has the dimensions of neither."""
    values = [spec for spec in call.inputs if spec.source is not None]
    return short_name(call.operator) in MIXING and len(values) > 1


class _Groups:
    """Numbers, each in one group; joining two joins their groups."""

    def __init__(self, count: int) -> None:
        self._next = list(range(count))

    def of(self, number: int) -> int:
        while self._next[number] != number:
            self._next[number] = number = self._next[self._next[number]]
        return number

    def join(self, one: int, other: int) -> None:
        self._next[self.of(one)] = self.of(other)
