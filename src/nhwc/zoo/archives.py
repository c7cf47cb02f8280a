"""Recognize model files of other tools by their first bytes, without loading them.

TorchScript archives and exported programs hold code, and a pickle of torch's may do anything. To
load such a file is to trust it, so its owner has to do that, in a line of Python.
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..machine.disk import open_file


@dataclass(frozen=True)
class Kind:
    """A kind of file, and advice what to do with it, as parts of a sentence."""

    what: str
    todo: str
    is_known: bool


def kind_of(path: str | Path) -> Kind:
    """Say what kind of file `path` is, from its name and its bytes.

    >>> kind_of("model.onnx").what
    'an ONNX model'
    """
    path = Path(path)
    name = _kind_by_bytes(path) or _BY_ENDING.get(path.suffix.lower(), "")
    what, todo = _KINDS.get(name, ("no model saved by nhwc", _KINDS["pickle"][1]))
    return Kind(what, todo.format(path=path), is_known=bool(name))


def is_safetensors(path: str | Path) -> bool:
    """Whether the file begins as one of safetensors does: with the length of a JSON header."""
    return _kind_by_bytes(Path(path)) == "safetensors"


_BY_ENDING = {".onnx": "onnx", ".safetensors": "safetensors", ".pt2": "export"}

_YOURSELF = "load it in a function of yours, return {call}, and name that: yours.py:function"

_KINDS = {
    "script": (
        "a TorchScript archive, which holds code",
        _YOURSELF.replace("{call}", "torch.jit.load('{path}')"),
    ),
    "export": (
        "an exported program, which holds code",
        _YOURSELF.replace("{call}", "torch.export.load('{path}')"),
    ),
    "pickle": (
        "a file that torch.save wrote, with weights or a pickled model",
        "if it holds weights, name the model and pass --weights {path}",
    ),
    "safetensors": (
        "a file of weights (safetensors) without a model",
        "name the model and pass --weights {path}",
    ),
    "onnx": (
        "an ONNX model",
        "name the PyTorch model that it was exported from",
    ),
}


def _kind_by_bytes(path: Path) -> str:
    try:
        with open_file(path) as file:
            start = file.read(16)
        if start[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(path) as archive:
                return _kind_of_archive(archive.namelist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return ""
    # Before pickles: a header of 128 bytes begins as they do.
    if len(start) == 16 and start[8:9] == b"{" and struct.unpack("<Q", start[:8])[0] < 1 << 32:
        return "safetensors"
    return "pickle" if start[:1] == b"\x80" else ""


def _kind_of_archive(names: list[str]) -> str:
    inside = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inside:
        return "script"
    if any(name.startswith("models/") or name.endswith("exported_program.json") for name in inside):
        return "export"
    return "pickle" if "data.pkl" in inside else ""
