"""A training run's points as lines of a log."""

from __future__ import annotations

from .._train import Point, Training


def log_line(point: Point) -> str:
    """One line: the current value and, in brackets, the mean of the epoch so far."""
    if point.phase == "val":
        return (
            f"Test: [{point.epoch}] Time {point.mean_time_s:.3f} "
            f"Speed {point.mean_images_per_s:.1f} Loss {point.mean_loss:.2f} "
            f"Prec@1 {point.mean_prec1:.1f} Prec@5 {point.mean_prec5:.1f}"
        )
    return (
        f"Epoch: [{point.epoch}][{point.batch}/{point.batches}] "
        f"Time {point.time_s:.3f} ({point.mean_time_s:.3f}) "
        f"Speed {point.images_per_s:.1f} ({point.mean_images_per_s:.1f}) "
        f"Loss {point.loss:.2f} ({point.mean_loss:.2f}) "
        f"Prec@1 {point.prec1:.1f} ({point.mean_prec1:.1f}) "
        f"Prec@5 {point.prec5:.1f} ({point.mean_prec5:.1f})"
    )


def training_text(run: Training) -> str:
    """The last line of the log of each epoch, and its test."""
    last = {(point.phase, point.epoch): point for point in run.points}
    lines = [log_line(point) for point in last.values()]
    if run.stopped_at is not None:
        epoch, batch = run.stopped_at
        lines.append(f"stopped in epoch {epoch} after batch {batch}")
    return "\n".join([*lines, str(run.environment), ""])
