"""What optimize returns: it answers with the weights it has now, alike whatever won, on its own."""

import copy
import dataclasses
import io
import math
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import nhwc
from nhwc import InputError
from nhwc.optimized import Optimized
from nhwc.optimized.stamp import Stamp

from ..optimizing import close, force, residual, runs_program, won_by

WINNERS = ("input", "graph", "plan")


@pytest.fixture
def image():
    return torch.randn(2, 3, 20, 18, generator=torch.Generator().manual_seed(1))


def agrees(fast, image):
    """Whether planned and other shapes are answered with the same weights, those of now."""
    both = torch.cat([image, image[:1]])
    with torch.no_grad(), fast.unplanned():
        expected = fast(image)
    with torch.no_grad():
        for _ in range(3):
            close(fast(image), expected)
            close(fast(both)[:2], expected)
    return expected


def conv(fast):
    return fast.portable.one.get_submodule("0.op")


# Ways to change the weights. What follows is planned again, at the latest the second time.


def in_place(fast):
    with torch.no_grad():
        conv(fast).weight.mul_(1.5)


def one_number(fast):
    with torch.no_grad():
        conv(fast).weight[3, 4, 1, 1] += 5


def loaded(fast):
    fast.load_state_dict({k: v * 1.5 for k, v in fast.state_dict().items()})


def assigned(fast):
    fast.load_state_dict({k: v * 1.5 for k, v in fast.state_dict().items()}, assign=True)


def data_replaced(fast):
    conv(fast).weight.data = conv(fast).weight.data * 1.5


def data_transposed(fast):
    conv(fast).weight.data = conv(fast).weight.data.transpose(0, 1)


def data_copied_to(fast):
    conv(fast).weight.data.copy_(conv(fast).weight.detach() * 1.5)


def data_filled(fast):
    for parameter in fast.parameters():
        parameter.data.fill_(0.25)


def vector(fast):
    flat = nn.utils.parameters_to_vector(fast.parameters())
    nn.utils.vector_to_parameters(flat * 1.5, fast.parameters())


def new_parameter(fast):
    conv(fast).weight = nn.Parameter(conv(fast).weight.detach() * 1.5)


def slot(fast):
    conv(fast)._parameters["bias"] = nn.Parameter(conv(fast).bias.detach() + 1)


def through_numpy(fast):
    conv(fast).weight.detach().numpy()[...] *= 1.5


def through_numpy_bias(fast):
    conv(fast).bias.detach().numpy()[5] += 1


def through_dlpack(fast):
    torch.from_dlpack(conv(fast).weight.detach()).mul_(1.5)


def raw_bytes(fast):
    weight = conv(fast).weight.detach()
    ledger = np.frombuffer(memoryview(weight.numpy()).cast("B"), dtype=np.float32)
    ledger.flags.writeable or pytest.skip("read-only")
    ledger[...] *= 1.5


def swapped(fast):
    other = nn.Parameter(conv(fast).weight.detach() * 1.5, requires_grad=False)
    torch.utils.swap_tensors(conv(fast).weight, other)


def shared(fast):
    fast.share_memory()
    in_place(fast)


def emptied(fast):
    fast.to_empty(device="cpu")
    for tensor in (*fast.parameters(), *fast.buffers()):
        tensor.data.fill_(1)


def set_to(fast):
    with torch.no_grad():
        conv(fast).weight.set_(conv(fast).weight.detach().clone() * 1.5)


def optimizer_step(fast):
    fast.requires_grad_(True)
    for parameter in fast.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(fast.parameters(), lr=0.1).step()
    fast.requires_grad_(False)


def tied(fast):
    fast.portable.head.bias = nn.Parameter(fast.portable.head.bias.detach() + 1)


WEIGHTS = (
    *(in_place, one_number, loaded, assigned, data_replaced, data_transposed, data_copied_to),
    *(data_filled, vector, new_parameter, slot, through_numpy, through_numpy_bias, through_dlpack),
    *(raw_bytes, swapped, shared, emptied, set_to, optimizer_step, tied),
)


def noticed(change, image):
    """The model after a change that its answers show, whatever shapes they are for."""
    fast = force(residual(), image)
    with torch.no_grad():
        before = fast(image)
    change(fast)
    assert (agrees(fast, image) - before).abs().max() > 1e-3
    return fast


@pytest.mark.parametrize("change", WEIGHTS)
def test_new_weights_are_noticed_and_packed(change, image):
    fast = noticed(change, image)
    with torch.no_grad():
        assert runs_program(fast, image)


@pytest.mark.parametrize("slope", [0.7, -0.5, 1.5])
@torch.no_grad()
def test_a_learned_slope_that_is_part_of_a_kernel_may_change(slope, image):
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.PReLU(), nn.ConvTranspose2d(8, 2, 2, 2), nn.PReLU())
    given = image.repeat(1, 3, 1, 1)[:, :8]
    fast = force(net.eval(), given)
    [first, second] = [one for one in fast.parameters() if one.numel() == 1]
    assert runs_program(fast, given)
    for parameter, mine in ((first, net[1].weight), (second, net[3].weight)):
        parameter.fill_(slope)
        mine.fill_(slope)
        torch.testing.assert_close(fast(given), net(given), rtol=1e-4, atol=1e-5)
        assert runs_program(fast, given)


# Changes of what a call does: the graph is taken for as long as they are there.


def hooked(fast):
    conv(fast).register_forward_hook(lambda module, args, result: result + 1)


def hooked_before(fast):
    conv(fast).register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hooked_container(fast):
    fast.portable.register_forward_hook(lambda module, args, result: result + 1)


def replaced(fast):
    torch.manual_seed(5)
    fast.portable.one.get_submodule("0").op = nn.Conv2d(8, 8, 3, padding=1).eval()


def replaced_whole(fast):
    torch.manual_seed(5)
    fast.portable = type(residual())().eval()


def own_forward(fast):
    layer = conv(fast)
    layer.forward = lambda x: type(layer).forward(layer, x) + 1


def pruned(fast):
    prune.l1_unstructured(conv(fast), "weight", amount=0.5)


def parametrized(fast):
    class Half(nn.Module):
        def forward(self, x):
            return x / 2

    parametrize.register_parametrization(conv(fast), "weight", Half())


def normed(fast):
    parametrizations.weight_norm(conv(fast))
    with torch.no_grad():
        conv(fast).parametrizations.weight.original0.mul_(2)


def without_bias(fast):
    conv(fast).bias = None


def own_forward_of_all(fast):
    graph, was = fast.portable, fast.portable.forward
    graph.forward = lambda x: was(x) + 1


def own_helper(fast):
    layer = conv(fast)
    layer._conv_forward = lambda *given: type(layer)._conv_forward(layer, *given) + 1
    fast.refresh()


def hooked_activation(fast):
    activation = fast.portable.one.get_submodule("0").activation
    activation.register_forward_hook(lambda module, args, result: result + 1)


PARTS = (
    *(hooked, hooked_before, hooked_container, replaced, own_forward, pruned, parametrized),
    *(normed, without_bias, replaced_whole, own_forward_of_all, hooked_activation),
)


@pytest.mark.parametrize("change", PARTS)
def test_other_modules_and_hooks_take_the_graph(change, image):
    fast = noticed(change, image)
    with torch.no_grad():
        assert not runs_program(fast, image)


@pytest.mark.filterwarnings("ignore:the plan for .* is dropped")
@pytest.mark.parametrize("change", [*PARTS, own_helper])
@torch.no_grad()
def test_a_plan_made_after_such_a_change_answers_with_it(change, image):
    fast = force(residual(), image)
    before = fast(image)
    change(fast)
    for made_anew in (fast, copy.copy(fast)):
        made_anew.refresh()
        assert (agrees(made_anew, image) - before).abs().max() > 1e-3


@torch.no_grad()
def test_a_hook_that_is_taken_off_gives_the_plan_back(image):
    fast = force(residual(), image)
    expected, calls = fast(image), []
    handle = conv(fast).register_forward_hook(lambda *_: calls.append(1))
    close(fast(image), expected)
    handle.remove()
    assert calls == [1]
    assert runs_program(fast, image)


@torch.no_grad()
def test_hooks_on_the_result_and_on_all_modules_fire(image):
    fast = force(residual(), image)
    own, every = [], []
    handle = fast.register_forward_hook(lambda *_: own.append(1))
    fast(image)
    handle.remove()
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    ):
        handle = register(lambda module, *_: every.append(type(module)))
        try:
            fast(image)
        finally:
            handle.remove()
        assert nn.Conv2d in every
        every.clear()
    assert own == [1]
    assert runs_program(fast, image)


@torch.no_grad()
def test_other_tensors_for_one_call_run_the_graph_and_pack_nothing(image, monkeypatch):
    model = residual()
    fast = force(model, image)
    expected = fast(image)
    others = {name: value * 1.5 for name, value in fast.named_parameters()}
    with fast.unplanned():
        wanted = torch.func.functional_call(fast, others, image)
    assert not torch.equal(wanted, expected)
    monkeypatch.setattr("nhwc.optimized.remake_plan", None)
    for _ in range(3):
        close(torch.func.functional_call(fast, others, image), wanted)
        assert runs_program(fast, image)
        close(fast(image), expected)


@torch.no_grad()
def test_weights_beside_other_tensors_can_be_swapped(image):
    fast = force(residual(), image)
    weight = conv(fast).weight
    others = {"portable.head.bias": fast.portable.head.bias + 1}
    torch.func.functional_call(fast, others, image)
    torch.utils.swap_tensors(weight, nn.Parameter(weight * 1.5, False))
    agrees(fast, image)


@torch.no_grad()
def test_other_tensors_that_come_again_are_packed(image):
    fast = force(residual(), image)
    expected = fast(image)
    others = {name: nn.Parameter(p * 1.5, False) for name, p in fast.named_parameters()}
    with fast.unplanned():
        wanted = torch.func.functional_call(fast, others, image)
    graph_was_run = []
    for _ in range(3):
        found = []
        call = lambda x: found.append(torch.func.functional_call(fast, others, x))  # noqa: B023
        call(image)
        close(found[0], wanted)
        graph_was_run.append(fast._foreign != [])
    assert graph_was_run == [True, False, False]
    for _ in range(3):
        close(fast(image), expected)


@torch.no_grad()
def test_what_cannot_be_seen_is_seen_after_refresh(image):
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU()).eval()
    fast = force(model, image)
    before = fast(image)
    next(fast.parameters()).data[0] += 1
    assert torch.equal(fast(image), before)
    fast.refresh()
    assert (agrees(fast, image) - before).abs().max() > 1e-2


def test_the_weights_of_the_original_are_refused_in_words(image):
    model = residual()
    for winner in WINNERS:
        fast = won_by(winner, model, image)
        with pytest.raises(InputError, match="weights of the original") as caught:
            fast.load_state_dict(model.state_dict())
        assert "\n" not in str(caught.value)
        wrong = {k: v.reshape(-1)[:0] for k, v in fast.state_dict().items()}
        with pytest.raises(InputError, match="size mismatch"):
            fast.load_state_dict(wrong)
        assert fast.load_state_dict({}, strict=False).missing_keys


# Whatever won.


@pytest.fixture(params=WINNERS)
def winner(request):
    return request.param


def test_the_result_is_the_same_kind_of_thing(winner, image):
    model = residual()
    fast = won_by(winner, model, image)
    assert isinstance(fast, Optimized)
    assert fast.report.chosen == winner
    assert not any(p.requires_grad for p in fast.parameters())
    assert all(name.startswith("portable.") for name in fast.state_dict())
    assert not fast(image).requires_grad
    assert not fast(image[:1]).requires_grad
    assert fast.eval() is fast
    assert not fast.training
    with pytest.raises(InputError, match="Train the original"):
        fast.train()
    expected = model(image).detach()
    with torch.no_grad():
        for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            close(twin(image), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            close(torch.jit.script(fast)(image), expected)
            close(torch.jit.trace(fast, image)(image), expected)
            close(torch.export.export(fast, (image,)).module()(image), expected)
            close(torch.fx.symbolic_trace(fast)(image), expected)
            close(torch.compile(fast, backend="eager")(image), expected)
        assert runs_program(fast, image) == (winner == "plan")


def test_a_plan_that_cannot_be_made_here_is_dropped_with_its_reason(image):
    fast = won_by("plan", residual(), image)
    twin = copy.deepcopy(fast)
    for signature, recipe in twin._recipes.items():
        (_, kernel), *rest = recipe.kernels
        kernels = (("as another version tells of this layer", kernel), *rest)
        twin._recipes[signature] = dataclasses.replace(recipe, kernels=kernels)
    said = r"for 2x3x20x18 float32 is dropped, .*: its layers are not .*\. Optimize the model again"
    with torch.no_grad():
        with pytest.warns(UserWarning, match=said):
            close(twin(image), fast(image))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            close(twin(image), fast(image))


def test_a_copy_of_what_was_compiled_in_place_is_on_its_own(winner, image):
    fast = won_by(winner, residual(), image)
    fast.compile(backend="eager")
    with torch.no_grad():
        expected = fast(image)
        for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            in_place_all(twin)
            assert (agrees(twin, image) - expected).abs().max() > 1e-3
        close(fast(image), expected)


class Headed(nn.Module):
    """A backbone and a head that is trained on what it gives."""

    def __init__(self, backbone, image):
        super().__init__()
        self.norm, self.backbone = nn.BatchNorm2d(3), backbone
        self.head = nn.Linear(backbone(image).flatten(1).shape[1], 2)

    def forward(self, x):
        return self.head(self.backbone(self.norm(x)).flatten(1))


def test_a_head_on_an_optimized_backbone_is_trained_and_the_backbone_stays(winner, image):
    fast = won_by(winner, residual(), image)
    model = Headed(fast, image).eval()
    before = {name: value.clone() for name, value in fast.state_dict().items()}
    with pytest.warns(UserWarning, match="a part stays in eval mode: .* no training mode"):
        model.train()
    # It says so once; what is around it is in training mode, as it was asked to be.
    assert model.train() is model
    assert model.training
    assert model.norm.training
    assert model.head.training
    assert not any(part.training for part in fast.modules())
    features = fast(image).flatten(1)
    model.head(features).sum().backward()
    torch.optim.SGD(model.head.parameters(), lr=0.1).step()
    assert model.head.weight.grad.any()
    assert all(torch.equal(value, before[name]) for name, value in fast.state_dict().items())
    assert not model.eval().training
    with pytest.raises(InputError, match="Train the original"):
        fast.train()


def test_a_file_of_the_result(winner, image, tmp_path):
    model = residual()
    nhwc.save(won_by(winner, model, image), tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    close(loaded(image), model(image))
    assert not loaded(image).requires_grad
    with pytest.raises(InputError, match="inference"):
        loaded.train()


def hooked_whole(fast):
    fast.register_forward_hook(lambda module, args, result: result + 1)


def own_forward_of_whole(fast):
    was = fast.forward
    fast.forward = lambda x: was(x) + 1


@pytest.mark.parametrize("change", [hooked_whole, own_forward_of_whole])
def test_what_is_set_on_the_result_is_run_or_refused(change, winner, image, tmp_path):
    fast = won_by(winner, residual(), image)
    change(fast)
    with torch.no_grad():
        expected = fast(image)
        for around in (fast, nn.Sequential(fast).eval()):
            close(nhwc.fuse(around)(image), expected)
            close(force(around, image)(image), expected)
    with pytest.raises(InputError, match="the whole: it has hooks, parametrizations or a forward"):
        nhwc.save(fast, tmp_path / "model.nhwc")
    with pytest.raises(InputError, match="has no hooks"):
        torch.jit.script(fast)


def moved(fast):
    fast.to(torch.bfloat16)


def halved(fast):
    fast.half()


def refused_training(fast):
    with pytest.raises(InputError):
        fast.train()


def wanting_gradients(fast):
    fast.requires_grad_(True)


def written_to(fast):
    with torch.no_grad():
        for tensor in (*fast.parameters(), *fast.buffers()):
            tensor.zero_()


def all_hooked(fast):
    for module in fast.modules():
        module.register_forward_hook(lambda *_: None)


def taken_apart(fast):
    for module in list(fast.portable.children()):
        for name in dict(module.named_parameters(recurse=False)):
            delattr(module, name)


@pytest.mark.parametrize(
    "use",
    [
        *(moved, halved, nn.Module.double, refused_training, wanting_gradients, written_to),
        *(all_hooked, taken_apart),
    ],
)
def test_nothing_done_to_the_result_reaches_the_model(use, winner, image):
    model = residual()
    model.kept = torch.ones(3)
    with torch.no_grad():
        before, state = model(image), copy.deepcopy(model.state_dict())
    fast = won_by(winner, model, image)
    use(fast)
    assert all(torch.equal(v, state[k]) and v.dtype == state[k].dtype
               for k, v in model.state_dict().items())  # fmt: skip
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m.training for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(image), before)


def test_gradients_when_asked_for(winner, image):
    fast = won_by(winner, residual(), image)
    fast.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast(image).sum().backward()
    assert all(p.grad is not None for p in fast.parameters())


# Under inference_mode, as servers run.


def test_a_model_built_under_inference_mode(winner, image):
    with torch.inference_mode():
        model = residual()
        inside = won_by(winner, model, image)
        expected = model(image)
        close(inside(image), expected)
    outside = won_by(winner, model, image)
    with torch.no_grad():
        for fast in (inside, outside):
            close(fast(image), expected)
            close(fast(image[:1]), expected[:1])
            close(copy.deepcopy(fast)(image), expected)
    with torch.inference_mode():
        close(outside(image), expected)
        twin = pickle.loads(pickle.dumps(outside))
        close(twin(image), expected)
        for parameter in twin.parameters():
            parameter.fill_(0.25)
        agrees(twin, image)


def test_a_file_loaded_under_inference_mode(winner, image, tmp_path):
    model = residual()
    nhwc.save(won_by(winner, model, image), tmp_path / "model.nhwc")
    with torch.inference_mode():
        loaded = nhwc.load(tmp_path / "model.nhwc")
        close(loaded(image), model(image))
    with torch.no_grad():
        close(loaded(image), model(image))
        in_place_all(loaded)
        agrees(loaded, image)


def in_place_all(fast):
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.mul_(1.5)


def test_fuse_and_audit_under_inference_mode(image):
    with torch.inference_mode():
        model = residual()
        close(nhwc.fuse(model)(image), model(image))
        assert nhwc.audit(model, image).calls
    fused = nhwc.fuse(model)
    nhwc.audit(model, image)
    with torch.no_grad():
        close(fused(image), model(image))


# The stamp itself.


def test_a_stamp_notices_no_more_than_there_is():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    stamp = Stamp(net)
    net(torch.randn(1, 3, 8, 8))
    assert not stamp.holds()  # The running statistics.
    stamp = Stamp(net.eval())
    with torch.no_grad():
        net(torch.randn(1, 3, 8, 8))
    torch.save(net.state_dict(), io.BytesIO())
    copy.deepcopy(net)
    net.to("cpu").float()
    assert stamp.holds()


def test_an_equal_tensor_of_one_number_is_another():
    net = nn.PReLU()
    stamp = Stamp(net)
    net.weight = nn.Parameter(net.weight.detach().clone())
    assert not stamp.holds()
    assert stamp.has_parts()
    assert not stamp.has_tensors()


def test_parts_of_a_stamp_read_memory_that_is_there():
    """Freed memory must not be read, whatever the tensor is given instead."""
    net = nn.Linear(512, 512)
    stamp = Stamp(net)
    for _ in range(50):
        net.weight.data = torch.zeros(1, 512)
        assert not stamp.holds()
        stamp = Stamp(net)
        net.weight.data = torch.zeros(512, 512)
        assert not stamp.holds()
        stamp = Stamp(net)


@torch.no_grad()
def test_weights_loaded_while_no_program_runs_are_packed_afterwards(image):
    fast = force(residual(), image)
    fast(image)
    with fast.unplanned():
        loaded(fast)
    assert runs_program(fast, image)
    agrees(fast, image)


@torch.no_grad()
def test_weights_loaded_while_others_are_packed_are_the_last(image, monkeypatch):
    fast = force(residual(), image)
    fast.refresh()
    threads, pack = [], nhwc.optimized.remake_plan

    def interrupted(*given):
        plan = pack(*given)
        threads.append(threading.Thread(target=loaded, args=(fast,)))
        threads[0].start()
        threads[0].join(0.5)  # It waits, or else what was packed is of the old weights.
        return plan

    monkeypatch.setattr("nhwc.optimized.remake_plan", interrupted)
    fast(image)
    monkeypatch.undo()
    threads[0].join()
    agrees(fast, image)


class Shifted(nn.Module):
    """Adds its shift to the columns or to the channels: there are as many."""

    def __init__(self):
        super().__init__()
        self.conv, self.shift = nn.Conv2d(3, 8, 3, padding=1), nn.Parameter(torch.arange(8.0))

    def forward(self, x):
        return self.conv(x).relu() + self.shift


@torch.no_grad()
def test_a_weight_of_another_shape_is_noticed():
    image = torch.randn(1, 3, 8, 8)
    fast = force(Shifted().eval(), image)
    fast(image)
    shift = fast.portable.shift
    shift.data = shift.data.view(8, 1, 1)
    with fast.unplanned():
        expected = fast(image)
    with pytest.warns(UserWarning, match="the plan for .* is dropped"):
        close(fast(image), expected)


def test_a_call_that_wants_gradients_is_told_so_where_it_is(image):
    fast = force(residual(), image)
    with pytest.warns(UserWarning, match="gradients are wanted") as told:
        fast(image.requires_grad_())
    assert told[0].filename == __file__


class Signed(nn.Module):
    def forward(self, x, sign):
        return torch.copysign(x.relu(), torch.full_like(x, sign))


@torch.no_grad()
def test_a_plan_for_zero_is_none_for_minus_zero(image):
    model = Signed().eval()
    fast = force(model, image, 0.0)
    assert fast.serves((image, 0.0))
    assert not fast.serves((image, -0.0))
    close(fast(image, -0.0), model(image, -0.0))
    assert force(model, image, math.nan).serves((image, math.nan))
