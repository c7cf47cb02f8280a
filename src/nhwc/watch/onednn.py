"""What oneDNN tells of a run: its primitives in order, with layouts and times.

With its profile on, oneDNN prints a line for each primitive when it is done. Versions differ in the
prefix, but agree in the order of what follows the word `exec`:

    onednn_verbose,v1,primitive,exec,cpu,reorder,jit:blk,undef,
        src:f32::blocked:abcd::f0 dst:f32::blocked:aBcd8b::f0,,,2x64x32x32,0.025

Letters name the dimensions, the densest last; a capital is cut into blocks, whose size stands at
the end. A reorder is printed like any other primitive, with what it copies from and to.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .calls import Call, CallSite

_LINE = re.compile(rb"(?:onednn|dnnl|mkldnn)_verbose,[^\n]*\n?")
_MARK = re.compile(rb"nhwc-call,(\d+)\n")
_TENSOR = re.compile(r"((?:diff_)?(?:src|wei|bia|dst)\d*)[:_][a-z0-9_]+:[a-z0-9]*:\w+:(\w*)")
_WEIGHTS = ("wei", "diff_wei")
_MADE = ("dst", "diff_src", "diff_wei")


_NOWHERE = CallSite("", "", "", 0, "")


@dataclass(frozen=True)
class Primitive:
    """One primitive that oneDNN ran, inside the operator call it belongs to."""

    kind: str
    """oneDNN's word: `convolution`, `reorder`, `matmul`, ..."""
    implementation: str
    layouts: tuple[tuple[str, str], ...]
    """The layout of each tensor, by oneDNN's names of both: ("src", "abcd")."""
    problem: str
    """The sizes, as oneDNN writes them; of a reorder 2x64x32x32."""
    seconds: float
    call: int | None = None
    """The call's place in the run; None for what no call of this thread ran."""
    operator: str = ""
    site: CallSite = _NOWHERE
    role: str = ""
    """Of a reorder, what it copies: `input`, `output` or `weight`."""

    @property
    def is_reorder(self) -> bool:
        return self.kind == "reorder"

    @property
    def source(self) -> str:
        """The layout that a reorder reads."""
        return dict(self.layouts).get("src", "")

    @property
    def target(self) -> str:
        """The layout that a reorder writes."""
        return dict(self.layouts).get("dst", "")

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of what a reorder copies; () for other primitives."""
        sizes = self.problem.split("x")
        return tuple(map(int, sizes)) if all(size.isdigit() for size in sizes) else ()

    @property
    def path(self) -> str:
        """From which layout to which, in the letters that oneDNN's documentation uses.

        >>> reorder = Primitive("reorder", "", (("src", "abcd"), ("dst", "aBcd8b")), "", 0.0)
        >>> reorder.path, replace(reorder, role="weight").path
        ('nchw -> nChw8c', 'oihw -> oIhw8i')
        """
        return f"{_lettered(self.source, self.role)} -> {_lettered(self.target, self.role)}"


_OF_IMAGES = {3: "ncw", 4: "nchw", 5: "ncdhw"}
_OF_WEIGHTS = {3: "oiw", 4: "oihw", 5: "goihw", 6: "goidhw"}


def _lettered(layout: str, role: str) -> str:
    rank = len({letter.lower() for letter in layout if letter.isalpha()})
    letters = (_OF_WEIGHTS if role == "weight" else _OF_IMAGES).get(rank)
    if letters is None:
        return layout or "any"
    upper = {chr(ord("A") + i): letter.upper() for i, letter in enumerate(letters)}
    lower = {chr(ord("a") + i): letter for i, letter in enumerate(letters)}
    return "".join((upper | lower).get(letter, letter) for letter in layout)


def mark_of(call: Call) -> str:
    """The line that ends the lines of `call`."""
    return f"nhwc-call,{call.index}"


def profiling() -> torch.backends.mkldnn.verbose:
    """A context in which oneDNN prints its profile."""
    return torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON)


def print_one() -> None:
    """Run the smallest reorder there is, which prints a line if the profile is on."""
    torch.zeros(1, 1, 1, 1).to_mkldnn()


def is_told(text: bytes) -> bool:
    return _LINE.search(text) is not None


def of_others(text: bytes, *, ours: bool) -> bytes:
    """What others printed: `text` without our marks and, if they are `ours`, oneDNN's lines."""
    text = _MARK.sub(b"", text)
    return _LINE.sub(b"", text) if ours else text


def primitives_of(text: bytes, calls: Sequence[Call]) -> list[Primitive]:
    """The primitives of a run in order, each with the call in which it ran.

    `calls` are those of the run, whose marks stand between the lines.
    """
    found: list[Primitive] = []
    since: list[Primitive] = []
    by_index = {call.index: call for call in calls}
    for line in text.splitlines(keepends=True):
        mark = _MARK.search(line)
        told = _LINE.search(line)
        if mark:
            call = by_index.get(int(mark[1]))
            found += since if call is None else _placed(since, call)
            since = []
        elif told and (primitive := _parsed(told[0].decode(errors="replace"))):
            since.append(primitive)
    return found + since


def _parsed(line: str) -> Primitive | None:
    """The primitive that a line tells of; None for other lines, and for those of a future oneDNN.

    >>> _parsed("dnnl_verbose,exec,cpu,reorder,simple:any,undef,"
    ...         "src_f32::blocked:abcd:f0 dst_f32::blocked:acdb:f0,,,1x3x8x8,0.5").layouts
    (('src', 'abcd'), ('dst', 'acdb'))
    """
    fields = line.strip().split(",")
    # Before it stand a version, a time stamp, the word `primitive`, or none of them.
    start = next((i for i, field in enumerate(fields[:6]) if field == "exec"), None)
    if start is None or len(fields) < start + 8:
        return None
    _, _, kind, implementation, _, tensors = fields[start : start + 6]
    try:
        seconds = float(fields[-1]) / 1e3
    except ValueError:
        return None
    return Primitive(kind, implementation, tuple(_TENSOR.findall(tensors)), fields[-2], seconds)


def _placed(primitives: list[Primitive], call: Call) -> list[Primitive]:
    """The primitives of one call, with its name and place, and what each reorder copies."""
    placed = []
    for i, primitive in enumerate(primitives):
        role = _role(primitives, i, call) if primitive.is_reorder else ""
        placed.append(
            replace(primitive, call=call.index, operator=call.operator, site=call.site, role=role)
        )
    return placed


def _role(primitives: list[Primitive], at: int, call: Call) -> str:
    reorder = primitives[at]
    before = [p for p in primitives[:at] if not p.is_reorder]
    after = [p for p in primitives[at + 1 :] if not p.is_reorder]
    if _is_weight(reorder, (before[-1:] + after[:1]), call):
        return "weight"
    made = [layout for name, layout in before[-1].layouts if name in _MADE] if before else []
    return "output" if before and (not after or reorder.source in made) else "input"


def _is_weight(reorder: Primitive, beside: list[Primitive], call: Call) -> bool:
    """Whether a reorder copies a weight, by its size, or by its layout where sizes are equal.

    A bias has one dimension, which no image has.
    """
    if len(reorder.shape) == 1:
        return True
    count = math.prod(reorder.shape)
    own = {math.prod(i.shape) for i in call.inputs if i.source is None}
    others = [i for i in call.inputs if i.source is not None] + list(call.outputs)
    if count not in own or count not in {math.prod(i.shape) for i in others}:
        return count in own
    layouts = [item for primitive in beside for item in primitive.layouts]
    images = {layout for name, layout in layouts if name not in _WEIGHTS}
    weights = {layout for name, layout in layouts if name in _WEIGHTS}
    return bool({reorder.source, reorder.target} & (weights - images))
