"""A training run as a picture: loss, accuracy and images per second over the epochs."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from .._train import Point, Training
from ..errors import missing

BLUE, ORANGE, GREY = "#1f6feb", "#d9730d", "#8b949e"


def training_plot(training: Training, format: str = "svg") -> bytes:
    """Draw three panels, one above the other, as "svg" or "png"."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise missing("matplotlib", "plot") from None
    # pyplot is avoided, because it would touch a window system and global state.
    figure = Figure(figsize=(8, 8), layout="constrained")
    loss, accuracy, speed = figure.subplots(3, 1, sharex=True)
    train, val = training.of("train"), training.of("val")
    _curves(loss, train, val, lambda p: (p.loss, p.mean_loss))
    loss.set_ylabel("loss")
    # The first evaluations of a net with batch norm can be off by a factor of a hundred.
    loss.set_yscale("log")
    low, high = loss.get_ylim()
    loss.yaxis.set_major_formatter("{x:g}")
    loss.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
    _curves(accuracy, train, val, lambda p: (p.prec1, p.mean_prec1))
    accuracy.set_ylabel("right at first guess, %")
    accuracy.set_ylim(0, 101)
    curves = accuracy.get_legend_handles_labels()
    figure.legend(*curves, loc="outside lower center", ncols=3, frameon=False)
    speed.plot([_epoch(p) for p in train], [p.images_per_s for p in train], color=BLUE, lw=1.2)
    speed.set_ylabel("images per second")
    speed.set_ylim(bottom=0)
    speed.set_xlabel("epoch")
    speed.set_xlim(left=0)
    for panel in (loss, accuracy, speed):
        panel.grid(color=GREY, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(training), fontsize=10)
    buffer = io.BytesIO()
    # Without a date and random names the same run gives the same file.
    metadata = {"Date": None} if format == "svg" else None
    with rc_context({"svg.hashsalt": "nhwc"}):
        figure.savefig(buffer, format=format, dpi=130, metadata=metadata)
    return buffer.getvalue()


def _title(training: Training) -> str:
    recipe = training.recipe
    layout = "channels last" if recipe.channels_last else "contiguous"
    precision = recipe.amp_dtype or "mixed precision" if recipe.amp else "float32"
    return f"{layout}, {precision}\n{training.environment}"


def _curves(
    panel: Any,
    train: Sequence[Point],
    val: Sequence[Point],
    values: Callable[[Point], tuple[float, float]],
) -> None:
    places = [_epoch(point) for point in train]
    panel.plot(places, [values(p)[0] for p in train], color=BLUE, alpha=0.35, lw=1, label="batch")
    panel.plot(places, [values(p)[1] for p in train], color=BLUE, lw=1.6, label="epoch so far")
    if val:
        panel.plot(
            [point.epoch + 1 for point in val],
            [values(point)[1] for point in val],
            color=ORANGE,
            marker="o",
            ms=4,
            lw=1.6,
            label="validation",
        )


def _epoch(point: Point) -> float:
    return point.epoch + point.batch / point.batches
