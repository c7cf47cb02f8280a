"""Where packed weights lie: side by side in large pages."""

from types import SimpleNamespace

import pytest
import torch

import nhwc
from nhwc.kernels import ConvSpec, conv2d_candidates
from nhwc.kernels.product.weights import pad_channels
from nhwc.kernels.tape import pages
from nhwc.kernels.tape.pages import PAGE, room, shared, side_by_side
from nhwc.plan import scene
from nhwc.plan.binding import Packed
from nhwc.plan.implementation import Implementation


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
    layers = [(torch.nn.Conv2d(16, 16, 1), torch.nn.ReLU()) for _ in range(3)]
    net = torch.nn.Sequential(*(layer for pair in layers for layer in pair)).eval()
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scene, "kernels_of_others", lambda *_: ())
        patch.setattr(pages.WeightShelf, "take", lambda self, n: asked.append(n) or torch.empty(n))
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


def filled(value, floats=5000):
    return room(floats).fill_(value)


def test_the_same_numbers_lie_there_once():
    with side_by_side() as shelf:
        first, other = shared(filled(1)), shared(filled(2))
        again = shared(filled(1))
        third = shared(filled(3))
        nans = shared(filled(float("nan"))), shared(filled(float("nan")))
    assert again is first
    assert [float(one[-1]) for one in (first, other, third)] == [1, 2, 3]
    # The room of what was packed twice is used for what comes next.
    assert third.data_ptr() - other.data_ptr() == other.data_ptr() - first.data_ptr()
    assert nans[0] is nans[1]
    assert len(shelf.pieces) == 4


def test_one_number_in_many_is_a_difference():
    with side_by_side():
        first, almost = filled(1, 1 << 16), filled(1, 1 << 16)
        almost[777] = 2
        assert shared(first) is first
        assert shared(almost) is almost
        assert almost[777] == 2


def test_what_was_not_taken_from_the_shelf_gives_no_room_back():
    with side_by_side():
        outside = torch.ones(5000)
        shared(outside)
        last = room(5000).zero_()
        assert shared(torch.ones(5000)) is outside
        assert room(5000).data_ptr() != last.data_ptr()


def test_shelves_of_one_model_have_their_pieces_in_common():
    with side_by_side() as shelf:
        first = shared(filled(1))
    with side_by_side([shelf]) as second:
        assert shared(filled(1)) is first
    del shelf
    with side_by_side([second]):
        assert shared(filled(1)) is first
    with side_by_side():
        assert shared(filled(1)) is not first


def test_weights_that_onednn_packed_alike_are_one():
    weight = torch.rand(64, 64, 3, 3)

    def packed(weight, padding, groups=1):
        pack = torch.ops.mkldnn._reorder_convolution_weight
        return pack(weight, [padding] * 2, [1, 1], [1, 1], groups, [1, 64 * groups, 9, 9])

    if not hasattr(torch.ops.mkldnn, "_get_mkldnn_serialized_md"):
        pytest.skip("this torch does not tell how oneDNN lays out weights")
    with side_by_side():
        first, other = shared(packed(weight, 1)), shared(packed(weight + 1, 1))
        assert shared(packed(weight, 1)) is first is not other


def test_what_others_packed_for_a_program_that_is_gone_is_found():
    layer, implementation = SimpleNamespace(node=object()), Implementation("other", None, None)
    packed, made = Packed(), []

    def make():
        made.append(shared(torch.ones(5000)))
        return made[0].sum

    with side_by_side() as gone:
        packed.of(layer, implementation, make)
    del gone
    with side_by_side() as shelf:
        packed.of(layer, implementation, make)
    with side_by_side([shelf]):
        assert shared(torch.ones(5000)) is made[0]
    assert len(made) == 1
