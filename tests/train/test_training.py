"""The public words of training in Python."""

import re
from pathlib import Path

import pytest
from torch import nn

import nhwc
from nhwc import InputError, training
from nhwc.training import Data, Loader, Recipe

PAGE = Path(__file__).parents[2] / "docs" / "train.md"


def test_the_page_trains_on_images_of_ones_own(capsys):
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(compile(code, "train.md", "exec"), {"__name__": "page"})
    precision = float(capsys.readouterr().out.split()[-1])
    assert precision > 90


def test_every_name_says_what_it_is_for():
    assert sorted(training.__all__) == list(training.__all__)
    assert all(getattr(training, name).__doc__ for name in training.__all__)


def test_data_without_names_of_labels_and_none_to_evaluate_on_trains():
    source = training.Synthetic(8, (8, 8, 3), 4)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    run = nhwc.train(net, Data(Loader(source, 4)), Recipe())
    assert (len(run.of("train")), run.of("val")) == (1, ())
    with pytest.raises(InputError, match="the model has 4 outputs and the data 5 classes"):
        nhwc.train(net, Data(Loader(source, 4), classes=tuple("abcde")), Recipe())
