"""nms and roi_align in plain torch, against their definitions in plain Python."""

import math

import pytest
import torch
from torch import Tensor

from nhwc.models.vision import import_torchvision, nms, roi_align


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def boxes_of(count: int, seed: int = 0) -> Tensor:
    low = drawn(count, 2, seed=seed) * 10
    return torch.cat((low, low + drawn(count, 2, seed=seed + 1) * 6), 1)


def greedy(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """Boxes one by one, best first, each against all that were kept."""
    kept: list[int] = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i].item()):
        if all(overlap(boxes[i].tolist(), boxes[j].tolist()) <= threshold for j in kept):
            kept.append(i)
    return kept


def overlap(a: list[float], b: list[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 0.7])
@pytest.mark.parametrize("count", [0, 1, 2, 120])
def test_nms_is_the_greedy_choice(count, threshold):
    boxes, scores = boxes_of(count), drawn(count, seed=2)
    assert nms(boxes, scores, threshold).tolist() == greedy(boxes, scores, threshold)


def test_nms_undoes_what_a_suppressed_box_would_have_suppressed():
    chain = torch.tensor([[0.0, 0, 4, 4], [2, 0, 6, 4], [4, 0, 8, 4], [6, 0, 10, 4]])
    assert nms(chain, torch.tensor([0.9, 0.8, 0.7, 0.6]), 0.3).tolist() == [0, 2]


def sample(plane: list[list[float]], y: float, x: float) -> float:
    height, width = len(plane), len(plane[0])
    if not (-1 <= y <= height and -1 <= x <= width):
        return 0.0
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    low, right = min(top + 1, height - 1), min(left + 1, width - 1)
    upper = plane[top][left] * (1 - x + left) + plane[top][right] * (x - left)
    lower = plane[low][left] * (1 - x + left) + plane[low][right] * (x - left)
    return upper * (1 - y + top) + lower * (y - top)


def by_definition(image: Tensor, rois: Tensor, scale: float, size: int, ratio: int, aligned: bool):
    """Each cell of each box is the mean of its samples."""
    result = image.new_zeros(len(rois), image.shape[1], size, size)
    for k, (place, *box) in enumerate(rois.tolist()):
        x, y, right, bottom = (value * scale - 0.5 * aligned for value in box)
        wide, high = right - x, bottom - y
        if not aligned:
            wide, high = max(wide, 1.0), max(high, 1.0)
        wide, high = wide / size, high / size
        across, down = (ratio, ratio) if ratio > 0 else (math.ceil(wide), math.ceil(high))
        for c, plane in enumerate(image[int(place)].tolist()):
            for i in range(size):
                for j in range(size):
                    values = [
                        sample(plane, y + (i + (n + 0.5) / down) * high,
                               x + (j + (m + 0.5) / across) * wide)
                        for n in range(down) for m in range(across)
                    ]  # fmt: skip
                    result[k, c, i, j] = sum(values) / max(len(values), 1)
    return result


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [2, 0])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_roi_align_is_the_mean_of_its_samples(scale, ratio, aligned):
    image = drawn(2, 3, 9, 7)
    # Boxes within, across each border, wholly outside, and without any area.
    more = torch.tensor([[-9.0, -9, 3, 3], [5, 4, 40, 30], [-30, -30, -20, -20], [3, 3, 3, 3]])
    boxes = torch.cat((boxes_of(9), more.double()))
    rois = torch.cat((torch.arange(len(boxes))[:, None] % 2, boxes), 1)
    found = roi_align(image, rois, scale, 3, 3, ratio, aligned)
    expected = by_definition(image, rois, scale, 3, ratio, aligned)
    torch.testing.assert_close(found, expected)
    assert expected.any(1).any(1).any(1).sum() > 5


def test_roi_align_without_boxes_and_on_one_pixel():
    assert roi_align(drawn(1, 2, 4, 4), drawn(0, 5), 1.0, 2, 2, 2, False).shape == (0, 2, 2, 2)
    pixel = torch.full((1, 1, 1, 1), 5.0)
    roi = torch.tensor([[0.0, 0, 0, 1, 1]])
    assert roi_align(pixel, roi, 1.0, 2, 2, 2, False).unique().tolist() == [5.0]


def test_gradients_reach_the_image():
    image = drawn(1, 1, 5, 5).requires_grad_()
    rois = torch.tensor([[0.0, 0.7, 1.1, 3.9, 4.2]], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: roi_align(x, rois, 1.0, 2, 2, 2, True), image)


def test_torchvision_calls_them():
    ops = import_torchvision().ops
    boxes, scores = boxes_of(50), drawn(50, seed=2)
    assert ops.nms(boxes, scores, 0.2).tolist() == greedy(boxes, scores, 0.2)
    image = drawn(1, 2, 8, 8)
    found = ops.roi_align(image, [boxes[:3]], (2, 2), sampling_ratio=2)
    rois = torch.cat((boxes.new_zeros(3, 1), boxes[:3]), 1)
    torch.testing.assert_close(found, by_definition(image, rois, 1.0, 2, 2, False))


def test_torchscript_compiles_code_that_calls_them():
    """effdet does so when it is imported."""
    nms_of_theirs = import_torchvision().ops.nms
    boxes, scores = boxes_of(50), drawn(50, seed=2)
    scripted = torch.jit.script(nms_of_theirs)
    assert scripted(boxes, scores, 0.2).tolist() == greedy(boxes, scores, 0.2)
