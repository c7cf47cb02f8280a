"""A base for modes that see each operator of torch."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """A dispatch mode whose first operator does not import Dynamo, which takes a second or two.

    Torch keeps Dynamo from compiling a mode by a decorator that imports it. Who has not imported
    it compiles nothing.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        plain = cls.__torch_dispatch__
        guarded = _disable_dynamo(plain)

        @functools.wraps(plain)
        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return (guarded if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

        cls.__torch_dispatch__ = dispatch  # type: ignore[assignment]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shall add its own decorator."""
        return False
