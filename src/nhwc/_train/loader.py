"""Batches that lie in memory as the images were decoded, N, H, W, C, seen as N, C, H, W."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import InputError, NhwcError
from .distributed import rank_and_world
from .images import Source
from .recipe import whole

_LONGEST = (107 if sys.platform == "linux" else 103) - len("/listener-12345678")
"""Bytes of the path of a folder in which multiprocessing can still make its sockets."""


class Batch(NamedTuple):
    """Images N, C, (D,) H, W in bytes, channels last in memory, and their labels."""

    images: Tensor
    labels: Tensor
    faults: tuple[str, ...] = ()


class Draw(NamedTuple):
    """One image to load, and the seed of its augmentation."""

    number: int
    seed: tuple[int, int, int]


class Item(NamedTuple):
    image: np.ndarray | None
    label: int
    faults: tuple[str, ...]


class Loader:
    """Batches of `source`, in an order that depends on seed and epoch alone.

    >>> from nhwc.training import Synthetic
    >>> loader = Loader(Synthetic(100, (32, 32, 3)), batch_size=8)
    >>> images, labels, _ = next(loader.batches(epoch=0))
    >>> images.shape, images.is_contiguous(memory_format=torch.channels_last)
    (torch.Size([8, 3, 32, 32]), True)

    `batch_size` counts the images of all processes together. Each image's augmentation is seeded
    by (seed, epoch, index), so the result never depends on which worker or process loads it.
    With `train`, batches are shuffled and a last smaller one is left out; without, every image
    comes once. `skip_corrupt` passes over unreadable images and tells `on_skip` which.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        train: bool = True,
        seed: int = 0,
        workers: int = 0,
        pin_memory: bool = False,
        max_batches: int | None = None,
        skip_corrupt: bool = False,
        on_skip: Callable[[str], None] | None = None,
    ) -> None:
        whole(0, workers=workers, seed=seed)
        if max_batches is not None:
            whole(1, max_batches=max_batches)
        self.order = Order(len(source), batch_size, train=train, seed=seed, limit=max_batches)
        self.batch_size = batch_size
        self.seed = seed
        self._skip = skip_corrupt
        self._on_skip = on_skip
        if workers and sys.platform != "win32":
            _check_sockets(util.get_temp_dir())
        self._loader = DataLoader(
            _Drawn(source, replace=train and skip_corrupt),
            batch_sampler=self.order,  # type: ignore[arg-type]
            collate_fn=stack,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        return len(self.order)

    def close(self) -> None:
        """End the workers: those that end with Python itself leave their temporary folders."""
        self._loader._iterator = None

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on; earlier ones are not loaded."""
        self.order.epoch, self.order.start = epoch, start
        try:
            for batch in self._loader:
                for fault in batch.faults:
                    if not self._skip:
                        raise InputError(
                            f"{fault}. Remove it, or pass over such with --skip-corrupt "
                            "(skip_corrupt=True)."
                        )
                    if self._on_skip is not None:
                        self._on_skip(fault)
                if len(batch.labels):
                    _check_bytes(batch.images)
                    yield batch
        except RuntimeError as error:
            if "DataLoader worker" in str(error):
                raise NhwcError(
                    f"a loader worker died, often for want of memory ({str(error).split('.')[0]}). "
                    "Use fewer workers or a smaller batch."
                ) from error
            raise


class Order:
    """This process's share of each batch of an epoch, image by image."""

    def __init__(
        self, length: int, batch_size: int, *, train: bool, seed: int, limit: int | None
    ) -> None:
        _check_sizes(length, batch_size, train=train)
        whole, rest = divmod(length, batch_size)
        self.length, self.batch_size, self.train, self.seed = length, batch_size, train, seed
        self.count = min(whole + (rest > 0 and not train), limit or length)
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[list[Draw]]:
        # The processes may have met since this was made.
        rank, world = rank_and_world()
        _check_sizes(self.length, self.batch_size, train=self.train)
        indices = np.arange(self.length)
        if self.train:
            np.random.default_rng((self.seed, self.epoch)).shuffle(indices)
        for number in range(self.start, self.count):
            batch = indices[number * self.batch_size : (number + 1) * self.batch_size]
            own = [int(index) for index in batch[rank::world]]
            yield [Draw(index, (self.seed, self.epoch, index)) for index in own]


class _Drawn(Dataset[Item]):
    """Calls the source, and returns its errors to the main process as text.

    An exception would arrive there wrapped in a worker's traceback. While training, another image
    may replace an unreadable one, so that all batches and all processes' shares stay equally large.
    """

    def __init__(self, source: Source, *, replace: bool) -> None:
        self.source, self.tries = source, len(source) if replace else 1

    def __getitem__(self, draw: Draw) -> Item:
        faults: list[str] = []
        for offset in range(self.tries):
            try:
                index = (draw.number + offset) % len(self.source)
                image, label = self.source.sample(index, np.random.default_rng(draw.seed))
                return Item(image, label, tuple(faults))
            except InputError as error:
                faults.append(str(error))
        return Item(None, 0, tuple(faults))


def stack(items: list[Item]) -> Batch:
    """Lay images side by side as they are and view the result as N, C, (D,) H, W."""
    read = [(item.image, item.label) for item in items if item.image is not None]
    shape = read[0][0].shape if read else ()
    good = [(image, label) for image, label in read if image.shape == shape]
    unlike = [
        f"an image of shape {image.shape} cannot stand beside one of {shape}"
        for image, _ in read
        if image.shape != shape
    ]
    faults = tuple([fault for item in items for fault in item.faults] + unlike)
    labels = torch.tensor([label for _, label in good], dtype=torch.int64, device="cpu")
    if not good:
        return Batch(torch.empty(0, 0, 0, 0, device="cpu"), labels, faults)
    images = torch.from_numpy(np.stack([image for image, _ in good])).movedim(-1, 1)
    return Batch(images, labels, faults)


def _check_sockets(folder: str) -> None:
    """Refuse a folder too deep for the sockets by which workers hand over memory: all hang."""
    if len(os.fsencode(folder)) > _LONGEST:
        raise InputError(
            f"loader workers need sockets in {folder}, whose path is too long for a socket's. "
            "Set TMPDIR to a shorter one, /tmp say, or load without workers (--workers 0)."
        )


def _check_bytes(images: Tensor) -> None:
    if images.dtype is not torch.uint8:
        raise InputError(
            f"the source gave images of {str(images.dtype).removeprefix('torch.')}, and images are "
            "uint8 here. Give bytes, as (image * 255).astype(np.uint8) of numbers from 0 to 1."
        )


def _check_sizes(length: int, batch_size: int, *, train: bool) -> None:
    whole(1, batch_size=batch_size)
    world = rank_and_world()[1] if train else 1
    if batch_size % world:
        near = max(batch_size // world, 1) * world
        raise InputError(
            f"a batch of {batch_size} does not divide among {world} processes. "
            f"Use {near} or {near + world}."
        )
    if train and not length:
        raise InputError("the training set has no images. Give it some.")
    if train and length < batch_size:
        raise InputError(
            f"the training set has {length} images, less than one batch of {batch_size}. "
            f"Use a batch size of {length} or less."
        )
