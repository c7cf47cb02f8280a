"""A kernel that holds its weights several times must be clearly faster than one that does not."""

import pytest
import torch

from nhwc.formats import Format
from nhwc.plan.options import Option
from nhwc.plan.specs import Convolution, Layer, Linear
from nhwc.plan.weighing import without_waste

LAST, PLAIN = Format.CHANNELS_LAST, Format.CONTIGUOUS
TAIL = (False, False, None, torch.float32, "cpu")


def convolution(channels):
    weight, pairs = (channels, channels, 3, 3), ((1, 1),) * 3
    return Convolution((1, channels, 14, 14), weight, *pairs, 1, *TAIL)


LINEAR = Linear((1, 1024), (1024, 1024), *TAIL)


def kept(spec, **seconds):
    layouts = {"torch": (PLAIN, PLAIN), "elsewhere": (PLAIN, LAST)}
    names = {
        "f4": "nhwc winograd4x4",
        "f2": "nhwc winograd2x2",
        "direct": "nhwc direct",
        "ours": "nhwc",
        "elsewhere": "nhwc direct",
    }
    made = {
        name: Option(
            names.get(name, name),
            *(layouts.get(name, (LAST, LAST)) if spec is not LINEAR else (None, None)),
            s,
        )
        for name, s in seconds.items()
    }
    (found,) = without_waste({spec.key: (*made.values(),)}, [Layer(spec, None, ())]).values()
    return {name for name, option in made.items() if option in found}


@pytest.mark.parametrize(
    ("spec", "seconds", "expected"),
    [
        (convolution(256), {"f4": 1.0, "f2": 1.04, "direct": 3.0}, {"f2", "direct"}),
        (convolution(256), {"f4": 1.0, "f2": 1.04, "direct": 1.0}, {"direct"}),
        (convolution(256), {"f4": 1.0, "f2": 1.2, "direct": 3.0}, {"f4", "f2", "direct"}),
        (convolution(64), {"f4": 1.0, "f2": 1.0, "direct": 1.0}, {"f4", "f2", "direct"}),
        (convolution(256), {"f4": 1.0, "elsewhere": 1.0}, {"f4", "elsewhere"}),
        (convolution(256), {"f4": 1.0, "onednn": 1.0}, {"f4", "onednn"}),
        (LINEAR, {"torch": 1.04, "onednn": 1.0, "ours": 1.0}, {"torch", "ours"}),
        (LINEAR, {"torch": 1.5, "onednn": 1.0}, {"torch", "onednn"}),
    ],
)
def test_which_kernels_are_worth_their_memory(spec, seconds, expected):
    assert kept(spec, **seconds) == expected


def test_small_filters_of_a_large_model_come_from_memory_as_well(monkeypatch):
    monkeypatch.setattr("nhwc.plan.weighing._ALWAYS", 1 << 28)
    spec = convolution(64)
    seconds = {"nhwc winograd4x4": 165e-6, "nhwc winograd2x2": 184e-6, "nhwc direct": 424e-6}
    options = {spec.key: tuple(Option(name, LAST, LAST, s) for name, s in seconds.items())}
    layer = Layer(spec, None, ())
    assert without_waste(options, [layer] * 30) == options
    (found,) = without_waste(options, [layer] * 300).values()
    assert [option.kernel for option in found] == ["nhwc winograd2x2", "nhwc direct"]


def test_a_model_of_large_filters_holds_few_of_them_transformed(monkeypatch):
    monkeypatch.setattr("nhwc.plan.weighing._ALWAYS", 1 << 26)
    specs = [convolution(512), convolution(384), convolution(256)]
    seconds = {"nhwc winograd4x4": 1.0, "nhwc winograd2x2": 1.2, "nhwc direct": 3.0}
    options = {
        spec.key: tuple(Option(name, LAST, LAST, s) for name, s in seconds.items())
        for spec in specs
    }
    few = [Layer(spec, None, ()) for spec in specs]
    assert without_waste(options, few) == options
    found = without_waste(options, few * 10)
    # The smaller a filter, the more is saved for each number that is held.
    assert [len(found[spec.key]) for spec in specs] == [1, 2, 2]
    assert "nhwc winograd4x4" not in {option.kernel for some in found.values() for option in some}
