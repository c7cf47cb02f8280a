"""Models that take or keep sparse tensors: left as they are, answered rightly, refused in words."""

import pytest
import torch
from torch import nn

import nhwc

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

DENSE = torch.eye(4) * 3
SPARSE = {
    "coo": DENSE.to_sparse,
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
}
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


class Taken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, graph, x):
        return self.layer(graph.to_dense() @ x).relu()


class Kept(Taken):
    def __init__(self, graph):
        super().__init__()
        self.register_buffer("graph", graph)

    def forward(self, x):
        return super().forward(self.graph, x)


@pytest.mark.parametrize("name", SPARSE)
@torch.no_grad()
def test_taken(name):
    model, inputs = Taken().eval(), (SPARSE[name](), X)
    assert not nhwc.audit(model, *inputs).lost
    for fast in (nhwc.fuse(model), nhwc.optimize(model, *inputs)):
        torch.testing.assert_close(fast(*inputs), model(*inputs))
    torch.testing.assert_close(inputs[0].to_dense(), DENSE)


@pytest.mark.parametrize("name", SPARSE)
@torch.no_grad()
def test_kept(name):
    model = Kept(SPARSE[name]()).eval()
    assert not nhwc.audit(model, X).lost
    if name == "coo":
        torch.testing.assert_close(nhwc.optimize(model, X)(X), model(X))
        return
    # torch itself cannot copy it.
    with pytest.raises(nhwc.InputError, match="cannot copy"):
        nhwc.optimize(model, X)


@torch.no_grad()
def test_what_a_run_writes_into_a_sparse_buffer_is_put_back():
    class Counts(Kept):
        def forward(self, x):
            self.graph.add_(self.graph)
            return super().forward(x)

    model = Counts(SPARSE["coo"]()).eval()
    nhwc.audit(model, X)
    torch.testing.assert_close(model.graph.to_dense(), DENSE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@torch.no_grad()
def test_nested_tensors_take_the_graph(layout):
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU()).eval()
    nested = torch.nested.nested_tensor([X, X[:2]], layout=layout)
    for inputs, also in (((nested,), ()), ((X,), [nested])):
        with pytest.raises(nhwc.InputError, match="an example input is a nested tensor"):
            nhwc.optimize(model, *inputs, also=also)
    nhwc.audit(model, nested)
    found = nhwc.optimize(model, X)(nested)
    for one, expected in zip(found.unbind(), model(nested).unbind(), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@torch.no_grad()
def test_a_model_that_makes_a_nested_tensor_takes_the_graph(layout):
    class Ragged(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.layer = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)

        def forward(self, x):
            y = self.conv(x)
            rows = torch.nested.as_nested_tensor([y[0, 0, :2], y[0, 1, :3]], layout=layout)
            return self.layer(rows).to_padded_tensor(0.0)

    model, x = Ragged().eval(), torch.randn(1, 3, 10, 10)
    fast = nhwc.optimize(model, x)
    torch.testing.assert_close(fast(x), model(x))
