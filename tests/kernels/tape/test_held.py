"""No table that a kernel reads names what is not there: a defect elsewhere would be a crash."""

import pytest
import torch

from nhwc.errors import InputError
from nhwc.kernels.layers.attention import Lie, Mask, attention_step
from nhwc.kernels.layers.batched import Lying, batched_step
from nhwc.kernels.layers.elementwise import add_step, each_step
from nhwc.kernels.layers.gather import gather_step
from nhwc.kernels.layers.heads import Attended
from nhwc.kernels.layers.moving import move_step
from nhwc.kernels.layers.normalize import layer_norm_step, softmax_step
from nhwc.kernels.layers.unary import unary_step
from nhwc.kernels.layers.unit import unit_step
from nhwc.kernels.tape.steps import View

X = View(None, (2, 4, 3, 1), 8)
"""Six pixels of four numbers, with gaps of four between them: 44 numbers."""


def gathered(source=0, target=0):
    gather_step(X, X, torch.tensor([source]), torch.tensor([target]), 4)


def moved(row=0, column=0):
    move_step(X, X, torch.tensor([row]), torch.tensor([column]))


def multiplied(place=0, row=8, column=1, other=0, other_row=8):
    y = View(None, (1, 2, 3, 1), 2)
    lies = Lying(torch.tensor([place]), row, column), Lying(torch.tensor([other]), other_row, 1)
    batched_step(X, X, y, x_lies=lies[0], factors_lie=lies[1], inputs=4)


def attended(query=0, key=0, value=0, result=0, apart=4):
    lies = [Lie(torch.tensor([place] * 2), apart) for place in (query, key, value, result)]
    size = Attended(images=1, heads=2, queries=2, keys=2, depth=4, outputs=4)
    lies, last = (lies[0], lies[1], lies[2]), lies[3]
    attention_step(X, X, X, X, size=size, lies=lies, result=last, scale=1.0)


def masked(images=1, heads=2, queries=2, pixels=4, keys=2):
    size = Attended(images=1, heads=2, queries=2, keys=2, depth=4, outputs=4)
    lie = Lie(torch.tensor([0, 0]), 4)
    mask = Mask(View(None, (1, keys, pixels, 1), 8), images, heads, queries)
    attention_step(X, X, X, X, size=size, lies=(lie, lie, lie), result=lie, scale=1.0, masks=[mask])


TURNED = {"apart": -4, **dict.fromkeys(("query", "key", "value", "result"), 4)}
FITS = (
    *((gathered, {"source": place}) for place in (-1, 0, 40)),
    *((gathered, {"target": place}) for place in (0, 40)),
    *((moved, {"row": row}) for row in (-2, -1, 2)),
    *((multiplied, given) for given in ({"place": 24}, {"place": 20, "row": -8}, {"other": 18})),
    *((attended, given) for given in ({"query": 36}, TURNED, {"result": 36})),
)
OUTSIDE = (
    *((gathered, {"source": place}) for place in (-2, 41, 1 << 62, -(1 << 63))),
    *((gathered, {"target": place}) for place in (-1, 41)),
    *((moved, {"row": row}) for row in (-3, 3)),
    *((moved, {"column": column}) for column in (-3, 1)),
    *((multiplied, {"place": place}) for place in (-1, 25)),
    *((multiplied, given) for given in ({"row": -8}, {"column": 20}, {"other": 19})),
    *((multiplied, given) for given in ({"other_row": -1}, {"other_row": 15})),
    *((attended, {part: 37}) for part in ("query", "key", "value", "result")),
    *((attended, given) for given in ({"apart": -4}, {"value": -1}, {"apart": 41})),
)


@pytest.mark.parametrize(("make", "given"), FITS)
def test_what_is_there_may_be_named(make, given):
    make(**given)


@pytest.mark.parametrize(("make", "given"), OUTSIDE)
def test_a_table_that_names_what_is_not_there_is_refused(make, given):
    with pytest.raises(InputError, match="outside of"):
        make(**given)


PIXELWISE = (
    lambda x, y: add_step(x, x, y),
    lambda x, y: add_step(x, y, x),
    lambda x, y: each_step(x, y, x, kind="quotient"),
    layer_norm_step,
    softmax_step,
    unit_step,
    lambda x, y: unary_step(x, y, kind="exp"),
)


@pytest.mark.parametrize("make", PIXELWISE)
def test_views_of_other_pixels_or_fewer_channels_are_refused(make):
    make(X, X)
    for other in (View(None, (1, 4, 3, 1), 8), View(None, (2, 3, 3, 1), 8)):
        with pytest.raises(InputError, match="stands beside"):
            make(X, other)


def test_views_counted_otherwise_hold_the_same_numbers():
    dense = View(None, (2, 4, 3, 1), 4, offset=2)
    assert dense.as_images(1, 2, 3) == View(None, (1, 4, 2, 3), 4, offset=2)
    assert dense.as_numbers(6, 1, 4, 1) == View(None, (6, 1, 4, 1), 1, offset=2)
    refused = ((X, "as_images", (2, 2, 3)), (dense, "as_numbers", (6, 1, 3, 1)))
    for view, way, counted in (*refused, (X, "as_numbers", (6, 1, 4, 1))):
        with pytest.raises(InputError, match="stands beside"):
            getattr(view, way)(*counted)


@pytest.mark.parametrize("given", [{}, {"queries": 1, "pixels": 2}, {"heads": 1, "pixels": 2}])
def test_a_mask_may_serve_several(given):
    masked(**given)


@pytest.mark.parametrize(
    "given",
    [{"pixels": 3}, {"keys": 1}, {"heads": 3}, {"queries": 3}, {"images": 2}, {"images": 0}],
)
def test_a_mask_that_lacks_rows_is_refused(given):
    with pytest.raises(InputError, match="does not serve"):
        masked(**given)
