"""The reference of the API: which names stand on its page. Docstrings say the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A heading of the reference: dotted names of functions, and of classes with their members."""

    title: str
    words: str
    functions: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


_TRAINING = ("Recipe", "Data", "Loader", "Source", "Training", "Point")

GROUPS = (
    Group(
        "Formats",
        "In which memory format a tensor is, and how to change it.",
        ("nhwc.format_of", "nhwc.to_format", "nhwc.convert_", "nhwc.strict", "nhwc.show"),
        ("nhwc.Format", "nhwc.Drawing"),
    ),
    Group(
        "Audit",
        "Where a model loses its memory format, and what that costs.",
        ("nhwc.audit", "nhwc.testing.assert_keeps_format"),
        ("nhwc.Audit", "nhwc.Finding"),
    ),
    Group(
        "Optimize",
        "The same answers, faster.",
        ("nhwc.optimize", "nhwc.fuse", "nhwc.backend"),
        ("nhwc.optimized.Optimized", "nhwc._optimize.OptimizeReport"),
    ),
    Group("Models and files", "", ("nhwc.load_model", "nhwc.save", "nhwc.load")),
    Group("Bench", "", ("nhwc.bench",), ("nhwc._bench.Benchmark", "nhwc.Environment")),
    Group("Operators", "", ("nhwc.ops",), ("nhwc._ops.OperatorTable", "nhwc._ops.Operator")),
    Group(
        "Train",
        "",
        ("nhwc.train", "nhwc.training.image_folders", "nhwc.training.synthetic"),
        tuple(f"nhwc.training.{name}" for name in _TRAINING),
    ),
    Group("Notebooks", "", (), ("nhwc.notebook.Bar",)),
    Group(
        "Errors",
        "Everything that nhwc raises on purpose is one of these. A message says in one line what "
        "is wrong with its value, where, and what to do.",
        (),
        (
            "nhwc.NhwcError",
            "nhwc.InputError",
            "nhwc.ModelNotFound",
            "nhwc.ModelFailed",
            "nhwc.MissingPackage",
            "nhwc.FormatLost",
            "nhwc.VerificationError",
            "nhwc.ProcessLost",
            "nhwc.FileError",
        ),
    ),
)


def names() -> list[str]:
    """All dotted names of the reference."""
    return [name for group in GROUPS for name in (*group.functions, *group.classes)]


def api_page() -> str:
    """Write the page, whose entries Sphinx fills from the docstrings."""
    lines = ["# API reference", "", WORDS, ""]
    for group in GROUPS:
        lines += [f"## {group.title}", "", group.words, ""]
        lines += [_entry("autofunction", name) for name in group.functions]
        lines += [_entry("autoclass", name) for name in group.classes]
    return "\n".join(lines)


WORDS = """\
Verbs are functions, and what they return are frozen dataclasses: `to_dict()` and `to_json()` hold
all that a page shows. Examples run in the tests. Names that begin with an underscore are no part of
what stays the same between versions; classes of such a module are here because verbs return them.
"""


def _entry(directive: str, name: str) -> str:
    return f"```{{eval-rst}}\n.. {directive}:: {name}\n```\n"
