"""A model is left as it was found, whatever its own code writes."""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import Tensor, nn

import nhwc
from nhwc.models.preserve import place_of, preserved, undrawn


class Writes(nn.Module):
    """Clips its weights, renews an embedding's, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rows = nn.Conv2d(3, 8, 3), nn.Embedding(4, 8, max_norm=0.1)
        self.seen, self.last = [0], deque([1], maxlen=3)
        self.count = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.conv.weight.clamp_(-0.01, 0.01)
        self.seen.append(1)
        self.last.append(2)
        self.count.calls += 1
        return self.conv(x) + self.rows(torch.tensor([1, 2])).sum(0)[:, None, None]


@pytest.mark.parametrize("verb", [nhwc.audit, nhwc.optimize])
def test_what_a_forward_writes_is_put_back(verb: object) -> None:
    model = Writes().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    verb(model, torch.randn(1, 3, 8, 8))  # type: ignore[operator]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert model.seen == [0]
    assert list(model.last) == [1]
    assert model.count.calls == 0


class Kept(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.weight.grad = torch.ones(2, 2)
        self.by_name = {"a": 1, "b": 2}
        self.nested = {"seen": [[]], "last": ([torch.zeros(2)],)}
        self.count, self.draws = SimpleNamespace(calls=[0]), random.Random(0)
        self.table, self.bytes = numpy.zeros(2), bytearray(2)
        self.add = partial(list.append, [])

    def facts(self) -> list[object]:
        grad = self.weight.grad
        assert grad is not None
        nested = repr(self.nested)
        names = [*self.by_name.items()]
        held = repr((self.count, self.draws.getstate(), self.table, self.bytes, self.add))
        return [self.weight.requires_grad, place_of(grad), grad.tolist(), names, nested, held]


CHANGES: dict[str, Callable[[Kept], object]] = {
    "a weight is frozen": lambda net: net.weight.requires_grad_(False),
    "a gradient is written": lambda net: net.weight.grad.zero_(),  # type: ignore[union-attr]
    "a gradient is elsewhere": lambda net: setattr(net.weight.grad, "data", torch.ones(2, 2)),
    "a list in a list in a dict grows": lambda net: net.nested["seen"][0].append(1),
    "a list in a dict grows": lambda net: net.nested["seen"].append(1),
    "a list in a tuple is another": lambda net: net.nested["last"][0].clear(),
    "a tensor in a list is written": lambda net: net.nested["last"][0][0].add_(1),
    "a namespace gets an attribute": lambda net: setattr(net.count, "last", 1),
    "a list in a namespace grows": lambda net: net.count.calls.append(1),
    "an argument of a partial grows": lambda net: net.add(1),
    "a generator is asked": lambda net: net.draws.random(),
    "an array is written": lambda net: net.table.fill(1),
    "bytes are written": lambda net: net.bytes.extend(b"a"),
    "a dict has another order": lambda net: net.by_name.update(a=net.by_name.pop("a")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_code_changes_is_put_back(change: Callable[[Kept], object]) -> None:
    net = Kept()
    before = net.facts()
    with preserved(net):
        change(net)
        assert net.facts() != before
    assert net.facts() == before


def test_audits_in_several_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    found: list[int] = []

    def look() -> None:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        found.append(len(nhwc.audit(net, torch.randn(1, 3, 8, 8)).calls))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({*found}) == 1
    assert "KINETO_LOG_LEVEL" not in os.environ


class Holds(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


WEIGHTS = {
    "strided": lambda: torch.eye(3),
    "coordinates": lambda: torch.eye(3).to_sparse(),
    "rows": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "oneDNN": lambda: torch.rand(2, 3, 4, 4).to_mkldnn(),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_weights_of_every_kind_can_be_held(kind: str) -> None:
    model, x = Holds(WEIGHTS[kind]()).eval(), torch.randn(1, 3, 8, 8)
    nhwc.audit(model, x)
    if kind != "oneDNN":  # Torch cannot copy such a parameter, which `optimize` has to.
        torch.testing.assert_close(nhwc.optimize(model, x)(x), model(x))


def test_threads_take_turns_to_put_generators_back():
    before, over = torch.get_rng_state(), threading.Event()

    def second():
        with undrawn():
            over.wait(10)

    thread = threading.Thread(target=second)
    with undrawn():
        torch.rand(3)
        thread.start()
        thread.join(0.2)
    over.set()
    thread.join()
    assert torch.equal(torch.get_rng_state(), before)
