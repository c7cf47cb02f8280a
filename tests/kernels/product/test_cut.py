"""How rows are cut into tiles of the matrix product."""

import ctypes
from functools import partial

import pytest
import torch

from nhwc.kernels.language.compiler import Kernel
from nhwc.kernels.product.microkernel import even, largest, tiles_of


def _tell(e, a, thread, threads, *, cut):
    """Write the first row of each tile and of the one behind, and of each row its tile."""
    found = cut(e, a.rows)
    with e.range(0, tiles_of(e, a.rows) + 1) as tile:
        e.write(found.first(e, tile), a.firsts.integers() + tile)
    with e.range(0, a.rows) as row:
        first, count = found.around(e, row)
        e.write(first, a.around.integers() + row * 2)
        e.write(count, a.around.integers() + (row * 2 + 1))


KERNELS = {
    cut.__name__: Kernel(
        f"tell_{cut.__name__}", ("rows", "firsts", "around"), partial(_tell, cut=cut)
    )
    for cut in (even, largest)
}


def tiles(name, rows, most):
    """The first row and the length of each tile, as the kernel tells them."""
    firsts = torch.zeros(-(-rows // most) + 1, dtype=torch.int64)
    around = torch.zeros(rows, 2, dtype=torch.int64)
    args = (ctypes.c_int64 * 3)(rows, firsts.data_ptr(), around.data_ptr())
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    function(KERNELS[name].address)(ctypes.addressof(args), 0, 1, 0)
    lengths = firsts.diff().tolist()
    by_row = [
        [first, n] for first, n in zip(firsts.tolist(), lengths, strict=False) for _ in range(n)
    ]
    assert around.tolist() == by_row
    return lengths


@pytest.mark.parametrize("name", KERNELS)
def test_tiles_hold_every_row_once(isa, name):
    for rows in range(1, 5 * isa.rows):
        lengths = tiles(name, rows, isa.rows)
        assert sum(lengths) == rows
        assert 0 < min(lengths) <= max(lengths) <= isa.rows


def test_even_tiles_differ_by_one_row_at_most(isa):
    for rows in range(1, 9 * isa.rows):
        lengths = tiles("even", rows, isa.rows)
        assert max(lengths) - min(lengths) <= 1
