"""`convert_` in a real two-process run: the strides that torch's buckets want, 1x1 weights too."""

from pathlib import Path

import pytest
import torch

from .training_nets import torchrun

SCRIPT = Path(__file__).with_name("ddp_formats.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the two processes saw, case by case."""
    output = tmp_path_factory.mktemp("ddp") / "out"
    done = torchrun(SCRIPT, output)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(f"{output}.{rank}", weights_only=True) for rank in (0, 1)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("case", ["bucket-view", "copies", "bfloat16", "volumes"])
def test_gradients_keep_the_strides_of_converted_weights(results, case):
    for result in results[case]:
        assert result["warnings"] == []
        assert [n for n, (own, grad) in result["strides"].items() if own != grad] == []


def test_the_gradients_are_those_of_contiguous_weights(results):
    plain = results["contiguous"]
    for name, expected in plain[0]["gradients"].items():
        for result in (*results["bucket-view"], plain[1]):
            torch.testing.assert_close(result["gradients"][name], expected, rtol=1e-4, atol=1e-6)


def test_what_contiguous_leaves_of_1x1_weights_does_warn(results):
    """The report this is about: `.contiguous(channels_last)` does not restride a 1x1 weight."""
    said = results["naive"][0]["warnings"]
    assert any("Grad strides do not match" in warning for warning in said)
