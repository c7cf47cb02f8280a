"""Where packed weights lie: side by side in large pages."""

import pytest
import torch

import nhwc
from nhwc.kernels import ConvSpec, conv2d_candidates
from nhwc.kernels.product.weights import pad_channels
from nhwc.kernels.tape import pages
from nhwc.kernels.tape.pages import PAGE, room, side_by_side
from nhwc.plan import scene


def span(tensor):
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_pieces_follow_one_another_from_a_page_on_and_do_not_overlap():
    with side_by_side():
        pieces = [room(floats) for floats in (5, 0, 16, 1000, 17)]
    begins, ends = zip(*(span(piece) for piece in pieces if len(piece)), strict=True)
    assert begins[0] % PAGE == 0
    assert all(begin % 64 == 0 for begin in begins)
    assert all(0 <= begin - end < 64 for begin, end in zip(begins[1:], ends[:-1], strict=True))
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    assert all(piece.eq(number).all() for number, piece in enumerate(pieces))


def test_what_is_larger_than_a_block_gets_its_own_and_the_rest_goes_on():
    block = 1 << 23
    with side_by_side():
        first, large, second, next_block = room(100), room(block), room(100), room(block - 100)
    assert second.data_ptr() - first.data_ptr() == 448
    assert large.data_ptr() % PAGE == next_block.data_ptr() % PAGE == 0
    assert len({t.untyped_storage().data_ptr() for t in (first, large, next_block)}) == 3


def test_it_ends_with_its_context_and_one_within_another_is_apart():
    with side_by_side():
        first = room(16)
        with side_by_side():
            other = room(16)
        second = room(16)
    outside = room(16)
    assert second.data_ptr() - first.data_ptr() == 64
    storages = {t.untyped_storage().data_ptr() for t in (first, other, outside)}
    assert len(storages) == 3


def test_a_plan_packs_side_by_side():
    net = torch.nn.Sequential(*(torch.nn.Conv2d(16, 16, 1) for _ in range(3))).eval()
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene, "kernels_of_others", lambda *_: ())
        patch.setattr(pages._Shelf, "take", lambda self, n: asked.append(n) or torch.empty(n))
        nhwc.optimize(net, torch.randn(1, 16, 8, 8), remeasure=True)
    assert asked.count(16 * 17) >= 3


def test_packed_weights_are_the_same_there():
    for spec in (
        ConvSpec(1, 20, 6, 6, 40, 3, 3, padding=(1, 1)),
        ConvSpec(1, 20, 6, 6, 40, 1, 1),
        ConvSpec(1, 64, 6, 6, 64, 3, 3, padding=(1, 1), groups=2),
    ):
        weight, bias = (
            torch.randn(spec.k, spec.c // spec.groups, spec.r, spec.s),
            torch.randn(spec.k),
        )
        for kernel in conv2d_candidates(spec):
            apart = kernel.pack(weight, bias)
            with side_by_side():
                room(1).fill_(float("nan"))
                together = kernel.pack(weight, bias)
            assert torch.equal(apart, together), kernel.name
    filters = torch.randn(9, 20)
    with side_by_side():
        assert torch.equal(pad_channels(filters, 20)[:, :20], filters)
        assert pad_channels(filters, 20)[:, 20:].eq(0).all()
