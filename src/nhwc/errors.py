"""Everything nhwc raises on purpose.

    NhwcError
    ├── InputError            an argument cannot be used
    │   ├── ModelNotFound     no model goes by that name
    │   └── ModelFailed       the model itself raised while it ran
    ├── MissingPackage        an optional package is not installed
    ├── FormatLost            inside `strict()`: an operator dropped channels last
    ├── VerificationError     a rewritten model does not compute the same
    ├── ProcessLost           another process of a distributed run is gone
    └── FileError             a file is damaged, foreign, or from a newer nhwc

A message says what is wrong with its value, where, and what to do, in one line.
"""

from __future__ import annotations


class NhwcError(Exception):
    """The root of the tree: catch this to catch them all."""


class InputError(NhwcError, ValueError):
    """An argument cannot be used."""


class ModelNotFound(InputError):
    """No model goes by that name."""


class ModelFailed(InputError):
    """The model itself raised while it ran; the cause is chained."""


class MissingPackage(NhwcError, ImportError):
    """An optional package is not installed; the message has the pip line."""


class FormatLost(NhwcError, RuntimeError):
    """An operator got channels last and returned another format."""


class VerificationError(NhwcError, RuntimeError):
    """A rewritten model does not compute what the original computes."""


class ProcessLost(NhwcError, RuntimeError):
    """Another process of a distributed run is gone, and this one cannot go on alone."""


class FileError(NhwcError, OSError):
    """A file is damaged, foreign, or written by a newer nhwc."""


def missing(package: str, extra: str) -> MissingPackage:
    """The error for `package`, which comes with one of nhwc's extras.

    >>> str(missing("matplotlib", "plot"))
    "matplotlib is not installed: pip install 'nhwc[plot]'."
    """
    return MissingPackage(f"{package} is not installed: pip install 'nhwc[{extra}]'.")


_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "bad_alloc")
"""Phrases in torch's RuntimeErrors about memory that it did not get."""

_NO_ADDRESSES = ("calculation overflowed", "multiplication overflow")
"""Phrases in torch's RuntimeErrors about a tensor for which no machine has addresses."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, which is no fault of a file or a model.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("bad value"))
    (True, False)
    """
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


def is_too_large(error: BaseException) -> bool:
    """Whether an error says that no machine could hold a tensor, so that its sizes are at fault.

    >>> is_too_large(RuntimeError("numel: integer multiplication overflow"))
    True
    """
    return any(words in str(error) for words in _NO_ADDRESSES)
