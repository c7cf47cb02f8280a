"""The public words of training in Python."""

import copy
import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import nhwc
from nhwc import InputError, training
from nhwc._train import load_checkpoint
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


NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Recipe(epochs=1.5), "epochs 1.5 is no whole number. Use 1 or more."),
        (lambda: Recipe(epochs="2"), "epochs '2' is no whole number. Use 1 or more."),
        (lambda: Recipe(accumulate=1.5), "accumulate 1.5 is no whole number. Use 1 or more."),
        (lambda: Recipe(seed=1 << 64), f"seed {1 << 64} is no whole number. Use 0 or more."),
        (lambda: Recipe(lr="0.1"), "lr '0.1' is no finite number. Give one."),
        (lambda: Recipe(clip="1"), "clip '1' is no finite number. Give one."),
        (lambda: Recipe(warmup_epochs=float("inf")), "warmup_epochs inf is no finite number."),
        (lambda: training.synthetic(-3), "batch_size -3 is too small. Use 1 or more."),
        (lambda: training.synthetic(4, classes=0), "classes 0 is too small. Use 1 or more."),
        (lambda: training.synthetic(4, 224), "shape 224 is of no images. Use (224, 224, 3), say."),
        (lambda: training.synthetic(4, (8, 8)), "shape (8, 8) is of no images."),
        (lambda: training.synthetic(4, seed=-1), "seed -1 is too small. Use 0 or more."),
        (lambda: training.image_folders(None, 4), "root None is no folder. Give the path of one."),
        (lambda: nhwc.train("resnet50", DATA), "cannot train a str: it is no torch.nn.Module."),
        (lambda: nhwc.train(NET, "folder"), "data is a str. Give a nhwc.training.Data."),
        (lambda: nhwc.train(NET, DATA, {}), "recipe is a dict. Give a nhwc.training.Recipe."),
        (lambda: nhwc.train(nn.LazyLinear(2), DATA), "has no shape yet: the module is lazy."),
        (
            lambda: nhwc.train(nn.Linear(2, 2, device="meta"), DATA),
            "the model or its input is on the meta device, where nothing is computed.",
        ),
    ],
)
def test_what_cannot_be_trained_is_told_in_one_line(make, says):
    with pytest.raises(InputError) as raised:
        make()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


DATA = training.synthetic(4, (8, 8, 3), classes=4, batches=2)


class Diverges(nn.Module):
    """Its loss is NaN from the third batch on, and so are its weights."""

    def __init__(self):
        super().__init__()
        self.net, self.batches = copy.deepcopy(NET), 0

    def forward(self, x):
        self.batches += 1
        return self.net(x) * (1 if self.batches < 3 else float("nan"))


def test_weights_that_are_lost_replace_no_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    data = training.synthetic(4, (8, 8, 3), classes=4, batches=6)
    with pytest.raises(nhwc.NhwcError, match="the loss is nan in epoch 0 after batch 3"):
        nhwc.train(Diverges(), data, checkpoint=path, checkpoint_every=1)
    kept = load_checkpoint(path)
    assert kept["batch"] == 2
    assert all(value.isfinite().all() for value in kept["state_dict"].values())


class Unreadable:
    def __len__(self):
        return 8

    def sample(self, index, rng):
        raise InputError(f"number {index} cannot be read")


def test_a_set_of_nothing_readable_is_no_training():
    data = Data(Loader(Unreadable(), 4, skip_corrupt=True))
    with pytest.raises(InputError, match="the train set has no readable image"):
        nhwc.train(copy.deepcopy(NET), data)


class Remembers(nn.Linear):
    """Its state has more than tensors."""

    def __init__(self, more):
        super().__init__(3 * 8 * 8, 4)
        self.more = more

    def forward(self, x):
        return super().forward(x.flatten(1))

    def get_extra_state(self):
        return {"more": self.more}

    def set_extra_state(self, state):
        self.more = state["more"]


def test_numbers_of_numpy_are_stored_as_plain_ones(tmp_path):
    path = tmp_path / "checkpoint.pt"
    nhwc.train(Remembers(np.float64(0.5)), DATA, checkpoint=path)
    assert load_checkpoint(path)["state_dict"]["_extra_state"] == {"more": 0.5}


def test_state_that_no_checkpoint_can_hold_is_told_when_it_is_saved(tmp_path):
    with pytest.raises(InputError, match="a checkpoint cannot hold the Recipe in the state"):
        nhwc.train(Remembers(Recipe()), DATA, checkpoint=tmp_path / "checkpoint.pt")
