"""The points of a run as they come, to a table on disk and to TensorBoard."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import InputError
from .progress import Point

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

COLUMNS = tuple(field.name for field in fields(Point))


class MetricsLog:
    """Writes each point to `folder`/metrics.csv at once, and to TensorBoard where installed.

    `earlier` are the points of the run that this one resumes: they come first. Nothing is created
    before the first point.
    """

    def __init__(self, folder: Path, earlier: Sequence[Point] = ()) -> None:
        self._folder, self._earlier = folder, earlier
        self._open = ExitStack()
        self._table: csv.DictWriter[str] | None = None
        self._board: SummaryWriter | None = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._told():
            self._open.close()

    def add(self, point: Point) -> None:
        with self._told():
            if self._table is None:
                self._table = self._create()
            self._table.writerow(point.to_dict())
        if point.phase == "train":
            self._scalars(point, loss=point.loss, prec1=point.prec1, lr=point.lr)
            self._scalars(point, images_per_s=point.images_per_s)
        else:
            self._scalars(point, loss=point.mean_loss, prec1=point.mean_prec1)

    def _create(self) -> csv.DictWriter[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Line by line, so that the file always holds every point of the run so far.
        file = (self._folder / "metrics.csv").open("w", newline="", buffering=1)
        self._open.enter_context(file)
        self._board = _tensorboard(self._folder)
        if self._board is not None:
            self._open.callback(self._board.close)
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(point.to_dict() for point in self._earlier)
        return table

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Name the folder that cannot be written to: the disk may be full by now."""
        try:
            yield
        except OSError as error:
            raise InputError(f"cannot write to {self._folder}: {error.strerror or error}") from None

    def _scalars(self, point: Point, **values: float) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{point.phase}/{name}", value, point.step)


def _tensorboard(folder: Path) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
