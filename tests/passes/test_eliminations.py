"""Dropout, identity, constants and functional layers: what goes, what stays, and why."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc.models.vision import import_torchvision
from nhwc.passes import FOLDING
from nhwc.passes.eliminate_dropout import eliminate_dropout
from nhwc.passes.eliminate_identity import eliminate_identity
from nhwc.passes.fold_constants import fold_constants
from nhwc.passes.lift_functional import lift_functional
from nhwc.passes.lift_products import lift_products

from ..fusing import Block, assert_same, outputs, rewrite

X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))


def call(function, **parts):
    return Block(lambda self, x: function(self, x), **parts)


def stochastic():
    return import_torchvision().ops.StochasticDepth(0.5, "row")


class Priced(nn.Identity):
    """As MONAI's DiNTS has them: what an operator costs beside what it does."""

    def __init__(self):
        super().__init__()
        self.cost = 3


GOES = {
    "instance norm": (
        lift_functional,
        lambda: call(
            lambda self, x: F.instance_norm(x, None, None, self.c.bias), c=nn.Conv2d(4, 4, 1)
        ),
    ),
    "instance norm without weights": (
        lift_functional,
        lambda: call(lambda self, x: F.instance_norm(x, eps=1e-3), c=nn.Identity()),
    ),
    "instance norm by given statistics": (
        lift_functional,
        lambda: call(
            lambda self, x: F.instance_norm(
                x, self.c.running_mean, self.c.running_var, use_input_stats=False
            ),
            c=nn.BatchNorm2d(4),
        ),
    ),
    "group norm, with or without cuDNN": (
        lift_functional,
        lambda: call(
            lambda self, x: torch.group_norm(x, 2, self.c.bias, cudnn_enabled=False),
            c=nn.Conv2d(4, 4, 1),
        ),
    ),
    "batch norm, with or without cuDNN": (
        lift_functional,
        lambda: call(
            lambda self, x: torch.batch_norm(
                x,
                None,
                None,
                self.c.running_mean,
                self.c.running_var,
                training=False,
                momentum=0.1,
                eps=1e-5,
                cudnn_enabled=True,
            ),
            c=nn.BatchNorm2d(4),
        ),
    ),
    "layer norm, with or without cuDNN": (
        lift_functional,
        lambda: call(
            lambda self, x: torch.layer_norm(x, (5,), self.c.bias, cudnn_enable=True),
            c=nn.Linear(5, 5),
        ),
    ),
    "dropout": (eliminate_dropout, lambda: nn.Sequential(nn.Dropout(), nn.ReLU())),
    "dropout2d": (eliminate_dropout, lambda: nn.Sequential(nn.ReLU(), nn.Dropout2d())),
    "alpha": (eliminate_dropout, lambda: nn.Sequential(nn.AlphaDropout(), nn.ReLU())),
    "function": (
        eliminate_dropout,
        lambda: call(lambda self, x: F.dropout(x.relu(), 0.3, self.training)),
    ),
    "stochastic depth": (eliminate_dropout, lambda: nn.Sequential(nn.ReLU(), stochastic())),
    "identity": (eliminate_identity, lambda: nn.Sequential(nn.Identity(1, a=2), nn.ReLU())),
    "an identity of a class of its own": (
        eliminate_identity,
        lambda: nn.Sequential(Priced(), nn.ReLU()),
    ),
    "only an identity": (eliminate_identity, lambda: nn.Sequential(nn.Identity())),
    "constants": (fold_constants, lambda: call(_computed, c=nn.Conv2d(4, 4, 1))),
    "conv2d": (lift_functional, lambda: call(_conv, c=nn.Conv2d(4, 4, 3))),
    "linear": (lift_functional, lambda: call(_linear, c=nn.Linear(5, 3))),
    "transposed": (
        lift_functional,
        lambda: call(_transposed, c=nn.ConvTranspose2d(4, 6, 3, groups=2)),
    ),
}


for name, product in {
    "@": lambda self, x: x @ self.c.weight,
    "matmul": lambda self, x: torch.matmul(x, self.c.weight),
    "a method": lambda self, x: x.matmul(self.c.weight),
    "addmm": lambda self, x: torch.addmm(self.c.bias, x.reshape(-1, 5), self.c.weight),
    "mm": lambda self, x: torch.mm(x.reshape(-1, 5), self.c.weight),
}.items():
    GOES[f"a product: {name}"] = (
        lift_products,
        lambda product=product: call(product, c=nn.Linear(5, 5)),
    )


def _computed(self, x):
    weight = (self.c.weight * 2).flip(0).reshape(4, 4)
    return x * weight.sum() + torch.sqrt(weight.abs()).mean()


def _conv(self, x):
    return F.conv2d(x, self.c.weight, None, 2, padding=(1, 0), dilation=1)


def _linear(self, x):
    return F.linear(input=x, weight=self.c.weight, bias=self.c.bias)


def _transposed(self, x):
    return F.conv_transpose2d(x, self.c.weight, self.c.bias, 2, 1, 1, 2)


@pytest.mark.parametrize("name", GOES)
def test_goes(name):
    rewriting, build = GOES[name]
    model = build().eval()
    changed, [report] = rewrite(model, rewriting)
    assert report.applied
    assert not report.skipped
    assert_same(model, changed, X)
    again, [second] = rewrite(changed, rewriting)
    assert not second.sites
    assert_same(model, again, X)


def hooked(module):
    module.register_forward_hook(lambda m, args, result: result + 1)
    return nn.Sequential(nn.ReLU(), module)


def _writes(self, x):
    weight = self.c.weight.detach()
    weight.mul_(2)
    return x * (self.c.weight * 2).sum()


def _random(self, x):
    return x + torch.rand_like(self.c.weight).mean()


STAYS = {
    "dropout in training": (
        eliminate_dropout,
        lambda: nn.Sequential(nn.ReLU(), nn.Dropout()).train(),
        "training mode",
    ),
    "dropout always on": (
        eliminate_dropout,
        lambda: call(lambda self, x: F.dropout(x, 0.3)),
        "training mode",
    ),
    "hooked dropout": (eliminate_dropout, lambda: hooked(nn.Dropout().eval()), "hooks"),
    "hooked identity": (eliminate_identity, lambda: hooked(nn.Identity()), "hooks"),
    "a subclass of identity": (eliminate_identity, lambda: nn.Sequential(Noisy()), None),
    "a constant that is written to": (
        fold_constants,
        lambda: call(_writes, c=nn.Conv2d(4, 4, 1)),
        "writes into",
    ),
    "random numbers": (fold_constants, lambda: call(_random, c=nn.Conv2d(4, 4, 1)), None),
    "a weight that depends on the input": (
        lift_functional,
        lambda: call(lambda self, x: F.conv2d(x, self.c.weight * x.mean()), c=nn.Conv2d(4, 4, 1)),
        "weight is computed",
    ),
    "a weight that is a vector": (
        lift_functional,
        lambda: call(lambda self, x: F.linear(x, self.c.bias), c=nn.Conv2d(4, 4, 1)),
        "no matrix",
    ),
    "a product by a vector": (
        lift_products,
        lambda: call(lambda self, x: x @ self.c.bias, c=nn.Linear(5, 5)),
        None,
    ),
    "a product by what depends on the input": (
        lift_products,
        lambda: call(lambda self, x: x @ (self.c.weight * x.mean()), c=nn.Linear(5, 5)),
        None,
    ),
    "a product of what may be no matrix": (
        lift_products,
        lambda: call(lambda self, x: torch.mm(x, self.c.weight), c=nn.Linear(5, 5)),
        None,
    ),
    "a product by integers": (
        lift_products,
        lambda: call(lambda self, x: x.long() @ self.table, table=nn.Buffer(torch.eye(5).long())),
        None,
    ),
    "a product that is scaled": (
        lift_products,
        lambda: call(
            lambda self, x: torch.addmm(self.c.bias, x.view(-1, 5), self.c.weight, beta=0.5),
            c=nn.Linear(5, 5),
        ),
        None,
    ),
    "a product whose sum is of rows": (
        lift_products,
        lambda: call(
            lambda self, x: torch.addmm(self.c.weight, x.view(-1, 5)[:5, :], self.c.weight),
            c=nn.Linear(5, 5),
        ),
        None,
    ),
    "an instance norm that keeps running statistics": (
        lift_functional,
        lambda: call(
            lambda self, x: F.instance_norm(x, self.c.running_mean, self.c.running_var),
            c=nn.BatchNorm2d(4),
        ),
        "running statistics",
    ),
    "a batch norm of the batch": (
        lift_functional,
        lambda: call(lambda self, x: F.batch_norm(x, None, None, training=True)),
        "those of each batch",
    ),
}


class Noisy(nn.Identity):
    def forward(self, x):
        return x + 1


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    rewriting, build, reason = STAYS[name]
    changed, [report] = rewrite(build(), rewriting)
    assert not report.applied
    assert [reason in site.reason for site in report.skipped] == ([True] if reason else [])
    changed.graph.lint()


def test_a_random_constant_is_drawn_at_each_call():
    changed, _ = rewrite(call(_random, c=nn.Conv2d(4, 4, 1)), *FOLDING)
    assert not torch.equal(outputs(changed, (X,)), outputs(changed, (X,)))


def test_folded_constants_move_with_the_model():
    model = call(_computed, c=nn.Conv2d(4, 4, 1))
    changed, _ = rewrite(model, fold_constants)
    result = outputs(changed.double(), (X.double(),))
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.float(), outputs(model, (X,)), rtol=1e-4, atol=1e-5)


def _standardized(self, x):
    weight = self.c.weight
    rows = F.batch_norm(weight.reshape(1, len(weight), -1), None, None, training=True)
    return F.conv2d(x, rows.reshape_as(weight), self.c.bias)


def test_what_weights_were_computed_from_is_gone():
    model = call(_standardized, c=nn.Conv2d(4, 4, 3))
    changed, _ = rewrite(model, fold_constants, lift_functional)
    assert [node.op for node in changed.graph.nodes] == ["placeholder", "call_module", "output"]
    assert sorted(len(p.shape) for p in changed.parameters()) == [1, 4]
    assert not list(changed.buffers())
    assert_same(model, changed, X)


def _put_together(self, x):
    """As models that are trained with more branches write the filters they run with."""
    weight = torch.zeros(4, 4, 1, 1)
    for number in range(4):
        weight[number, number] = self.c.weight[number, number] * 2
    return F.conv2d(x, weight, self.c.bias)


def test_a_weight_that_is_written_filter_by_filter_is_a_constant():
    model = call(_put_together, c=nn.Conv2d(4, 4, 1))
    changed, _ = rewrite(model, fold_constants, lift_functional)
    assert [node.op for node in changed.graph.nodes] == ["placeholder", "call_module", "output"]
    assert_same(model, changed, X)


def _written_by_a_view(self, x):
    gate = self.c.bias.exp().to(x.dtype)
    gate[:2].mul_(2)
    return self.c(x) * gate.view(1, 4, 1, 1)


def _written_as_out(self, x):
    gate = self.c.bias.exp().to(x.dtype)
    torch.mul(gate, 2, out=gate)
    return self.c(x) * gate.view(1, 4, 1, 1)


def _written_by_a_part(self, x):
    gate = self.c.bias.exp()
    return self.part(gate) + gate.sum()


def _made_and_written(self, x):
    made = torch.ones(5, 5).type_as(x)
    part = made[0]
    part.mul_(0.5)
    return self.c(x) + made + part


def _made_and_written_as_out(self, x):
    made = torch.ones(5, 5).type_as(x)
    torch.add(made, 1, out=made)
    return self.c(x) + made


def _seen_by_another_name(self, x):
    made = torch.ones(5, 5)
    row = made[0]
    made.type_as(x).view(-1).mul_(0.5)
    return self.c(x) + row


WRITTEN = (
    *(_written_by_a_view, _written_as_out, _written_by_a_part),
    *(_made_and_written, _made_and_written_as_out, _seen_by_another_name),
)


@pytest.mark.parametrize("function", WRITTEN)
def test_what_a_call_writes_into_a_constant_is_gone_in_the_next(function):
    model = call(function, c=nn.Conv2d(4, 4, 1), part=torch.jit.script(Halving())).eval()
    fused = nhwc.fuse(model)
    for _ in range(3):
        assert_same(model, fused, X)


RETURNED = {
    "a view": lambda self, x: (self.c.bias * 2).view(2, 2),
    "a slice": lambda self, x: (self.c.bias * 2)[:2],
    "detached": lambda self, x: (self.c.bias * 2).detach(),
    "of the type of another": lambda self, x: (self.c.bias * 2).to(x),
    "made, of the type of another": lambda self, x: torch.ones(2, 2).type_as(x),
    "broadcast": lambda self, x: torch.broadcast_tensors(torch.ones(1, 4, 5, 5), x[:1])[0],
    "of two dimensions": lambda self, x: torch.atleast_2d(torch.ones(1, 4, 5, 5), x)[0],
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_caller_writes_into_a_result_is_gone_in_the_next_call(name):
    model = call(RETURNED[name], c=nn.Conv2d(4, 4, 1)).eval()
    fused = nhwc.fuse(model)
    for _ in range(2):
        assert_same(model, fused, X)
        outputs(fused, (X,)).zero_()


def test_a_plan_returns_no_constant_of_its_own():
    model = call(lambda self, x: (self.c(x), self.c.bias.exp()[:2]), c=nn.Conv2d(4, 4, 1)).eval()
    fast = nhwc.optimize(model, X)
    outputs(fast, (X,))[1].zero_()
    assert_same(model, fast, X)


class Halving(nn.Module):
    def forward(self, x):
        return x.mul_(0.5)


def test_a_constant_may_be_read_by_calls_and_by_other_constants():
    def computed(self, x):
        doubled = self.c.weight * 2
        return x * doubled.sum() + F.conv2d(x, doubled) + doubled.mean()

    model = call(computed, c=nn.Conv2d(4, 4, 1))
    changed, [report] = rewrite(model, fold_constants)
    assert len(report.applied) == 3
    assert_same(model, changed, X)


class Shifted(nn.Module):
    def forward(self, x, weight):
        return x @ weight + 1


@pytest.mark.parametrize("name", ["matmul", "mm", "addmm"])
def test_a_part_that_is_called_like_a_product_is_none(name):
    model = call(
        lambda self, x: getattr(self, name)(x, self.c.weight),
        c=nn.Linear(5, 5),
        **{name: torch.jit.script(Shifted())},
    ).eval()
    changed, [report] = rewrite(model, lift_products)
    assert not report.sites
    assert_same(model, changed, X)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_products_of_an_exported_program_are_layers():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False)).eval()
    x = torch.randn(4, 5)
    program = torch.export.export(model, (x,)).run_decompositions()
    report = nhwc.optimize(program, x).report
    [lifted] = [one for one in report.passes if one.name == "lift_products"]
    assert [site.what for site in lifted.applied] == ["Linear", "Linear"]


def test_fuse_leaves_the_matrix_of_a_product_a_parameter():
    model = call(lambda self, x: x @ self.c.weight, c=nn.Linear(5, 5)).eval()
    fused = nhwc.fuse(model)
    assert [*fused.state_dict()] == ["c.weight"]
    assert fused.get_parameter("c.weight").requires_grad
