"""Numbers that are not ordinary, and whether two results have the same ones in the same places."""

import math

import torch

SPECIAL = (math.nan, math.inf, -math.inf, 1e30, -1e30, 1e-40, -0.0)


def planted(tensor, value):
    """`tensor` with `value` in its first channel somewhere inside, and in the last at a corner."""
    changed = tensor.clone()
    middle = tuple(size // 2 for size in tensor.shape[2:])
    changed[(0, 0, *middle)] = value
    changed[(0, -1, *(0 for _ in middle))] = value
    return changed


def assert_same(found, expected, gelu=False):
    """NaN and infinities in the same places, each other number as near as its own size allows.

    With AVX-512 torch's own GELU of an infinity is NaN or not, by how the tensor lies: with `gelu`
    the one stands for the other.
    """
    assert torch.equal(found.isfinite(), expected.isfinite())
    if not gelu:
        assert torch.equal(found.isnan(), expected.isnan())
        infinite = expected.isinf()
        assert torch.equal(found[infinite], expected[infinite])
    some = expected.isfinite()
    torch.testing.assert_close(found[some], expected[some], rtol=1e-4, atol=1e-4)
