"""The copies between layouts inside oneDNN, in one run contiguous and in one channels last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..formats import Format
from ..machine.stdout import Taken, give_back, stdout_taken
from ..shown import shown
from ..watch.calls import Call
from ..watch.onednn import (
    Primitive,
    is_told,
    mark_of,
    of_others,
    primitives_of,
    print_one,
    profiling,
)
from ..watch.recorder import Recorder
from .running import Run, weights_in


@dataclass(frozen=True)
class Inside:
    """What oneDNN ran in one run of the model, by its own clock."""

    primitives: tuple[Primitive, ...]

    @property
    def images(self) -> tuple[Primitive, ...]:
        """The reorders of images: of what goes into a layer and of what comes out."""
        return tuple(p for p in self.primitives if p.is_reorder and p.role != "weight")

    @property
    def weights(self) -> tuple[Primitive, ...]:
        """The reorders of weights. torch makes them anew in every call."""
        return tuple(p for p in self.primitives if p.is_reorder and p.role == "weight")

    @property
    def others(self) -> tuple[Primitive, ...]:
        """What is no reorder: convolutions, products and the like."""
        return tuple(p for p in self.primitives if not p.is_reorder)

    def to_dict(self) -> dict[str, Any]:
        return {
            "images_s": seconds_of(self.images),
            "weights_s": seconds_of(self.weights),
            "others_s": seconds_of(self.others),
            "primitives": [
                {
                    **asdict(p),
                    "layouts": dict(p.layouts),
                    "path": p.path if p.is_reorder else "",
                    "place": p.site.place,
                }
                for p in self.primitives
            ],
        }


@dataclass(frozen=True)
class Reorders:
    """What oneDNN ran in either format."""

    contiguous: Inside
    channels_last: Inside

    def to_dict(self) -> dict[str, Any]:
        return {
            "contiguous": self.contiguous.to_dict(),
            "channels_last": self.channels_last.to_dict(),
        }


class Untold(Exception):
    """oneDNN cannot be asked, or told nothing; the message says why."""


def seconds_of(primitives: Iterable[Primitive]) -> float:
    return sum(primitive.seconds for primitive in primitives)


def reorders_of(run: Run, device: torch.device) -> Reorders:
    """Run the model of `run` contiguous and channels last, and have oneDNN tell of both."""
    if device.type != "cpu":
        raise Untold(f"the model runs on {device.type}, without oneDNN")
    if not torch.backends.mkldnn.is_available():
        raise Untold("this torch was built without oneDNN")
    if not torch.backends.mkldnn.enabled:
        raise Untold("oneDNN is switched off (torch.backends.mkldnn.enabled)")
    asked = not _tells_anyway()
    last = _inside(run, Format.CHANNELS_LAST, asked=asked)
    found = Reorders(_inside(run, Format.CONTIGUOUS, asked=asked), last)
    if not (found.contiguous.primitives or found.channels_last.primitives):
        raise Untold("oneDNN told of nothing, since no operator of this model runs in it")
    return found


def _tells_anyway() -> bool:
    """Whether the profile is on already: its owner (ONEDNN_VERBOSE=1, say) keeps it, and its lines.

    torch can switch it on and off, but not say which it is.
    """
    taken = Taken()
    try:
        with stdout_taken(taken):
            print_one()
    except OSError as error:
        raise Untold(f"standard output, to which it prints, cannot be read ({error})") from error
    give_back(taken.text)
    return is_told(taken.text)


def _inside(audited: Run, format: Format, *, asked: bool) -> Inside:
    run = Run(audited.model, *audited.arguments, format=format, backward=audited.backward)
    try:
        with weights_in(run.model, format):
            if format is not audited.format:
                # oneDNN makes and keeps a layer's code at its first call.
                run.go()
            return Inside(tuple(_told(run, asked=asked)))
    except Exception as error:
        how = str(format).replace("_", " ")
        raise Untold(f"the model does not run {how} ({shown(error).rstrip('.')})") from error


def _told(run: Run, *, asked: bool) -> list[Primitive]:
    """The primitives of one run. If it was not `asked`, oneDNN tells its profile anyway."""
    calls: list[Call] = []
    taken = Taken()

    def mark(call: Call) -> None:
        calls.append(call)
        taken.mark(mark_of(call))

    try:
        with stdout_taken(taken), profiling() if asked else contextlib.nullcontext():
            run.go(Recorder(run.model, on_call=mark))
    finally:
        give_back(of_others(taken.text, ours=asked))
    return primitives_of(taken.text, calls)
