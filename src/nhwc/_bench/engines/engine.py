"""An engine: a name, and functions that make a model ready to be called."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

Prepared = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and the arguments to call it with: the inputs in the layout the engine likes best."""


@dataclass(frozen=True)
class Folding:
    """How many batch norms were folded away, and how many were left."""

    folded: int
    left: int


@dataclass(frozen=True)
class Engine:
    """A way to run a model. To add one: write a file like its neighbours, and list it.

    `prepare(model, inputs)` may do with the model what it likes: its process owns it. It is called
    with gradients off unless a training step is measured. An engine that reads files of its own
    has `convert(model, inputs, folder)` write them, in another process and under a time limit; its
    `prepare` is given the folder instead of the model.
    """

    name: str
    label: str
    prepare: Callable[[Any, tuple[Tensor, ...]], Prepared]
    convert: Callable[[nn.Module, tuple[Tensor, ...], Path], None] | None = None
    ours: bool = False
    trains: bool = False
    autocasts: bool = False
    cuda: bool = True
    beyond: str = ""
    """The engine that it goes one step beyond: their ratio is what this step alone gains."""

    step: str = ""
    """That step, in a word or two."""

    folding: Callable[[Any], Folding] | None = None
    """Tells of the function that `prepare` returned what was folded in it."""

    typical_setup_s: float = 0.3
    """What setting it up takes for a usual model, to forecast how long a suite takes."""

    packages: tuple[str, ...] = ()
    """The packages it imports; the first one does the work."""

    requirements: tuple[str, ...] = ()
    """The names of these packages for pip, where they differ from the import names."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages it needs that are not installed."""
        return tuple(name for name in self.packages if importlib.util.find_spec(name) is None)

    @property
    def pip(self) -> str:
        """The command that installs its packages."""
        return f"pip install {shlex.join(self.requirements or self.packages)}"

    @property
    def not_installed(self) -> str:
        return f"not installed: {self.pip}"

    @property
    def version(self) -> str:
        """The version of the package that does the work; empty where that is torch."""
        if not self.packages:
            return ""
        found = importlib.metadata.packages_distributions().get(self.packages[0])
        return importlib.metadata.version(found[0]) if found else ""

    def obstacle(self, *, train: bool, amp: bool, device: str) -> str:
        """Say why the engine cannot run such a case here; an empty string if it can."""
        if self.missing:
            return self.not_installed
        if train and not self.trains:
            return "inference only"
        if amp and not self.autocasts:
            return "does not follow torch.autocast"
        return "" if self.cuda or device == "cpu" else "runs on the CPU only"
