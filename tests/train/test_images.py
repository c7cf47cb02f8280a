"""Folders of images: valid ones, and every way in which one can be invalid."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from nhwc import InputError
from nhwc._train import ImageFolder, Synthetic, image_folders
from nhwc._train.images import decode, middle_box, random_box

from .training_nets import image_set


def test_labels_follow_the_names_of_the_folders(tmp_path):
    root = image_set(tmp_path)
    found = ImageFolder.find(root / "train", size=16)
    assert found.classes == ("blue", "green", "red")
    assert [label for _, label in found.files] == [0] * 12 + [1] * 12 + [2] * 12
    image, label = found.sample(30, np.random.default_rng(0))
    assert (image.shape, image.dtype, label) == ((16, 16, 3), np.uint8, 2)


def test_a_class_that_validation_lacks_keeps_the_labels_of_the_others(tmp_path):
    root = image_set(tmp_path)
    for image in (root / "val" / "blue").iterdir():
        image.unlink()
    (root / "val" / "blue").rmdir()
    held_out = ImageFolder.find(root / "val", classes=("blue", "green", "red"))
    assert {label for _, label in held_out.files} == {1, 2}


def test_other_files_and_what_is_hidden_do_not_count(tmp_path):
    root = image_set(tmp_path)
    (root / "train" / ".cache").mkdir()
    (root / "train" / "red" / ".thumbnails").mkdir()
    (root / "train" / "red" / ".thumbnails" / "0.png").write_text("no image")
    (root / "train" / "red" / "._0.png").write_text("what macOS knows of 0.png")
    (root / "train" / "notes.txt").write_text("no image")
    (root / "train" / "red" / "Thumbs.db").write_text("no image")
    (root / "train" / "red" / "0.png").rename(root / "train" / "red" / "0.PNG")
    found = ImageFolder.find(root / "train")
    assert found.classes == ("blue", "green", "red")
    assert len(found) == 36


def test_images_behind_a_link_count_once(tmp_path):
    root = image_set(tmp_path)
    red = root / "train" / "red"
    red.rename(tmp_path / "elsewhere")
    red.mkdir()
    (red / "part").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere" / "back").symlink_to(red, target_is_directory=True)
    assert len(ImageFolder.find(root / "train")) == 36


def test_a_folder_that_may_not_be_read_is_no_smaller_class(tmp_path, monkeypatch):
    root, list_folder = image_set(tmp_path), os.scandir
    (root / "train" / "red" / "part").mkdir()

    def refused(place):
        if Path(place).name == "part":
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return list_folder(place)

    monkeypatch.setattr("os.scandir", refused)
    with pytest.raises(InputError, match=r"cannot read .*red/part: Permission denied"):
        ImageFolder.find(root / "train")


def test_a_file_that_is_gone_is_named_with_the_systems_words(tmp_path):
    with pytest.raises(InputError, match=r"is not a readable image \(No such file or directory\)"):
        decode(tmp_path / "gone.png", 8, None)


def emptied(root):
    (root / "train" / "empty").mkdir()
    return root


def unknown_class(root):
    (root / "train" / "red").rename(root / "train" / "crimson")
    return root


def without_train(root):
    (root / "train").rename(root / "training")
    return root


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: root / "nowhere", "no such folder"),
        (lambda root: root / "train", "Pass .*: train/ and val/"),
        (without_train, r"has no folder train/ \(it holds training, val\)"),
        (emptied, "class folder .*empty holds no images"),
        (unknown_class, "red is a class that train/ does not have"),
    ],
)
def test_a_wrong_folder_is_named_with_what_to_do(tmp_path, spoil, words):
    with pytest.raises(InputError, match=words):
        image_folders(spoil(image_set(tmp_path)), batch_size=4)


@pytest.mark.parametrize("mode", ["L", "1", "P", "RGBA", "LA", "I;16", "CMYK"])
def test_every_kind_of_image_becomes_rgb(tmp_path, mode):
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    Image.new(mode, (30, 20)).save(path)
    assert decode(path, 8, None).shape == (8, 8, 3)


@pytest.mark.parametrize(
    "content", [b"", b"not an image at all", None], ids=["empty", "text", "truncated"]
)
def test_an_unreadable_image_is_named(tmp_path, content):
    path = tmp_path / "bad.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:900] if content is None else content)
    with pytest.raises(InputError, match=r"bad\.jpg is not a readable image \(\w"):
        decode(path, 16, None)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_no_image_and_is_not_waited_for(make, tmp_path):
    make(tmp_path / "a.jpg")
    with pytest.raises(InputError, match=r"a\.jpg is not a readable image \(it is no file\)"):
        decode(tmp_path / "a.jpg", 8, None)


def test_a_large_jpeg_is_decoded_smaller_to_the_same_picture(tmp_path):
    across = np.linspace(0, 255, 1200)[None, :, None]
    down = np.linspace(0, 255, 900)[:, None, None]
    pixels = np.broadcast_to(
        np.concatenate([across + 0 * down, down + 0 * across], 2), (900, 1200, 2)
    )
    pixels = np.concatenate([pixels, np.zeros((900, 1200, 1))], 2).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.jpg", quality=95)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for seed in range(5):
        pair = [
            decode(tmp_path / name, 32, np.random.default_rng(seed)).astype(int)
            for name in ("a.jpg", "a.png")
        ]
        assert np.abs(pair[0] - pair[1]).max() <= 4


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 99))
def test_crops_lie_inside_the_image(width, height, seed):
    for box in (
        random_box((width, height), np.random.default_rng(seed)),
        middle_box((width, height)),
    ):
        left, upper, right, lower = box
        assert 0 <= left < right <= width + 1e-6
        assert 0 <= upper < lower <= height + 1e-6


def test_augmentation_mirrors_and_moves_but_only_where_it_is_asked_for(tmp_path):
    root = image_set(tmp_path)
    augmented = ImageFolder.find(root / "train", size=16, augment=True)
    still = ImageFolder.find(root / "train", size=16)

    def image(source, seed):
        return source.sample(0, np.random.default_rng(seed))[0]

    assert (image(augmented, 1) == image(augmented, 1)).all()
    assert (image(augmented, 1) != image(augmented, 2)).any()
    assert (image(still, 1) == image(still, 2)).all()


def test_synthetic_images_differ_and_their_labels_cover_the_classes():
    source = Synthetic(64, (8, 8, 3), classes=4)
    drawn = [source.sample(index, np.random.default_rng(0)) for index in range(8)]
    assert [label for _, label in drawn] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (drawn[0][0] != drawn[1][0]).any()


def test_transparent_colours_of_a_palette_are_seen_without_a_warning(tmp_path):
    image = Image.new("RGB", (16, 16), (200, 100, 0)).convert("P")
    image.save(tmp_path / "plain.png")
    image.save(tmp_path / "transparent.png", transparency=bytes([0, 128, 255]))
    plain, transparent = (decode(tmp_path / f"{n}.png", 8, None) for n in ("plain", "transparent"))
    assert (transparent == plain).all()


def test_large_images_and_damaged_tags_are_read_without_a_warning(tmp_path, monkeypatch):
    path = tmp_path / "a.jpg"
    Image.new("RGB", (64, 64), (200, 100, 0)).save(path, exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3000)
    assert decode(path, 8, None).shape == (8, 8, 3)


@pytest.mark.parametrize("kind", [np.uint16, np.int32])
def test_deep_shades_keep_their_order(tmp_path, kind):
    ramp = np.linspace(0, 65535, 64).astype(kind).repeat(64).reshape(64, 64).T
    path = tmp_path / "deep.tif"
    Image.fromarray(np.ascontiguousarray(ramp)).save(path)
    shades = decode(path, 56, None)[28, :, 0].astype(int)
    assert (np.diff(shades) > 0).all()
    assert shades[0] < 20
    assert shades[-1] > 235


@pytest.mark.parametrize("numbers", [np.float32(0.5), np.int32(1 << 20), np.int32(-1)])
def test_numbers_that_are_no_shades_are_refused(tmp_path, numbers):
    path = tmp_path / "odd.tif"
    Image.fromarray(np.full((8, 8), numbers)).save(path)
    with pytest.raises(InputError, match="its numbers are no shades of 8 or 16 bits"):
        decode(path, 8, None)
