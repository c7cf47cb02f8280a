"""fold_constants: what is computed of weights keeps the type that the code gives it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nhwc

from ..optimizing import won_by


class _Code(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.code = code
        self.layer = nn.Conv2d(3, 4, 1)
        self.weight = nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        self.pairs = nn.Parameter(torch.rand(4, 8, 5, 2))
        self.matrix = nn.Parameter(torch.rand(4, 4))
        self.register_buffer("places", torch.arange(8))
        self.register_buffer("scale", torch.rand(4) + 0.5)
        self.register_buffer("filters", torch.rand(4, 1, 3, 3))

    def forward(self, x):
        return self.code(self, self.layer(x))


def _filtered(m, y):
    return torch.fft.irfft2(torch.fft.rfft2(y.float()) * torch.view_as_complex(m.pairs.float()))


def _like_the_places(m, y):
    return y + torch.zeros_like(m.weight, dtype=m.weight.dtype).add(m.places)


def _filtered_by_what_is_cast(m, y):
    return F.conv2d(y.float(), m.filters.flip(2, 3).float(), groups=4)


def _cast_beside_what_is_not(m, y):
    twice = m.filters[:, 0, :1, :1] * 2
    return F.conv2d((y - twice).float(), twice.float()[:, None], groups=4)


def _of_a_table_unpacked(m, y):
    _, mean, *_, other = m.filters
    return y - mean[..., :1, :1] * other.sum()


KEPT = {
    "cast by the code": lambda m, y: y.float() * (m.weight.float() * 2),
    "of whole numbers": lambda m, y: y + torch.sin(m.places / 10),
    "complex": _filtered,
    "made by the code": lambda m, y: y + torch.linspace(0, 1, 8),
    "of a norm": lambda m, y: F.group_norm(y.float(), 2, m.matrix[0].float()).to(y.dtype),
    "of a layer": lambda m, y: F.conv2d(y.float(), m.matrix.float()[..., None, None]),
    "of a product": lambda m, y: y.permute(0, 2, 3, 1).float() @ m.matrix.float(),
    "of a buffer that the code casts": lambda m, y: y.float() * m.scale.float().view(4, 1, 1),
    "cast by the code, and used as it is": _cast_beside_what_is_not,
    "cast by the code, of a buffer": _filtered_by_what_is_cast,
    "wider than the weights": lambda m, y: y.double() - m.weight.double().exp(),
}
CAST = {
    "of weights": lambda m, y: y * m.weight.exp(),
    "in the type of weights": lambda m, y: y + m.places.to(m.weight.dtype),
    "in the type of zeros": _like_the_places,
    "of a view of a buffer": lambda m, y: y - m.scale.view(1, 4, 1, 1),
    "of a part of a buffer": lambda m, y: y * m.filters.chunk(2, -1)[0].amax((2, 3))[..., None],
    "of a table unpacked": _of_a_table_unpacked,
    "of the greatest": lambda m, y: y * m.filters.max(3)[0][..., :1],
    "of buffers": lambda m, y: y * (m.scale * 2 / m.filters.sum((1, 2, 3)))[:, None, None],
    "of a layer with a buffer": lambda m, y: F.conv2d(y, m.filters.flip(2, 3), groups=4),
}


def _loaded(graph):
    file = io.BytesIO()
    pickle.dump(graph, file)
    file.seek(0)
    return pickle.load(file)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", [*KEPT, *CAST])
@torch.no_grad()
def test_a_cast_of_the_result_is_the_result_of_the_cast(what, kind):
    torch.manual_seed(0)
    model, x = _Code((KEPT | CAST)[what]).eval(), torch.randn(1, 3, 8, 8)
    fused = nhwc.fuse(model)
    truth = copy.deepcopy(model).to(kind)(x.to(kind))
    for graph in (fused, copy.deepcopy(fused), won_by("graph", model, x)):
        found = graph.to(kind)(x.to(kind))
        torch.testing.assert_close(found, truth, rtol=0.02, atol=0.04)


@torch.no_grad()
def test_the_type_is_kept_in_a_pickle_and_in_a_file(tmp_path):
    class Filtered(nn.Module):
        def __init__(self):
            super().__init__()
            self.pairs = nn.Parameter(torch.rand(3, 8, 5, 2))

        def forward(self, x):
            return torch.fft.irfft2(torch.fft.rfft2(x) * torch.view_as_complex(self.pairs))

    model, x = Filtered().eval(), torch.randn(1, 3, 8, 8)
    nhwc.save(won_by("graph", model, x), tmp_path / "filtered.nhwc")
    truth = copy.deepcopy(model).to(torch.float64)(x.double())
    for other in (_loaded(nhwc.fuse(model)), nhwc.load(tmp_path / "filtered.nhwc")):
        torch.testing.assert_close(other.to(torch.float64)(x.double()), truth, rtol=1e-5, atol=1e-5)


class _Unregistered(nn.Module):
    """Its grid is neither a parameter nor a buffer: no cast of the model reaches it."""

    def __init__(self):
        super().__init__()
        self.conv, self.grid = nn.Conv2d(3, 4, 1), torch.rand(1, 4, 8, 8)

    def forward(self, x):
        return self.conv(x) + self.grid


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
@torch.no_grad()
def test_an_attribute_that_no_cast_of_the_model_reaches_is_reached_by_none_of_the_graph(kind):
    model, x = _Unregistered().eval(), torch.randn(1, 3, 8, 8, dtype=kind)
    truth = copy.deepcopy(model).to(kind)(x)
    for graph in (nhwc.fuse(model), won_by("graph", model, x.float())):
        torch.testing.assert_close(graph.to(kind)(x), truth, rtol=0.02, atol=0.04)
    assert [*vars(model)] == [*vars(_Unregistered())]
