"""The order of images, the layout of batches, and what cannot be read."""

import multiprocessing
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from nhwc import Format, InputError, format_of
from nhwc._train import ImageFolder, Loader, Normalize, Synthetic, image_folders, loader

from .training_nets import LayoutCopies, image_set


class Numbers:
    """Images that carry their own number, and one random byte."""

    def __init__(self, count, shape=(4, 6, 3), bad=()):
        self.count, self.shape, self.bad = count, shape, bad

    def __len__(self):
        return self.count

    def sample(self, index, rng):
        if index in self.bad:
            raise InputError(f"number {index} cannot be read")
        image = np.full(self.shape, index, np.uint8)
        image[0, 0, 0] = rng.integers(256)
        return image, index


def labels(batches):
    return [batch.labels.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_channels_last_and_no_operator_changes_a_layout(tmp_path, workers):
    data = image_folders(image_set(tmp_path), batch_size=6, size=16, workers=workers)
    with LayoutCopies() as copies:
        batch = next(data.train.batches())
        pixels = Normalize()(batch.images)
    assert batch.images.shape == (6, 3, 16, 16)
    assert batch.images.dtype is torch.uint8
    assert format_of(batch.images) is format_of(pixels) is Format.CHANNELS_LAST
    assert copies.found == []


def test_the_count_of_layout_copies_can_fail():
    batch = next(Loader(Synthetic(8, (8, 8, 3)), 4).batches())
    with LayoutCopies() as copies:
        Normalize(channels_last=False)(batch.images)
    assert copies.found == ["aten._to_copy.default"]


def test_the_batch_is_the_memory_the_images_were_stacked_in():
    images = [np.random.default_rng(n).integers(0, 255, (5, 7, 3), np.uint8) for n in range(3)]
    batch = loader.stack([loader.Item(image, 0, ()) for image in images])
    assert batch.images.stride() == (105, 1, 21, 3)
    assert (batch.images.permute(0, 2, 3, 1).numpy() == np.stack(images)).all()


def test_volumes_come_as_channels_last_3d():
    batch = next(Loader(Synthetic(4, (3, 8, 8, 2)), 2).batches())
    assert batch.images.shape == (2, 2, 3, 8, 8)
    assert format_of(batch.images) is Format.CHANNELS_LAST_3D


def test_workers_change_nothing():
    seen = []
    for workers in (0, 1, 2):
        batches = Loader(Numbers(20), 4, seed=3, workers=workers).batches(epoch=1)
        seen.append(torch.stack([batch.images for batch in batches]))
    assert (seen[0] == seen[1]).all()
    assert (seen[0] == seen[2]).all()


@pytest.mark.parametrize("over", [0, 1])
def test_a_folder_too_deep_for_sockets_is_refused_where_workers_need_them(monkeypatch, over):
    source = Synthetic(8, (8, 8, 3))
    with tempfile.TemporaryDirectory() as folder:
        deep = Path(folder, "d" * (loader._LONGEST + over - len(f"{folder}/")))
        deep.mkdir()
        monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(deep))
        if over:
            with pytest.raises(InputError, match=r"too long for a socket.s\. Set TMPDIR"):
                Loader(source, 4, workers=1)
        else:
            batches = Loader(source, 4, workers=1)
            assert len(list(batches.batches())) == 2
            batches.close()
        assert len(list(Loader(source, 4).batches())) == 2


def test_seed_and_epoch_change_order_and_randomness():
    def images(seed, epoch):
        return torch.cat([b.images for b in Loader(Numbers(20), 4, seed=seed).batches(epoch)])

    assert (images(0, 0) == images(0, 0)).all()
    assert (images(0, 0) != images(1, 0)).any()
    assert (images(0, 0) != images(0, 1)).any()


def test_an_epoch_can_start_in_its_middle():
    whole = labels(Loader(Numbers(20), 4).batches(2))
    assert labels(Loader(Numbers(20), 4).batches(2, start=3)) == whole[3:]
    assert labels(Loader(Numbers(20), 4).batches(2, start=5)) == []


@pytest.mark.parametrize("train", [True, False])
def test_the_processes_shares_make_up_the_batch_of_one(monkeypatch, train):
    def share(rank, world):
        monkeypatch.setattr(loader, "rank_and_world", lambda: (rank, world))
        return labels(Loader(Numbers(22), 4, train=train, seed=5).batches())

    alone = share(0, 1)
    first, second = share(0, 2), share(1, 2)
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [sorted(a) for a in alone]


def test_training_leaves_out_a_last_partial_batch_and_evaluation_does_not():
    assert [len(batch) for batch in labels(Loader(Numbers(22), 4).batches())] == [4] * 5
    held_out = labels(Loader(Numbers(22), 4, train=False).batches())
    assert [label for batch in held_out for label in batch] == list(range(22))
    assert len(held_out) == len(Loader(Numbers(22), 4, train=False)) == 6


def test_an_epoch_can_be_cut_short():
    assert len(labels(Loader(Numbers(22), 4, max_batches=2).batches())) == 2


def test_an_unreadable_image_ends_the_run_with_its_name():
    with pytest.raises(InputError, match="number 7 cannot be read"):
        list(Loader(Numbers(20, bad={7}), 4, workers=1).batches())


def test_an_unreadable_image_is_passed_over_where_that_is_wanted():
    said = []
    batches = list(
        Loader(Numbers(20, bad={7, 8}), 4, skip_corrupt=True, on_skip=said.append).batches()
    )
    assert sorted(set(said)) == ["number 7 cannot be read", "number 8 cannot be read"]
    # Training needs full batches: another image takes the place.
    assert [len(batch.labels) for batch in batches] == [4] * 5
    assert not {7, 8} & {label for batch in labels(batches) for label in batch}


def test_evaluation_leaves_an_unreadable_image_out():
    bad = {0, 1, 2, 3, 9}
    batches = Loader(Numbers(12, bad=bad), 4, train=False, skip_corrupt=True).batches()
    assert labels(batches) == [[4, 5, 6, 7], [8, 10, 11]]


def test_where_nothing_can_be_read_the_loader_ends():
    bad = set(range(8))
    assert list(Loader(Numbers(8, bad=bad), 4, skip_corrupt=True).batches()) == []


@pytest.mark.parametrize(
    ("count", "batch_size", "world", "words"),
    [
        (10, 16, 1, "has 10 images, less than one batch of 16"),
        (10, 0, 1, "batch_size 0 is too small"),
        (90, 16, 3, "16 does not divide among 3 processes. Use 15 or 18"),
        (90, 1, 2, "1 does not divide among 2 processes. Use 2 or 4"),
    ],
)
def test_sizes_that_cannot_work(monkeypatch, count, batch_size, world, words):
    monkeypatch.setattr(loader, "rank_and_world", lambda: (0, world))
    with pytest.raises(InputError, match=words):
        Loader(Numbers(count), batch_size)


def test_a_real_folder_gives_the_same_with_and_without_workers(tmp_path):
    source = ImageFolder.find(image_set(tmp_path) / "train", size=12, augment=True)
    alone, helped = (
        torch.cat([b.images for b in Loader(source, 9, workers=workers).batches(4)])
        for workers in (0, 2)
    )
    assert (alone == helped).all()


class Given:
    """These images, which may be of any type and shape."""

    def __init__(self, *images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def sample(self, index, rng):
        return self.images[index], 0


def test_images_of_other_types_are_refused():
    images = [np.zeros((4, 4, 3), np.float32)] * 2
    with pytest.raises(InputError, match="images of float32, and images are uint8 here"):
        list(Loader(Given(*images), 2).batches())


def test_images_of_several_sizes_are_refused_or_passed_over():
    images = Given(*(np.zeros((size, 4, 3), np.uint8) for size in (4, 4, 5)))
    with pytest.raises(InputError, match=r"shape \(5, 4, 3\) cannot stand beside one of \(4, 4, 3"):
        list(Loader(images, 3, train=False).batches())
    told = []
    kept = Loader(images, 3, train=False, skip_corrupt=True, on_skip=told.append)
    assert (labels(kept.batches()), len(told)) == ([[0, 0]], 1)


def test_processes_that_meet_later_share_the_images_all_the_same(monkeypatch):
    made_before = Loader(Numbers(8), 4, train=False)
    monkeypatch.setattr(loader, "rank_and_world", lambda: (1, 2))
    assert labels(made_before.batches()) == [[1, 3], [5, 7]]
