"""Why a trace stopped, in one line."""

from __future__ import annotations

from pathlib import Path

from torch import fx

from ..code.reached import OURS, TORCH


def explain(error: Exception) -> str:
    """Say in one line why tracing failed, and where in the user's code."""
    try:
        text = str(error).strip().splitlines()
    except fx.proxy.TraceError:
        text = ["of a traced value"]  # The error holds one, which will not be written.
    first = text[0] if text else ""
    for sign, plain in _PLAIN.items():
        if sign in first:
            first = plain
            break
    else:
        if not isinstance(error, fx.proxy.TraceError):
            first = f"{type(error).__name__}: {first}"
    where = _user_line(error)
    return f"{first} ({where})" if where else first


_PLAIN = {
    "does not support item assignment": "it assigns to elements of a traced value",
    "a tensortype": "it names a type by a class of torch's, which generated code cannot say",
    "module is not installed as a submodule": "it calls a module that is no registered part of it, "
    "as none in a plain list or dict is: nn.ModuleList and nn.ModuleDict register theirs",
    "cannot be interpreted as an integer": "it counts with a traced value",
    "must be real number, not": "it computes with a traced value in plain Python",
    "int() argument must be": "it makes a plain number of a traced value",
    "float() argument must be": "it makes a plain number of a traced value",
}


def _user_line(error: Exception) -> str:
    frame, found = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((TORCH, OURS, "<")):
            found = f"{Path(file).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found
