"""Models of TorchScript as bytes, and back.

Whoever hands over such a model has been told by torch that it is deprecated; what nhwc does with it
does not say so again, which would be an error where warnings are errors.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def bytes_of_script(model: torch.jit.ScriptModule) -> bytes:
    """Return the archive that torch writes for this model.

    >>> from torch import nn
    >>> traced = torch.jit.trace_module(nn.ReLU(), {"forward": torch.ones(1)})
    >>> script_in(bytes_of_script(traced))(-torch.ones(1))
    tensor([0.])
    """
    file = io.BytesIO()
    with _told_already():
        torch.jit.save(model, file)
    return file.getvalue()


def script_in(archive: bytes) -> nn.Module:
    """Return the model in an archive of `bytes_of_script`, with weights of its own."""
    with _told_already():
        model: nn.Module = torch.jit.load(io.BytesIO(archive))
    return model


@contextmanager
def _told_already() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit", FutureWarning)
        warnings.filterwarnings("ignore", ".torch.jit", DeprecationWarning)
        yield
