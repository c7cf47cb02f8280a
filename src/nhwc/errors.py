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


def of_kind(value: object) -> str:
    """What a value is, with the article that its name takes.

    >>> of_kind("resnet50"), of_kind(50)
    ('a str', 'an int')
    """
    name = type(value).__name__
    return f"an {name}" if name.lstrip("_")[:1] in "AEIOaeio" else f"a {name}"


class NhwcError(Exception):
    """The root of the tree: catch this to catch them all.

    >>> import nhwc
    >>> try:
    ...     nhwc.load_model("resnet1")
    ... except nhwc.NhwcError as error:
    ...     print(type(error).__name__)
    ModelNotFound
    """


class InputError(NhwcError, ValueError):
    """An argument cannot be used.

    >>> import nhwc, torch
    >>> try:
    ...     nhwc.to_format(torch.rand(3), nhwc.Format.CHANNELS_LAST)
    ... except InputError as error:
    ...     print(error)
    a tensor of shape (3,) has 1 dimensions; channels_last needs 4. Add the missing dimension, ...
    """


class ModelNotFound(InputError):
    """No model goes by that name.

    >>> import nhwc
    >>> try:
    ...     nhwc.load_model("resnet1")
    ... except ModelNotFound as error:
    ...     print(error)
    no model named 'resnet1': torchvision has no 'resnet1'; did you mean resnet18, ...
    """


class ModelFailed(InputError):
    """The model itself raised while it ran; the cause is chained.

    >>> import nhwc, torch
    >>> try:
    ...     nhwc.audit(torch.nn.Conv2d(3, 8, 3), torch.rand(1, 4, 8, 8))
    ... except ModelFailed as error:
    ...     print(str(error)[:44], "|", type(error.__cause__).__name__)
    Conv2d raised RuntimeError on this input: Gi | RuntimeError
    """


class MissingPackage(NhwcError, ImportError):
    """An optional package is not installed; the message has the pip line.

    >>> print(missing("timm", "zoo"))
    timm is not installed: pip install 'nhwc[zoo]'.
    >>> isinstance(missing("timm", "zoo"), ImportError)
    True
    """


class FormatLost(NhwcError, RuntimeError):
    """An operator got channels last and returned another format.

    >>> import nhwc, torch
    >>> image = torch.rand(1, 3, 8, 8).to(memory_format=torch.channels_last)
    >>> try:
    ...     with nhwc.strict():
    ...         torch.nn.functional.instance_norm(image)
    ... except FormatLost as error:
    ...     print(error)
    torch.nn.functional.instance_norm lost channels last at ...
    """


class VerificationError(NhwcError, RuntimeError):
    """A rewritten model does not compute what the original computes.

    >>> import nhwc, torch
    >>> net = torch.nn.Conv2d(3, 8, 3).eval()
    >>> try:
    ...     fast = nhwc.optimize(net, torch.rand(1, 3, 8, 8))
    ... except VerificationError as error:  # it did not happen here
    ...     fast = net
    >>> fast.report.verification.passed
    True
    """


class ProcessLost(NhwcError, RuntimeError):
    """Another process of a distributed run is gone, and this one cannot go on alone.

    >>> try:
    ...     raise ProcessLost("process 1 of 2 is gone.")
    ... except RuntimeError as error:
    ...     print(error)
    process 1 of 2 is gone.
    """


class FileError(NhwcError, OSError):
    """A file is damaged, foreign, or written by a newer nhwc.

    >>> import nhwc, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "letter.nhwc")
    ...     _ = file.write_text("hello")
    ...     try:
    ...         nhwc.load(file)
    ...     except FileError as error:
    ...         print(error)
    /...letter.nhwc is no model saved by nhwc: it begins with 68 65 6c 6c 6f. Write one ...
    """


def advice_on(error: BaseException, otherwise: str) -> str:
    """What to do about the exception of a model or an operator that was given example inputs.

    >>> advice_on(TypeError("f() missing 1 required positional argument: 'y'"), "Look there.")
    'Give one input for each argument; on the command line --input once for each.'
    """
    if isinstance(error, TypeError) and "required positional argument" in str(error):
        return "Give one input for each argument; on the command line --input once for each."
    return otherwise


def missing(package: str, extra: str) -> MissingPackage:
    """The error for `package`, which comes with one of nhwc's extras.

    >>> str(missing("matplotlib", "plot"))
    "matplotlib is not installed: pip install 'nhwc[plot]'."
    """
    return MissingPackage(f"{package} is not installed: pip install 'nhwc[{extra}]'.")


_NO_MEMORY = (
    *("can't allocate memory", "annot allocate memory", "not enough memory", "out of memory"),
    *("bad_alloc", "can't start new thread"),
)
"""Phrases in RuntimeErrors of torch and Python about memory that they did not get."""

_NO_ADDRESSES = ("calculation overflowed", "multiplication overflow")
"""Phrases in torch's RuntimeErrors about a tensor for which no machine has addresses."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, which is no fault of a file or a model.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("bad_alloc"))
    (True, True)

    A tensor that stands for its shape alone never gets any, and says so:

    >>> is_out_of_memory(RuntimeError("Call mutable_data() to actually allocate memory."))
    False

    Errors of other kinds quote what stands in a file or a model:

    >>> is_out_of_memory(KeyError("out of memory"))
    False
    """
    told = isinstance(error, (RuntimeError, OSError)) and str(error)
    return isinstance(error, MemoryError) or any(words in (told or "") for words in _NO_MEMORY)


def is_too_large(error: BaseException) -> bool:
    """Whether an error says that no machine could hold a tensor, so that its sizes are at fault.

    >>> is_too_large(RuntimeError("numel: integer multiplication overflow"))
    True
    """
    return any(words in str(error) for words in _NO_ADDRESSES)
