"""What an engine is: a name, and how to make a model ready to be called."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Prepared = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and the arguments to call it with: the inputs in the layout the engine likes best."""


@dataclass(frozen=True)
class Engine:
    """A way to run a model. To add one: write a file like its neighbours, and list it.

    `prepare(model, inputs)` may do with the model what it likes: its process owns it. It is called
    with gradients off unless a training step is measured.
    """

    name: str
    label: str
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Prepared]
    ours: bool = False
    trains: bool = False
    autocasts: bool = False
    cuda: bool = True
    packages: tuple[str, ...] = ()
    extra: str = "engines"

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages it needs that are not installed."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)

    @property
    def version(self) -> str:
        """The version of the package that does the work, where that is not torch."""
        return importlib.metadata.version(self.packages[0]) if self.packages else ""

    def obstacle(self, *, train: bool, amp: bool, device: str) -> str:
        """Why it cannot run such a case here; empty where it can."""
        if self.missing:
            return f"not installed: pip install 'nhwc[{self.extra}]'"
        if train and not self.trains:
            return "inference only"
        if amp and not self.autocasts:
            return "does not follow torch.autocast"
        return "" if self.cuda or device == "cpu" else "runs on the CPU only"
