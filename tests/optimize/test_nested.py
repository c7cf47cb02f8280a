"""Inputs in lists, tuples and dicts: planned like those that are given one by one."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhwc

from ..optimizing import force


def image(size: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(seed))


class Sample(NamedTuple):
    image: Tensor
    scale: float = 2.0


class Takes(nn.Module):
    """A block on what a function finds in the arguments."""

    def __init__(self, finds: Callable[..., tuple[Tensor, Any]]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.finds = finds

    def forward(self, x):
        image, scale = self.finds(x)
        return self.norm(self.conv(image)).relu() * scale


class Pyramid(nn.Module):
    """Joins feature maps of several sizes, as necks of detectors do; decides by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(3))

    def forward(self, maps):
        found = [conv(x) for conv, x in zip(self.lateral, maps, strict=True)]
        for low in range(len(found) - 1, 0, -1):
            found[low - 1] = found[low - 1] + F.interpolate(found[low], scale_factor=2.0)
        return found


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, *images):
        return torch.cat([self.conv(one) for one in images])


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3)

    def forward(self, images):
        return self.conv(torch.cat(images, 1))


CASES = {
    "dict": (lambda: Takes(lambda x: (x["image"], x["scale"])), {"image": image(), "scale": 2.0}),
    "ordered": (
        lambda: Takes(lambda x: (x["image"], x["scale"])),
        OrderedDict(image=image(), scale=2.0),
    ),
    "a default": (lambda: Takes(lambda x: (x["image"], x.get("scale", 3.0))), {"image": image()}),
    "a tensor beside": (
        lambda: Takes(lambda x: (x["image"], x["scale"])),
        {"image": image(), "scale": torch.tensor(2.0), "unread": [image(4), None]},
    ),
    "tuple": (lambda: Takes(lambda x: (x[0], x[1])), (image(), 2.0)),
    "list": (lambda: Takes(lambda x: (x[-1], x[0])), [2.0, image()]),
    "named": (lambda: Takes(lambda x: (x.image, x.scale)), Sample(image())),
    "deep": (
        lambda: Takes(lambda x: (x["views"][1][0], len(x["views"]))),
        {"views": [(image(), 1), (image(8), 2)]},
    ),
    "pyramid": (Pyramid, [image(16), image(8), image(4)]),
    "stacked": (Stacked, [image(), image(seed=2)]),
}


def with_other_images(value: Any) -> Any:
    """The same structure around images of other sizes."""
    change = lambda x: torch.cat([x, x], -1) if isinstance(x, Tensor) and x.ndim == 4 else x
    return torch.utils._pytree.tree_map(change, value)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_plan_takes_them(name: str) -> None:
    make, given = CASES[name]
    model = make().eval()
    fast = force(model, given)
    assert [plan.reason for plan in fast.report.plans if not plan.part] == [""]
    assert fast.serves((given,))
    torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-4)
    others = with_other_images(given)
    assert not fast.serves((others,))
    torch.testing.assert_close(fast(others), model(others), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_holds_them_is_part_of_the_shapes() -> None:
    fast = force(Takes(lambda x: (x[0], x[1])).eval(), (image(), 2.0))
    assert not fast.serves(([image(), 2.0],))
    assert not fast.serves(((image(), 3.0),))
    assert not fast.serves((image(), 2.0))
    assert fast.examples == (("(1x3x16x16 float32, 2.0)",),)


@torch.no_grad()
def test_as_many_arguments_as_are_given() -> None:
    model, given = Several().eval(), (image(), image(seed=2))
    fast = force(model, *given)
    assert fast.serves(given)
    assert not fast.serves(given[:1])
    torch.testing.assert_close(fast(*given), model(*given), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast(given[0]), model(given[0]), rtol=1e-4, atol=1e-4)


def test_gradients_of_what_lies_inside_take_the_graph() -> None:
    given = {"image": image().requires_grad_(), "scale": 2.0}
    fast = force(Takes(lambda x: (x["image"], x["scale"])).eval(), {**given, "image": image()})
    with pytest.warns(UserWarning, match="gradients are wanted"):
        fast(given).sum().backward()
    assert given["image"].grad is not None


class Keeps(nn.Module):
    """Returns what it was given; or changes it."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.conv, self.changes = nn.Conv2d(3, 8, 3), changes

    def forward(self, x):
        made = self.conv(x["image"])
        if self.changes:
            x["made"] = made
        return made, x


@pytest.mark.parametrize("changes", [False, True])
@torch.no_grad()
def test_who_hands_on_what_holds_them_stays_as_it_is(changes: bool) -> None:
    model = Keeps(changes).eval()
    fast, given, other = force(model, {"image": image()}), {"image": image()}, {"image": image()}
    (made, held), (expected, _) = fast(given), model(other)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    assert held is given
    assert list(given) == list(other)


@pytest.mark.parametrize("name", [name for name in CASES if name != "named"])
@torch.no_grad()
def test_a_file_is_planned_for_them(name: str, tmp_path: Any) -> None:
    make, given = CASES[name]
    model = make().eval()
    nhwc.save(force(model, given), tmp_path / "model.nhwc")
    fast = nhwc.load(tmp_path / "model.nhwc")
    assert fast.serves((given,))
    torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-4)


class Sizes(nn.Module):
    """Decides by sizes, so that it has a graph for known sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x, times):
        y = self.conv(x["image"])
        if y.shape[-1] > 5:
            y = y * x["scale"]
        for number in range(y.shape[2]):
            y = y + number
        return y * times


@torch.no_grad()
def test_a_file_for_known_sizes_refuses_others_inside_too(tmp_path: Any) -> None:
    model, given = Sizes().eval(), {"image": image(), "scale": 2.0}
    fast = force(model, given, 3)
    assert fast.serves((given, 3))
    nhwc.save(fast, tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    torch.testing.assert_close(loaded(given, 3), model(given, 3), rtol=1e-4, atol=1e-4)
    for other in ({**given, "image": image(12)}, {**given, "scale": 2}):
        torch.testing.assert_close(fast(other, 3), model(other, 3), rtol=1e-4, atol=1e-4)
        with pytest.raises(nhwc.InputError, match="this model was saved for"):
            loaded(other, 3)
    with pytest.raises(nhwc.InputError, match="saved for 3 in the place of 4"):
        loaded(given, 4)


def test_what_a_file_refuses_is_named_without_its_numbers(tmp_path: Any) -> None:
    """A state in the place of None was printed with all numbers of its tensors."""
    scale = lambda state: 1 if state is None else sum(one.mean() for one in state)
    taken = Takes(lambda x: (x["image"], scale(x["state"]))).eval()
    for given, other, said in [
        (None, (image(), image()), "saved for None in the place of a tuple: "),
        (
            (image(), image()),
            image(),
            "saved for 2 inputs in a list, tuple or dict, not a Tensor: ",
        ),
        (
            image(),
            (image(), image()),
            r"saved for an input of \[.*\] and torch.float32, not a tuple: ",
        ),
    ]:
        nhwc.save(force(taken, {"image": image(), "state": given}), tmp_path / "model.nhwc")
        with pytest.raises(nhwc.InputError, match=said) as raised:
            nhwc.load(tmp_path / "model.nhwc")({"image": image(), "state": other})
        assert "\n" not in str(raised.value)


def test_tensors_in_objects_are_refused_in_one_line() -> None:
    with pytest.raises(nhwc.InputError, match="the example's tensors lie in a UserDict; kernels"):
        nhwc.optimize(Takes(lambda x: (x["image"], 1)).eval(), UserDict(image=image()))


class Adds(nn.Module):
    """Goes through a list, so that it has a graph for lists of one length alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, images):
        return self.conv(sum(image for image in images))


@torch.no_grad()
def test_a_file_for_a_list_refuses_a_longer_one(tmp_path: Any) -> None:
    model, images = Adds().eval(), [image(), image(seed=2), image(seed=3)]
    nhwc.save(force(model, images[:2]), tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    torch.testing.assert_close(loaded(images[:2]), model(images[:2]), rtol=1e-4, atol=1e-4)
    with pytest.raises(nhwc.InputError, match="saved for 2 inputs in a list, tuple or dict, not 3"):
        loaded(images)


class Joins(nn.Module):
    """Goes through a dict or its names, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3)

    def forward(self, views):
        return self.conv(torch.cat([*views.values()], 1))


class JoinsNames(Joins):
    def forward(self, **views):
        return super().forward(views)


class AddsNames(Adds):
    def forward(self, **views):
        return super().forward(views.values())


VIEWS = {"left": image(), "above": image(seed=2)}
TURNED = dict(reversed(VIEWS.items()))


@torch.no_grad()
def test_a_file_for_a_dict_refuses_another_order(tmp_path: Any) -> None:
    model = Joins().eval()
    fast = force(model, VIEWS)
    assert fast.serves((VIEWS,))
    torch.testing.assert_close(fast(TURNED), model(TURNED), rtol=1e-4, atol=1e-4)
    nhwc.save(fast, tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    assert loaded.serves((VIEWS,))
    torch.testing.assert_close(loaded(VIEWS), model(VIEWS), rtol=1e-4, atol=1e-4)
    for other in (TURNED, {"left": image()}, [*VIEWS.values()]):
        with pytest.raises(nhwc.InputError, match=r"a dict of \['left', 'above'\], in this order"):
            loaded(other)


@torch.no_grad()
def test_a_file_for_a_dict_takes_any_order_where_keys_are_read(tmp_path: Any) -> None:
    class Reads(Joins):
        def forward(self, views):
            return self.conv(torch.cat([views["above"], views["left"]], 1))

    model = Reads().eval()
    nhwc.save(force(model, VIEWS), tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    for given in (VIEWS, TURNED):
        torch.testing.assert_close(loaded(given), model(given), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_model_that_refuses_another_order_is_saved_for_this_one(tmp_path: Any) -> None:
    class Asks(Joins):
        def forward(self, views):
            if next(iter(views)) != "left":
                raise ValueError("left comes first")
            return super().forward(views)

    ordered = OrderedDict(VIEWS)
    model = Asks().eval()
    nhwc.save(force(model, ordered), tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    torch.testing.assert_close(loaded(ordered), model(ordered), rtol=1e-4, atol=1e-4)
    with pytest.raises(nhwc.InputError, match=r"\['left', 'above'\], in this order"):
        loaded(OrderedDict(TURNED))


@torch.no_grad()
def test_names_are_saved_if_their_order_is_no_matter(tmp_path: Any) -> None:
    model = AddsNames().eval()
    nhwc.save(force(model, kwargs=VIEWS), tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    for given in (VIEWS, TURNED):
        torch.testing.assert_close(loaded(**given), model(**given), rtol=1e-4, atol=1e-4)
    with pytest.raises(nhwc.InputError, match="depends on the order in which it is given"):
        nhwc.save(force(JoinsNames().eval(), kwargs=VIEWS), tmp_path / "joins.nhwc")


@torch.no_grad()
def test_constants_of_torchs_are_known_by_their_value(tmp_path: Any) -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x, dtype):
            return self.conv(x).to(dtype)

    model = Casts().eval()
    fast = force(model, image(), torch.float64)
    assert fast.serves((image(), torch.float64))
    assert not fast.serves((image(), torch.float16))
    assert fast(image(), torch.float16).dtype is torch.float16
    nhwc.save(fast, tmp_path / "model.nhwc")
    assert nhwc.load(tmp_path / "model.nhwc")(image(), torch.float64).dtype is torch.float64
