"""The two sets that a run needs, from a folder of images or made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from ..errors import InputError
from .images import ImageFolder, Synthetic, check_folder
from .loader import Loader
from .recipe import whole


@dataclass(frozen=True)
class Data:
    """Batches to train on, batches to evaluate on after each epoch, and the names of the labels."""

    train: Loader
    val: Loader | None = None
    classes: tuple[str, ...] = ()

    def close(self) -> None:
        """End the workers of both loaders."""
        for loader in (self.train, self.val):
            if loader is not None:
                loader.close()


def image_folders(
    root: str | Path,
    batch_size: int,
    *,
    size: int = 224,
    workers: int = 0,
    seed: int = 0,
    max_batches: int | None = None,
    skip_corrupt: bool = False,
    on_skip: Callable[[str], None] | None = None,
) -> Data:
    """Find `root`/train and `root`/val, one folder per class in each; val may be missing."""
    if not isinstance(root, str | Path):
        raise InputError(f"root {root!r} is no folder. Give the path of one.")
    root = _checked(Path(root))
    loader = partial(
        Loader,
        batch_size=batch_size,
        workers=workers,
        seed=seed,
        max_batches=max_batches,
        skip_corrupt=skip_corrupt,
        on_skip=on_skip,
        pin_memory=torch.cuda.is_available(),
    )
    found = ImageFolder.find(root / "train", size=size, augment=True)
    train = loader(found, train=True)
    val = None
    if (root / "val").is_dir():
        held_out = ImageFolder.find(root / "val", size=size, classes=found.classes)
        val = loader(held_out, train=False)
    return Data(train, val, found.classes)


def synthetic(
    batch_size: int,
    shape: tuple[int, ...] = (224, 224, 3),
    *,
    classes: int = 1000,
    batches: int = 100,
    workers: int = 0,
    seed: int = 0,
) -> Data:
    """Random images (D,) H, W, C, `batches` batches of them, and none to evaluate on."""
    whole(1, batch_size=batch_size, classes=classes, batches=batches)
    if not isinstance(shape, (tuple, list)) or len(shape) not in (3, 4):
        raise InputError(f"shape {shape!r:.80} is of no images. Use (224, 224, 3), say.")
    source = Synthetic(batches * batch_size, shape, classes)
    loader = Loader(
        source, batch_size, workers=workers, seed=seed, pin_memory=torch.cuda.is_available()
    )
    return Data(loader, None, tuple(str(number) for number in range(classes)))


def _checked(root: Path) -> Path:
    check_folder(root)
    if not (root / "train").is_dir():
        inside = ", ".join(sorted(path.name for path in root.iterdir())[:4]) or "nothing"
        hint = f"Pass {root.parent}" if root.name in ("train", "val") else "Make a train/ in it"
        raise InputError(
            f"{root} has no folder train/ (it holds {inside}). {hint}: train/ and val/ with one "
            "folder per class in each."
        )
    return root
