"""A field has one name and one meaning in all kernels: those that docs/kernels.md explains."""

import importlib
import pkgutil
import re
from pathlib import Path

import nhwc.kernels
from nhwc.kernels.convolutions.conv import all_kernels
from nhwc.kernels.convolutions.depthwise import tiled_depthwise
from nhwc.kernels.convolutions.expanded import expanded_depthwise
from nhwc.kernels.convolutions.projected import projected_depthwise
from nhwc.kernels.language.compiler import Kernel

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def every_kernel():
    yield from all_kernels()
    yield from (make(3, 1, 4) for make in (tiled_depthwise, expanded_depthwise))
    yield projected_depthwise(3, 1, 4)
    for module in pkgutil.walk_packages(nhwc.kernels.__path__, "nhwc.kernels."):
        for held in vars(importlib.import_module(module.name)).values():
            every = held.values() if isinstance(held, dict) else (held,)
            yield from (one for one in every if isinstance(one, Kernel))


def test_a_name_is_one_kernels():
    every = {id(kernel): kernel.name for kernel in every_kernel()}
    assert len(every) == len({*every.values()})


def test_the_page_explains_each_field_once():
    table = PAGE.read_text().partition("## Fields")[2]
    rows = re.findall(r"^\| (`.+?) \|", table, flags=re.MULTILINE)
    explained = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(explained) == len(set(explained))
    used = {field for kernel in every_kernel() for field in kernel.fields}
    assert used == set(explained)


def test_a_distance_between_pixels_belongs_to_what_lies_so_far_apart():
    for kernel in every_kernel():
        distances = [field for field in kernel.fields if field.endswith("_pixel")]
        assert {field.removesuffix("_pixel") for field in distances} <= set(kernel.fields)
