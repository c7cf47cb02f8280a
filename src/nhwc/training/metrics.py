"""The points of a run as they come, to a table on disk and to TensorBoard."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..errors import InputError
from .progress import Point

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

COLUMNS = tuple(field.name for field in fields(Point))


class MetricsLog:
    """Writes each point to `folder`/metrics.csv at once, and to TensorBoard where installed.

    `earlier` are the points of the run that this one resumes: they come first.
    """

    def __init__(self, file: TextIO, board: SummaryWriter | None) -> None:
        self._file, self._board = file, board
        self._table = csv.DictWriter(file, COLUMNS, lineterminator="\n")

    @classmethod
    @contextlib.contextmanager
    def open(cls, folder: Path, earlier: Sequence[Point] = ()) -> Iterator[MetricsLog]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / "metrics.csv").open("w", newline="")
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
        board = _tensorboard(folder)
        try:
            log = cls(file, board)
            log._table.writeheader()
            for point in earlier:
                log._table.writerow(point.to_dict())
            yield log
        finally:
            file.close()
            if board is not None:
                board.close()

    def add(self, point: Point) -> None:
        self._table.writerow(point.to_dict())
        self._file.flush()
        if self._board is None:
            return
        if point.phase == "train":
            self._scalars(point, loss=point.loss, prec1=point.prec1, lr=point.lr)
            self._scalars(point, images_per_s=point.images_per_s)
        else:
            self._scalars(point, loss=point.mean_loss, prec1=point.mean_prec1)

    def _scalars(self, point: Point, **values: float) -> None:
        assert self._board is not None
        for name, value in values.items():
            self._board.add_scalar(f"{point.phase}/{name}", value, point.step)


def _tensorboard(folder: Path) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
