"""What a picture shows lies where torch says that it lies; what has no strides is refused."""

import itertools
import json

import pytest
import torch

import nhwc
from nhwc.pictures import memory_of
from nhwc.pictures.memory import DRAWN
from nhwc.pictures.text import memory_text

LAST = torch.channels_last
IMAGES = torch.arange(240).reshape(2, 3, 5, 8)
TENSORS = {
    "contiguous": IMAGES,
    "channels last": IMAGES.to(memory_format=LAST),
    "clips": torch.arange(384).reshape(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
    "N1HW": IMAGES[:, :1].to(memory_format=LAST),
    "NC11": torch.arange(32).reshape(4, 8, 1, 1),
    "1x1x1": torch.arange(2).reshape(2, 1, 1, 1),
    "many channels": torch.arange(64).reshape(1, 64, 1, 1),
    "permuted": IMAGES.permute(0, 2, 3, 1),
    "a slice of channels": IMAGES.to(memory_format=LAST)[:, 1:],
    "a crop": IMAGES[:, :, 2:4, 3:],
    "expanded": torch.arange(3).reshape(1, 3, 1, 1).expand(2, 3, 4, 4),
    "windows": torch.arange(64).reshape(1, 1, 8, 8).unfold(2, 3, 1).unfold(3, 3, 1),
    "an image": IMAGES[0],
    "a matrix": torch.arange(30).reshape(5, 6).t(),
    "a long vector": torch.arange(1000),
    "a number": torch.tensor(7),
    "six dimensions": torch.arange(64).reshape(2, 2, 2, 2, 2, 2),
    "nothing": IMAGES[:0],
}
EACH = pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)


JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@EACH
def test_every_number_lies_in_the_place_that_is_drawn(tensor):
    memory = memory_of(tensor)
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    for cell in memory.cells:
        assert storage[cell.place] == tensor[cell.index]
    drawn = sorted(cell.number for cells in _places(memory).values() for cell in cells)
    assert drawn == list(range(len(memory.cells)))
    for place, cells in _places(memory).items():
        assert {cell.place for cell in cells} <= {place}
    shelves = [c for s in memory.shelves for p in s.panels for row in p.rows for c in row]
    assert shelves == list(memory.cells)


def _places(memory):
    return {run.place + i: cells for run in memory.runs for i, cells in enumerate(run.cells)}


@EACH
def test_a_hole_is_a_place_of_no_number(tensor):
    mine = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=bool)
    mine.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    holes = [place for place, cells in _places(memory_of(tensor)).items() if not cells]
    assert not any(mine[place] for place in holes)


@EACH
def test_a_corner_is_called_a_corner(tensor):
    memory = memory_of(tensor)
    assert len(memory.cells) <= DRAWN
    assert ("a corner" in memory_text(memory)) == (len(memory.cells) < tensor.numel())


def test_channels_are_drawn_first_and_further_images_last():
    assert memory_of(torch.empty(10, 3, 32, 32)).corner == (1, 3, 3, 4)
    assert memory_of(torch.empty(8, 3, 4, 32, 32)).corner == (1, 3, 2, 2, 3)
    assert memory_of(torch.empty(4, 8, 1, 1)).corner == (4, 8, 1, 1)
    assert memory_of(torch.empty(2, 5, 7, 3), "NHWC").corner == (1, 3, 4, 3)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (IMAGES, "Densest first: W, H, C, N."),
        (IMAGES.to(memory_format=LAST), "Densest first: C, W, H, N."),
        (TENSORS["N1HW"], "ambiguous: C is 1, so contiguous and channels_last are the same order."),
        (TENSORS["N1HW"], "Its strides are written as channels_last would write them."),
        (TENSORS["NC11"], "H and W are 1, so contiguous"),
        (TENSORS["NC11"], "Its strides are written as contiguous would write them."),
        (TENSORS["1x1x1"], "C, H and W are 1"),
        (TENSORS["1x1x1"], "as contiguous and as channels_last would write them"),
        (torch.empty(1, 1, 2, 2, 2), "contiguous and channels_last_3d are the same order"),
        (TENSORS["a slice of channels"], "160 numbers are spread over 239 places: it is not dense"),
        (TENSORS["expanded"], "All indices of N, H and W share the same places"),
        (TENSORS["windows"], "Its 324 numbers share 64 places"),
        (TENSORS["an image"], "With three dimensions torch knows no channels last"),
        (TENSORS["nothing"], "It holds no numbers"),
        (torch.empty(1, 3, 4, 4, device="meta"), "no memory stands behind it"),
    ],
)
def test_sentences(tensor, words):
    assert words in " ".join(memory_of(tensor).words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.eye(3).to_sparse(), r"layout torch.sparse_coo has no strides to draw. .*to_dense"),
        (JAGGED, "a nested tensor has no"),
        ([1, 2], "a list has no memory format"),
    ],
)
def test_what_has_no_strides_is_refused(given, words):
    with pytest.raises(nhwc.InputError, match=words):
        nhwc.show(given)


def test_what_stands_for_other_tensors_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(nhwc.InputError, match="this TwoTensor has no memory of its own"):
        nhwc.show(TwoTensor(IMAGES, IMAGES))
    with pytest.raises(nhwc.InputError, match="the one that went into torch"):
        torch.vmap(nhwc.show)(IMAGES)


def test_fake_tensors_are_drawn():
    from torch._subclasses import FakeTensorMode

    images = IMAGES.to(memory_format=LAST)
    fake = FakeTensorMode().from_tensor(images)
    assert memory_of(fake).cells == memory_of(images).cells


def test_a_terminal_has_colours_and_a_file_has_none(monkeypatch):
    drawing = nhwc.show(IMAGES)
    assert "\033" not in repr(drawing)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\033[30;48;5;" in repr(drawing)
    monkeypatch.setenv("TERM", "dumb")
    assert "\033" not in repr(drawing)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in repr(drawing)


@EACH
@pytest.mark.parametrize("columns", [40, 96])
def test_text_fits_the_terminal(tensor, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = memory_text(memory_of(tensor)).splitlines()
    # The line of strides is not broken.
    assert max(len(line) for line in lines if not line.startswith("strides")) <= columns


def test_what_was_drawn_is_still_written_as_json():
    memory = memory_of(IMAGES.to(memory_format=LAST))
    assert memory.runs
    assert json.loads(json.dumps(memory.to_dict())) == {
        "shape": [2, 3, 5, 8],
        "strides": [120, 1, 24, 3],
        "offset": 0,
        "places": 240,
        "item_bytes": 8,
        "dtype": "int64",
        "device": "cpu",
        "format": "channels_last",
        "names": ["N", "C", "H", "W"],
    }


def test_a_picture_reads_no_number():
    memory = memory_of(torch.empty(2**40, 3, 224, 224, device="meta"))
    assert list(itertools.islice((cell.place for cell in memory.cells), 3)) == [0, 1, 2]
