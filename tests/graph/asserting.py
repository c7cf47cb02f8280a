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


def raising(self, x):
    if x.shape[1] != 3 or x.shape[2] > 6:
        raise ValueError("not as high")
    return self.c(x)


def raising_odd(self, x):
    h, w = x.shape[-2:]
    if h % 2 or w % 2:
        fitting = h + 1 if h % 2 else h
        raise RuntimeError(f"not {h}, but {fitting}")
    return self.c(x)


def raising_else(self, x):
    if x.shape[2] == 6:
        y = self.c(x)
    else:
        raise NotImplementedError
    return y


def raising_in_a_loop(self, x):
    for length in x.shape[2], x.shape[3]:
        if length != 6:
            raise TypeError([str(one) for one in range(length)])
    return self.c(x)


class TooHigh(ValueError):
    pass


def raising_its_own(self, x):
    if x.shape[2] > 6:
        raise TooHigh("too high")
    return self.c(x)


def raising_and_counting(self, x):
    if x.shape[2] > 6:
        self.high = True
        raise ValueError("too high")
    return self.c(x)


def raising_at_times(self, x):
    if x.shape[2] > 6:
        if x.shape[3] > 6:
            raise ValueError("too high")
        return self.c(x) * 2
    return self.c(x)


def either(self, x):
    assert x.shape[2] == 6 or x.shape[3] == 6
    return self.c(x)


def branching(self, x):
    return self.c(x) if x.shape[2] == 6 else self.c(x) * 2


def of_values(self, x):
    assert x.sum() > -1e9
    return self.c(x)
