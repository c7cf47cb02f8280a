"""What torch's operators do with what they are given is what their schemas and results show."""

import operator
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc.operators.kinds import arithmetic_of, keeps_rank, may_be_view, writes_first

NOT_PYTHONS = {"record_stream", "retain_grad", "set_data"}
"""They change what hangs on a tensor, and no number in it."""


def schemas():
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        if space == "aten" and not name.startswith("_"):
            packet = getattr(torch.ops.aten, name.partition(".")[0])
            yield packet.__name__, getattr(packet, name.partition(".")[2] or "default")._schema


def test_names_say_what_schemas_say_of_writing():
    for name, schema in schemas():
        first = schema.arguments[0] if schema.arguments else None
        writes = first is not None and first.is_write and not first.kwarg_only
        assert writes_first(name) == (writes and name not in NOT_PYTHONS), name


def test_what_a_schema_marks_as_a_view_may_be_one():
    for name, schema in schemas():
        marked = [result.alias_info for result in schema.returns if result.alias_info]
        if marked and not any(alias.is_write for alias in marked):
            assert may_be_view(name), name


class Subclass(nn.Identity):
    pass


class Own(nn.Module):
    def forward(self, x):
        return x


def own(x):
    return x


def ones(*shape):
    return torch.ones(*shape or (3, 3))


CALLED = [
    *(operator.pos, own, F.dropout, torch.positive, torch.conj, torch.dequantize),
    *(torch.atleast_1d, torch.broadcast_tensors, torch.as_tensor, torch.asarray),
    *(torch.resolve_neg, torch.ops.aten.alias.default),
    *(Own(), Subclass(), nn.Identity(), nn.Dropout(), nn.Sequential()),
    torch.jit.script(nn.Identity()),
]


def _spoken(value):
    """The same in every process, as workers that share the tests must agree: no address."""
    return re.sub(r" (of type object )?at 0x[0-9a-f]+", "", str(value))


@pytest.mark.parametrize("called", CALLED, ids=_spoken)
def test_what_returns_what_it_is_given_may_be_a_view(called):
    x = ones()
    result = F.dropout(x, training=False) if called is F.dropout else module(called)(x)
    assert as_one(result).data_ptr() == x.data_ptr()
    assert may_be_view(called)


def module(called):
    return called.eval() if isinstance(called, nn.Module) else called


def as_one(result):
    return torch.as_tensor(result[0] if isinstance(result, (tuple, list)) else result)


@pytest.mark.parametrize(
    ("called", "run"),
    [
        (torch.cartesian_prod, torch.cartesian_prod),
        (torch.meshgrid, lambda x: torch.meshgrid(x, indexing="ij")),
        (torch.einsum, lambda x: torch.einsum("i->i", x)),
    ],
)
def test_what_is_made_of_views_may_be_one(called, run):
    x = ones(3)
    assert as_one(run(x)).data_ptr() == x.data_ptr()
    assert may_be_view(called)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("bool", torch.bool), ("byte", torch.uint8), ("char", torch.int8), ("int", torch.int32)),
        *(("short", torch.int16), ("long", torch.int64), ("half", torch.half)),
        *(("float", torch.float), ("double", torch.double), ("bfloat16", torch.bfloat16)),
        *(("cfloat", torch.cfloat), ("cdouble", torch.cdouble)),
        *((name, torch.float) for name in ("cpu", "adjoint", "numpy", "to_dense")),
    ],
)
def test_methods_that_return_what_is_so_already_may_be_views(name, kind):
    x = ones().to(kind)
    assert as_one(getattr(x, name)()).data_ptr() == x.data_ptr()
    assert may_be_view(name)


FRESH = [F.relu, F.interpolate, F.pad, torch.cat, operator.add, "clone", "BatchNorm2d"]


@pytest.mark.parametrize("called", [*FRESH, nn.Conv2d(1, 1, 1)], ids=_spoken)
def test_what_fills_memory_of_its_own_is_no_view(called):
    assert not may_be_view(called)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("clone", ()), ("softmax", (1,)), ("permute", (0, 2, 1)), ("transpose", (0, 1))],
)
def test_ranks_are_kept(name, arguments):
    assert keeps_rank(name)
    assert getattr(torch.ones(2, 3, 4), name)(*arguments).ndim == 3


def test_arithmetic_goes_by_all_its_names():
    for name in ("add", "sub", "mul", "truediv"):
        known = arithmetic_of(name)
        assert known is not None
        assert arithmetic_of(f"i{name}") == arithmetic_of(f"{known}_") == known
        assert getattr(operator, f"i{name}")(6.0, 3.0) == getattr(torch, known)(
            torch.tensor(6.0), 3.0
        )
