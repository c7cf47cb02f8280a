"""What oneDNN reordered inside its kernels, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from .._audit.reorders import Inside, Reorders, seconds_of
from ..watch.onednn import Primitive
from .text import milliseconds, paint, shape, wrap


def reorders_text(reorders: Reorders, *, color: bool = False) -> list[str]:
    """Render both runs side by side, then every reorder of an image, like with like."""
    both = (reorders.contiguous, reorders.channels_last)
    rows = [
        ("", "contiguous", "channels last"),
        ("images reordered", *(_sum(inside.images) for inside in both)),
        ("weights reordered", *(_sum(inside.weights) for inside in both)),
        ("layers computed", *(_sum(inside.others) for inside in both)),
    ]
    lines = [paint("inside oneDNN, by its own clock", "bold", color)]
    lines += [f"    {what:<18}{plain:>18}{last:>18}" for what, plain, last in rows]
    for name, inside in zip(("contiguous", "channels last"), both, strict=True):
        lines += _images(name, inside, color)
    return lines


def _sum(primitives: Sequence[Primitive]) -> str:
    return f"{len(primitives)} in {milliseconds(seconds_of(primitives))}" if primitives else "none"


def _images(name: str, inside: Inside, color: bool) -> list[str]:
    groups: dict[tuple[str, str, str], list[Primitive]] = {}
    for reorder in inside.images:
        key = (reorder.role or "tensor", reorder.path, shape(reorder.shape))
        groups.setdefault(key, []).append(reorder)
    lines = [paint(f"images reordered in the {name} run", "bold", color)] if groups else []
    for (role, path, sizes), members in sorted(groups.items(), key=lambda g: -seconds_of(g[1])):
        places = list(dict.fromkeys(p.site.module or p.site.place for p in members))
        rest = f" and {len(places) - 1} more" if len(places) > 1 else ""
        times = f" x{len(members)}" if len(members) > 1 else ""
        text = f"{milliseconds(seconds_of(members)):>8}  {role} {sizes} {path}{times}"
        lines.append(wrap(f"{text}  in {places[0]}{rest}", "    ", "              "))
    return lines
