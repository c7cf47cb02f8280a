"""How a tree of plain values is changed, and what is planted in it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

HARM = "nhwc_fuzz_harm"
"""The module that planted code imports. It does not exist; an attempt shows that the code ran."""

_PLACES = 100_000
"""A tree that has grown to so many places is changed no more."""

_CODE = f"__import__('{HARM}')"

TEXTS = (
    *(
        _CODE,
        f"x={_CODE}, y",
        f"{_CODE} #",
        f"start_dim=1 + 0*{_CODE}, end_dim",
        f'"), {_CODE}, ("',
    ),
    *(
        f"a\n    {_CODE}\n",
        f"x.{_CODE}",
        f"{{{_CODE}}}",
        f"[{_CODE} for x in [1]]",
        f"lambda: {_CODE}",
    ),
    *("os.system", "builtins.eval", "torch.load", "torch.hub.load", "__class__", "__reduce__"),
    *(
        "torch.set_default_dtype",
        "forward",
        "training",
        "self",
        "torch",
        "getattr",
        "class",
        "None",
    ),
    *(
        "\x1b[2J",
        "\x00",
        "\ud7ff\u202e",
        "a" * 20_000,
        "",
        ".",
        "..",
        "*x",
        "../../etc/passwd",
        "-1",
    ),
    *("1x3x8x8 float32", "99999999x99999999 float32", "9" * 5000, "(" * 900, "cuda", "meta", "nan"),
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    1 << 20,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    1 << 200,
)
VALUES: tuple[Any, ...] = (None, True, False, 0.5, -1.5, 1e308, [], {}, [[]], [None], {"": None})
TAGS = ("node", "tuple", "dict", "slice", "ellipsis", "float", "device", "dtype", "memory_format")


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in `tree` that can be written to: the list or mapping, and the index or key."""
    waiting = [tree]
    while waiting:
        here = waiting.pop()
        for key in list(here) if isinstance(here, dict) else range(len(here)):
            yield here, key
            if isinstance(here[key], (dict, list)):
                waiting.append(here[key])


def mutate(tree: Any, donor: Any, draw: random.Random) -> None:
    """Change one place of `tree`; `donor` is another such tree, whose parts may be taken."""
    found = list(places(tree))
    if not 0 < len(found) < _PLACES:
        return
    holder, key = draw.choice(found)
    value = holder[key]
    match draw.randrange(10):
        case 0:
            holder[key] = draw.choice(TEXTS)
        case 1:
            holder[key] = draw.choice(NUMBERS)
        case 2:
            holder[key] = json.loads(json.dumps(draw.choice(VALUES)))
        case 3:
            del holder[key]
        case 4 if isinstance(holder, list):
            holder.insert(draw.randrange(len(holder) + 1), json.loads(json.dumps(value)))
        case 5 if isinstance(holder, dict):
            holder[draw.choice((*TEXTS, *TAGS))] = holder.pop(key)
        case 6:
            parts = list(places(donor))
            other, place = draw.choice(parts) if parts else (tree, key)
            holder[key] = json.loads(json.dumps(other[place]))
        case 7:
            for _ in range(draw.choice((1, 3, 40, 150))):
                value = draw.choice(([value], {"tuple": [value]}, {draw.choice(TAGS): value}))
            holder[key] = value
        case 8 if isinstance(holder, list):
            draw.shuffle(holder)
        case 9 if isinstance(value, str) and value:
            place = draw.randrange(len(value))
            holder[key] = value[:place] + draw.choice(TEXTS) + value[place:]
        case _ if isinstance(value, (int, float)):
            holder[key] = draw.choice((value + 1, -value, value * 1000, float(value), str(value)))
        case _:
            holder[key] = [value] * draw.choice((2, 50))
