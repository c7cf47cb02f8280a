import copy
import functools
import io
import math
import pickle

import pytest
import torch
from torch import nn

from nhwc import fuse, load, optimize, save
from nhwc.errors import InputError
from nhwc.zoo import load_model

from ..fusing import Block, assert_same, fuse_checked, has_no_norm, norms, outputs, random_, script

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def small():
    torch.manual_seed(0)
    return random_(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
        )
    )


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Hidden(nn.Module):
    """Batch norms at the heads of Sequentials and inside wrappers: no convolution stands right
    before them in any one container."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 1, 1)
        self.second = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 1, 1))
        self.third = Wrapper(nn.BatchNorm2d(1))
        self.fourth = nn.Sequential(Wrapper(nn.Conv2d(1, 1, 1, bias=False)))
        self.fifth = Wrapper(nn.Sequential(nn.BatchNorm2d(1), nn.ReLU()))

    def forward(self, x):
        return self.fifth(self.fourth(self.third(self.second(self.first(x)))))


def test_norms_hidden_in_containers_are_all_found():
    x = torch.randn(5, 1, 1, 1)
    model = random_(Hidden())
    fused = fuse_checked(model, x)
    assert has_no_norm(fused)
    assert len(fused.report.applied) == 3
    assert_same(model, script(fused), x)


def test_resnet18_as_a_whole():
    model = random_(load_model("resnet18"))
    x = torch.randn(1, 3, 64, 64)
    fused = fuse_checked(model, x)
    assert has_no_norm(fused)
    assert "batch_norm" not in fused.code
    assert "bn" not in fused.code
    assert len(fused.report.applied) == 20
    assert_same(model, script(fused), x)


def test_the_result_shares_no_memory_with_the_model():
    model = random_(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    ours = {t.data_ptr() for t in fuse(model).state_dict().values()}
    assert not ours & {t.data_ptr() for t in model.state_dict().values()}
    expected = outputs(model, (X,))
    fuse(model).to(torch.float64)
    with torch.no_grad():
        for parameter in fuse(model).parameters():
            parameter.zero_()
    assert torch.equal(outputs(model, (X,)), expected)


def test_training_on_makes_nothing_stale():
    model = small()
    fused = fuse(model)
    expected = outputs(fused, (X,))
    model.train()
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    model.eval()
    assert torch.equal(outputs(fused, (X,)), expected)
    assert_same(model, fuse(model), X)


def test_fusing_twice_changes_nothing():
    once = fuse(small())
    twice = fuse(once)
    assert twice.code == once.code
    assert not twice.report.sites
    assert_same(once, twice, X)


def test_fusing_a_model_twice_folds_once():
    model = small()
    first, second = fuse(model), fuse(model)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def reloaded(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, reloaded, saved])
def test_copies_compute_the_same_and_keep_the_report(copied):
    fused = fuse(small())
    again = copied(fused)
    assert again.report == fused.report
    assert_same(fused, again, X)


def test_moves_between_types():
    fused = fuse(small()).to(torch.float64)
    torch.testing.assert_close(fused(X.double()), small().double()(X.double()))


def test_exports_and_compiles():
    fused = fuse(small())
    exported = torch.export.export(fused, (X,)).module()
    assert_same(fused, exported, X)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    assert_same(fused, compiled, X)


def test_a_compiled_model_is_fused_as_what_it_was_compiled_from():
    model = small()
    assert has_no_norm(fuse_checked(torch.compile(model, backend="eager"), X))


def test_a_model_for_several_devices_is_fused_as_the_one_in_it():
    fused = fuse_checked(nn.DataParallel(small()).eval(), X)
    assert has_no_norm(fused)
    hooked = nn.DataParallel(small()).eval()
    hooked.register_forward_hook(lambda module, args, result: result * 2)
    assert_same(fuse(hooked), hooked, X)
    compiled = torch.compile(nn.DataParallel(small()).eval(), backend="eager")
    assert has_no_norm(fuse_checked(compiled, X))
    # In training a wrapper may add up gradients.
    assert not has_no_norm(fuse(nn.DataParallel(small().eval()).train()))


def test_other_batch_and_image_sizes():
    fused = fuse(small())
    for shape in ((1, 3, 5, 7), (4, 3, 32, 8)):
        assert_same(small(), fused, torch.randn(shape))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        self.conv = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.stem(x)
        if x.mean() > 0:
            return self.left(x)
        return self.norm(self.conv(x))


def test_a_branch_on_data_keeps_its_code_and_fuses_around_it():
    model = random_(Branches())
    fused = fuse_checked(model, X)
    for sign in (-1, 1):
        assert_same(model, fused, sign * 100 * X)
    assert norms(fused) == ["model.norm"]
    [part] = fused.report.opaque
    assert (part.path, part.kind) == ("", "Branches")
    assert "branches on data (test_fuse.py:" in part.reason
    assert [site.where for site in fused.report.applied] == ["stem.1", "left.1"]
    [left] = fused.report.skipped
    assert left.where == "norm"
    assert "branches on data" in left.reason


def test_only_the_part_that_branches_stays_opaque():
    model = random_(nn.Sequential(small(), nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3), Branches()))
    fused = fuse_checked(model, X)
    assert [part.path for part in fused.report.opaque] == ["3"]
    assert norms(fused) == ["3.norm"]


class ReadsOff(nn.Module):
    """Its code uses its children other than by calling them."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.tail = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        for block in self.blocks:
            x = block.extra(x) if isinstance(block, Extra) else block(x)
        for layer in self.tail:
            x = layer(x)
        return x


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def extra(self, x):
        return self.inner(x) * 3

    def forward(self, x):
        return self.inner(x)


def test_children_that_are_used_in_other_ways_than_calls_keep_their_class():
    model = random_(ReadsOff([Extra(), Extra()]))
    fused = fuse_checked(model, torch.rand(2, 4, 5, 5))
    assert [site.where for site in fused.report.applied] == [
        "blocks.0.inner.1",
        "blocks.1.inner.1",
    ]
    assert [site.where for site in fused.report.skipped] == ["tail.1"]


def _typed(self, x):
    return self.c(x) if isinstance(x, torch.Tensor) else self.c(x[0])


def _counts(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return self.n(self.c(x))


def _begins_a_list(self, x):
    self.kept = [1] if isinstance(self.kept, tuple) else (1,)
    return self.n(self.c(x))


def _appends_deep(self, x):
    self.deep["all"][0].append(self.c(x))
    return self.n(self.c(x))


def _keeps(self, x):
    self.seen = self.c(x)
    return self.n(self.seen)


def _draws(self, x):
    return self.n(self.c(x)) + torch.rand(1)


def _writes(self, x):
    self.n.running_mean.add_(0)
    return self.n(self.c(x))


def _replaces_memory(self, x):
    self.n.running_mean.data = self.n.running_mean.data + 1
    return self.n(self.c(x))


def _aliased(self, x):
    y = [self.c(x) * 1]
    z = y[0].flip(2) if self.training else y[0]
    z = torch.cat([z], 1).add(0)
    w = z
    z += 1
    return self.n(self.c(x)) + w


def _loops(self, x):
    return sum(self.n(self.c(row)) for row in x)


def _spreads_sizes(self, x):
    return self.n(self.c(x.reshape(*x.shape[:1], *x.shape[1:])))


def _numbers(self, x):
    y = self.n(self.c(x))
    return y * float(x.shape[2]) + int(y.shape[0])


OPAQUE = {
    "makes numbers": (_numbers, "it makes a plain number of a traced value (test_fuse.py:"),
    "writes into what it uses again": (_aliased, "in place into a value that is used again"),
    "asks for a type": (_typed, "asks for the type of a traced value"),
    "counts its calls": (_counts, "changes self.calls"),
    "appends to a list in a list in a dict": (_appends_deep, "changes self.deep"),
    "leaves another kind of list": (_begins_a_list, "changes self.kept"),
    "keeps a value": (_keeps, "changes self.seen"),
    "draws random numbers": (_draws, "random numbers"),
    "writes into a buffer": (_writes, "writes into a parameter or buffer"),
    "gives a buffer other memory": (_replaces_memory, "writes into a parameter or buffer"),
    "loops over data": (_loops, "loops over data"),
    "loops over sizes": (_spreads_sizes, "a value whose number of dimensions is not known"),
}


class HandsOn(nn.Module):
    """A block that hands on all that it is given."""

    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(3, 4, 1)

    def forward(self, x, *more):
        return self._run(x, *more)

    def _run(self, x, times=1):
        return self.c(x) * times


class HandsOnNamed(HandsOn):
    def forward(self, x, **named):
        return self._run(x, **named)


class AsksForMore(HandsOn):
    def forward(self, x, *more):
        return self._run(x, more[0]) if more else self._run(x)


@pytest.mark.parametrize(
    ("kind", "name"), [(HandsOn, "*more"), (HandsOnNamed, "**named"), (AsksForMore, "*more")]
)
def test_a_reason_names_the_arguments_of_any_number(kind, name):
    model = kind()
    fused = fuse(model)
    [part] = fused.report.opaque
    assert part.reason.startswith(f"it looks into {name}, which may hold any number of values (")
    torch.testing.assert_close(fused(X), model(X))


@pytest.mark.parametrize("name", OPAQUE)
def test_what_a_graph_would_lose_stays_opaque(name):
    run, reason = OPAQUE[name]
    model = random_(Block(run, c=nn.Conv2d(3, 4, 1), n=nn.BatchNorm2d(4)))
    model.kept, model.deep = [1], {"all": [[]]}
    state = torch.get_rng_state()
    fused = fuse(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.deep == {"all": [[]]}
    assert not hasattr(model, "calls")
    assert not hasattr(model, "seen")
    [part] = fused.report.opaque
    assert reason in part.reason
    x = torch.randn(2, 2, 3, 5, 5) if name == "loops over data" else X
    torch.manual_seed(1)
    expected = outputs(copy.deepcopy(model), (x,))
    torch.manual_seed(1)
    torch.testing.assert_close(outputs(fused, (x,)), expected)


class Map(dict):
    def update(self, *args):
        raise AttributeError("nobody writes here")


def test_a_list_that_is_left_as_it_was_found_is_no_change():
    """Video decoders count their convolutions, and keep frames for each, in lists of a call."""

    def run(self, x):
        self.place, self.kept = [0], [None, math.inf, [-0.0], self.known]
        self.kept[self.place[0]] = self.c(x)
        self.place[0] += 1
        y = self.n(self.kept[0])
        self.place, self.kept = [0], [None, float("inf"), [-0.0], self.known]
        return y

    model = random_(Block(run, c=nn.Conv2d(3, 4, 1), n=nn.BatchNorm2d(4)))
    model.known = Map(a=1)
    model.place, model.kept = [0], [None, math.inf, [-0.0], model.known]
    fused = fuse_checked(model, X)
    assert not fused.report.opaque
    assert len(fused.report.applied) == 1


def test_a_write_in_place_that_others_see():
    def run(self, x):
        y = self.c(x)
        seen = y
        y += 1
        return self.n(y) * seen

    model = random_(Block(run, c=nn.Conv2d(3, 4, 1), n=nn.BatchNorm2d(4)))
    fused = fuse_checked(model, X)
    assert not fused.report.opaque
    assert_same(model, copy.deepcopy(fused), X)


def test_a_hooked_container_keeps_its_hook_and_fuses_inside():
    model = nn.Sequential(small(), nn.Conv2d(4, 4, 1))
    model[0].register_forward_hook(lambda module, args, result: result + 1)
    fused = fuse_checked(model, X)
    [part] = fused.report.opaque
    assert part.path == "0"
    assert "hooks" in part.reason


def test_a_hook_on_the_model_itself_is_kept():
    model = small()
    model.register_forward_hook(lambda module, args, result: result + 1)
    fused = fuse_checked(model, X)
    assert "hooks" in fused.report.opaque[0].reason


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, x, *, scale=None, flip: bool = False):
        y = self.body(x)
        if flip:
            y = y.flip(3)
        if scale is not None:
            y = y * scale
        return {"out": y, "pair": (y, [x])}


class Resized(nn.Sequential):
    """Takes sizes in a list and a tuple, as RIFE does."""

    def forward(self, x, scales=[2, 1], size=(8, 8)):  # noqa: B006
        y = nn.functional.interpolate(super().forward(x), scale_factor=scales[0])
        return nn.functional.interpolate(y, size=size) * scales[1]


class Counted(Resized):
    def forward(self, x, counts=[0]):  # noqa: B006
        counts[0] += 1
        return super().forward(x) + counts[0] * 0


def test_lists_and_tuples_may_be_defaults(tmp_path):
    model, x = random_(Resized(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))), torch.rand(1, 3, 8, 8)
    fused, fast = fuse(model), optimize(model, x)
    assert has_no_norm(fused)
    assert not fused.report.opaque
    save(fast, tmp_path / "model.nhwc")
    for same in (fused, fast, load(tmp_path / "model.nhwc")):
        for inputs in ((x,), (x, [3, 2]), (x, [1, 2], (5, 7)), (x[:, :, :6],)):
            torch.testing.assert_close(same(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)


def test_a_list_that_a_forward_keeps_as_its_default_stays_its_own():
    model, x = random_(Counted(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))), torch.rand(1, 3, 8, 8)
    fused = fuse(model)
    (opaque,) = fused.report.opaque
    assert opaque.reason == "generated code cannot have the default of its argument counts, a list"
    kept = Counted.forward.__defaults__[0]
    before = kept[0]
    fused(x)
    assert kept[0] == before + 1


def test_optional_arguments_are_fixed_to_their_defaults_aloud():
    model = random_(Named())
    fused = fuse_checked(model, X)
    assert has_no_norm(fused)
    assert fused.report.notes == (
        "scale is fixed to its default, None",
        "flip is fixed to its default, False",
    )
    assert_same(model, lambda x: fused(x, flip=False), X)
    with pytest.raises(AssertionError, match="flip is fixed to False"):
        fused(X, flip=True)
    with pytest.raises(AssertionError, match="scale is fixed to None"):
        fused(X, scale=2.0)


def test_a_fixed_argument_says_what_to_do_where_no_pass_changes_the_graph():
    model = Named()
    model.body = nn.Conv2d(3, 8, 3)
    with pytest.raises(AssertionError, match=r"flip is fixed to False.*call the model itself"):
        fuse(model.eval())(X, flip=True)


def doubling(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, args[0] * 2, *args[1:], **kwargs)

    return wrapper


def only_the_first(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, args[0] * 2)

    return wrapper


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    @doubling
    def forward(self, x, *, scale=2.0):
        return self.body(x) * scale


class TakesMore(Doubled):
    @only_the_first
    def forward(self, x, **more):
        return self.body(x)


def test_a_decorator_gets_the_arguments_as_in_a_call():
    model = random_(Doubled())
    fused = fuse_checked(model, X)
    assert has_no_norm(fused)
    assert fused.report.opaque == ()


def test_a_decorated_forward_that_takes_any_arguments_is_called():
    fused = fuse_checked(random_(TakesMore()), X)
    reason = "its forward is decorated, and takes *args or **kwargs"
    assert fused.report.opaque[0].reason.startswith(reason)


def giving(forward):
    @functools.wraps(forward)
    def wrapper(self, x, scale=3.0, **more):
        return forward(self, x, scale=scale, **more)

    return wrapper


def giving_what_is_missing(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **named):
        named.setdefault("scale", 3.0)
        return forward(self, *args, **named)

    return wrapper


def giving_always(forward):
    @functools.wraps(forward)
    def wrapper(self, x, **named):
        return forward(self, x, scale=3.0)

    return wrapper


@pytest.mark.parametrize("decorator", [giving, giving_what_is_missing, giving_always])
def test_what_a_decorator_gives_is_given(decorator):
    """The graph gave what the decorated function takes by default, and answered a third."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = small()

        @decorator
        def forward(self, x, scale=1.0):
            return self.body(x) * scale

    model = random_(Scaled())
    fused = fuse_checked(model, X)
    assert "decorated by code that may give scale" in fused.report.opaque[0].reason
    named = (model(X, scale=2.0), fused(X, scale=2.0))
    torch.testing.assert_close(*named)


class Late(nn.Module):
    """An argument that is given by name alone has no default, and stands behind one that has."""

    def __init__(self, deciding):
        super().__init__()
        self.body, self.deciding = small(), deciding

    def forward(self, x, mask=None, *, scale):
        if self.deciding and x.sum() > 1e9:
            return x
        return self.body(x) * scale


@pytest.mark.parametrize("deciding", [False, True], ids=["traced", "called"])
def test_an_argument_without_default_may_follow_those_that_have_one(deciding):
    model = random_(Late(deciding))
    fused = fuse(model)
    assert_same(lambda x: model(x, scale=2.0), lambda x: fused(x, scale=2.0), X)
    assert has_no_norm(fused)
    optimized = optimize(model, X, kwargs={"scale": torch.full((1,), 2.0)})
    assert_same(lambda x: model(x, scale=2.0), lambda x: optimized(x, scale=2.0), X)


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, *images, **options):
        return [self.body(image) for image in images], options


def test_any_signature_is_kept():
    fused = fuse_checked(random_(Several()), X, X + 1)
    assert outputs(fused, ())[0] == []
    _, options = fused(X, size=3)
    assert options == {"size": 3}
    assert has_no_norm(fused)


def test_not_a_module():
    with pytest.raises(InputError, match="cannot fuse a function"):
        fuse(lambda x: x)


def test_a_model_that_cannot_be_copied_says_so():
    class Locked(nn.Module):
        def __deepcopy__(self, memo):
            raise TypeError("no copies.")

    with pytest.raises(InputError, match=r"cannot copy the Locked: no copies\. Take"):
        fuse(Locked())


def test_a_result_of_autograd_kept_on_the_model_does_not_stop_the_copy():
    model = small()
    model.kept = (model[0].weight * 2).sum()
    assert has_no_norm(fuse_checked(model, X))


def test_a_script_module_stays_as_it_is():
    inner = script(small())
    model = random_(nn.Sequential(inner, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))
    fused = fuse_checked(model, X)
    assert "TorchScript" in fused.report.opaque[0].reason
    assert len(fused.report.applied) == 1


def test_a_module_both_in_a_graph_and_in_an_opaque_part():
    """Folding into the one must leave the other, which still runs its batch norm."""
    branching = random_(Branches())
    model = Block(
        lambda self, x: self.opaque(x) + self.norm(self.conv(self.stem(x))),
        opaque=branching,
        stem=branching.stem,
        conv=branching.conv,
        norm=branching.norm,
    ).eval()
    fused = fuse_checked(model, X)
    assert_same(model, fused, -100 * X)


def test_the_report_is_plain_data():
    report = fuse(random_(Branches())).report.to_dict()
    assert report["schema"] == 1
    assert {part["kind"] for part in report["opaque"]} == {"Branches"}
    import json

    assert json.loads(json.dumps(report)) == report


def test_gradients_flow_to_the_input():
    x = X.clone().requires_grad_()
    fuse(small())(x).sum().backward()
    other = X.clone().requires_grad_()
    small()(other).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
