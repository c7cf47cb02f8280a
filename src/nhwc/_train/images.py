"""Folders of images, decoded to the H, W, C bytes that channels last is made of."""

from __future__ import annotations

import math
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from ..errors import InputError, missing
from ..shown import printable

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
"""File name endings that count as images, in any case."""


class Source(Protocol):
    """Images by number. A source of your own needs these two methods."""

    def __len__(self) -> int: ...

    def sample(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """Return an image as uint8 of shape (D,) H, W, C, and its label.

        All randomness must come from `rng`. An unreadable image raises InputError.
        """
        ...


@dataclass(frozen=True)
class ImageFolder:
    """One folder per class; images come out `size` pixels square, RGB.

    With `augment`, a random part of the image, mirrored half of the time; without, its middle.
    """

    files: tuple[tuple[Path, int], ...]
    classes: tuple[str, ...]
    size: int = 224
    augment: bool = False

    @classmethod
    def find(
        cls,
        root: str | Path,
        *,
        size: int = 224,
        augment: bool = False,
        classes: Sequence[str] | None = None,
    ) -> ImageFolder:
        """List the images under `root`. `classes` fixes the labels, as for a validation set."""
        root = Path(root)
        folders = _class_folders(root)
        known = tuple(classes) if classes is not None else tuple(f.name for f in folders)
        files: list[tuple[Path, int]] = []
        for folder in folders:
            if folder.name not in known:
                raise InputError(
                    f"{folder} is a class that train/ does not have. Remove it, or add images of "
                    f"{folder.name} to train/."
                )
            found = sorted(_images(folder))
            if not found:
                raise InputError(
                    f"class folder {folder} holds no images ({', '.join(ENDINGS[:4])}, ...). "
                    "Put some in, or remove the folder."
                )
            label = known.index(folder.name)
            files += [(path, label) for path in found]
        return cls(tuple(files), known, size, augment)

    def __len__(self) -> int:
        return len(self.files)

    def sample(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        path, label = self.files[index]
        return decode(path, self.size, rng if self.augment else None), label


@dataclass(frozen=True)
class Synthetic:
    """Random images that cost no decoding: for trials of speed. `shape` is (D,) H, W, C.

    >>> image, label = Synthetic(100, (32, 32, 3), classes=10).sample(7, np.random.default_rng())
    >>> image.shape, label
    ((32, 32, 3), 7)
    """

    count: int
    shape: tuple[int, ...] = (224, 224, 3)
    classes: int = 1000

    # A bank of images is drawn once and used in turns: drawing each anew costs more than a step.
    _BANK = 32

    def __post_init__(self) -> None:
        bank = np.random.default_rng(0).integers(0, 256, (self._BANK, *self.shape), np.uint8)
        object.__setattr__(self, "_bank", bank)

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        place = index % self._BANK
        return self._bank[place], place % self.classes  # type: ignore[attr-defined]


def decode(path: Path, size: int, rng: np.random.Generator | None) -> np.ndarray:
    """Read one image as uint8 H, W, C: a random crop drawn from `rng`, or the middle."""
    Image = _pillow()
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError("it is no file")  # Of a pipe, whoever opens it waits for the writer.
        with warnings.catch_warnings():
            # Of large images, of several transparent colours, of tags that nobody reads here.
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                box = middle_box(image.size) if rng is None else random_box(image.size, rng)
                box = _decode_smaller(image, box, size)
                image.load()
                rgb = _in_bytes(image).convert("RGB")
                out = rgb.resize((size, size), Image.Resampling.BILINEAR, box=box)
    except MemoryError:
        raise
    except Exception as error:  # Damaged files make Pillow raise anything.
        # Drop the path at the end of Pillow's message; ours begins with it.
        said = getattr(error, "strerror", None) or str(error)
        reason = said.split(" '")[0].split(": ")[0]
        fault = f"{path} is not a readable image ({reason})"
        raise InputError(printable(fault, keep="")) from None
    if rng is not None and rng.random() < 0.5:
        out = out.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(out)


def _in_bytes(image: Image) -> Image:
    """`image` with 8 bits a channel; Pillow itself cuts off what is deeper, to plain white."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    numbers = np.asarray(image)
    if image.mode == "F" or numbers.min() < 0 or numbers.max() >= 1 << 16:
        raise ValueError("its numbers are no shades of 8 or 16 bits")
    return _pillow().fromarray((numbers // 257).astype(np.uint8))  # type: ignore[no-any-return]


def middle_box(size: tuple[int, int], share: float = 0.875) -> tuple[float, float, float, float]:
    """The square in the middle, `share` of the shorter side wide: left, upper, right, lower.

    >>> middle_box((100, 80), share=0.5)
    (30.0, 20.0, 70.0, 60.0)
    """
    width, height = size
    side = min(width, height) * share
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


def random_box(
    size: tuple[int, int], rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """Draw a box of 8 to 100 % of the area, 3:4 to 4:3; the middle if ten draws do not fit."""
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, upper = rng.uniform(0, width - across), rng.uniform(0, height - down)
            return left, upper, left + across, upper + down
    return middle_box(size, share=1.0)


def _decode_smaller(
    image: Image, box: tuple[float, float, float, float], size: int
) -> tuple[float, float, float, float]:
    """Let a JPEG decode at a half, a quarter or an eighth where the crop stays larger than `size`.

    Returns the box in the coordinates of the decoded image.
    """
    width, height = image.size
    shrink = min(box[2] - box[0], box[3] - box[1]) / size
    if shrink < 2:
        return box
    image.draft("RGB", (math.ceil(width / shrink), math.ceil(height / shrink)))
    across, down = image.size[0] / width, image.size[1] / height
    left, upper, right, lower = box
    # Rounding must not push the box outside, which Pillow refuses.
    right, lower = min(right * across, image.size[0]), min(lower * down, image.size[1])
    return left * across, upper * down, right, lower


def check_folder(root: Path) -> None:
    """Refuse what is no folder in one line."""
    if not root.is_dir():
        what = f"{root} is no folder" if root.exists() else f"no such folder: {root}"
        raise InputError(f"{what}. It should hold train/ and val/, each with a folder per class.")


def _class_folders(root: Path) -> list[Path]:
    check_folder(root)
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise InputError(f"{root} holds no class folders. Put the images of each class into one.")
    return folders


def _images(folder: Path) -> Iterator[Path]:
    """The images under `folder`, also behind links; none that a dot hides, as macOS's `._1.jpg`."""

    def fail(error: OSError) -> NoReturn:
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error

    entered: set[str] = set()
    for place, inner, names in os.walk(folder, onerror=fail, followlinks=True):
        if os.path.realpath(place) in entered:  # A link that leads back.
            inner.clear()
            continue
        entered.add(os.path.realpath(place))
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                yield Path(place, name)


def _pillow():  # type: ignore[no-untyped-def]
    try:
        from PIL import Image
    except ImportError:
        raise missing("Pillow", "train") from None
    return Image
