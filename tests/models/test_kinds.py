"""What no function takes for an answer, and says so in one line."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.training import Recipe

NET, X = nn.Sequential(nn.Conv2d(3, 8, 3)).eval(), torch.rand(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("call", "flag"),
    [
        (lambda: nhwc.optimize(NET, X, exact="no"), "exact='no'"),
        (lambda: nhwc.optimize(NET, X, remeasure=None), "remeasure=None"),
        (lambda: nhwc.audit(NET, X, backward="yes"), "backward='yes'"),
        (lambda: nhwc.audit(NET, X, reorders=1), "reorders=1"),
        (lambda: nhwc.bench(NET, shape=(1, 3, 8, 8), train="no"), "train='no'"),
        (lambda: nhwc.backend(exact=3), "exact=3"),
        (lambda: Recipe(amp="bf16"), "amp='bf16'"),
    ],
)
def test_a_flag_is_true_or_false(call, flag):
    with pytest.raises(nhwc.InputError, match=f"^{flag} is neither True nor False.$"):
        call()


def test_no_model_is_loaded_where_nothing_is_computed(tmp_path):
    nhwc.save(NET, tmp_path / "net.nhwc")
    with pytest.raises(nhwc.InputError, match="device 'meta' is not usable here"):
        nhwc.load(tmp_path / "net.nhwc", device="meta")
