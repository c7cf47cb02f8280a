"""Code that asserts, in a file whose assertions pytest does not rewrite."""

import torch


def even(self, x):
    assert x.shape[2] % 2 == 0, "an odd height"
    return self.c(x)


def as_made_for(self, x):
    h, w = x.shape[2], x.shape[3]
    assert h == 6 and w == self.c.in_channels * 2, f"an image of {h}x{w}"  # noqa: PT018
    return self.c(x)


def few(self, x):
    assert 0 < x.size(2) <= 6
    return self.c(x)


def not_high(self, x):
    assert not x.shape[2] > 6, "too high"
    return self.c(x)


def of_floats(self, x):
    assert x.dtype == torch.float32 and x.shape[2:] == (6, 6)  # noqa: PT018
    return self.c(x)


def says_an_argument(self, x, mask=None):
    assert x.shape[2] == 6, "mask"
    return self.c(x)


def either(self, x):
    assert x.shape[2] == 6 or x.shape[3] == 6
    return self.c(x)


def branching(self, x):
    return self.c(x) if x.shape[2] == 6 else self.c(x) * 2


def of_values(self, x):
    assert x.sum() > -1e9
    return self.c(x)
