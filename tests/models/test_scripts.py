"""What nhwc does with a scripted model repeats none of torch's warnings that it is deprecated."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from nhwc.models.scripts import bytes_of_script, script_in


@pytest.mark.parametrize("kind", [FutureWarning, DeprecationWarning])
def test_torchs_deprecation_is_not_repeated(kind, monkeypatch):
    def deprecated(function):
        def call(*args):
            warnings.warn(f"`torch.jit.{function.__name__}` is deprecated.", kind, stacklevel=2)
            return function(*args)

        return call

    scripted = torch.jit.script(nn.Conv2d(1, 1, 1))
    monkeypatch.setattr(torch.jit, "save", deprecated(torch.jit.save))
    monkeypatch.setattr(torch.jit, "load", deprecated(torch.jit.load))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = script_in(bytes_of_script(scripted))
    assert torch.equal(copied.weight, scripted.weight)
    assert copied.weight.data_ptr() != scripted.weight.data_ptr()
