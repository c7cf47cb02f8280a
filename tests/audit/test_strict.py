import contextlib
import importlib
import subprocess
import sys
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import nhwc
from nhwc import FormatLost, strict
from nhwc._audit.step import StepWatch

from ..nets import EXPECTED, Between, Expected, cat_slice_first, last

# For as long as the process lives: TorchScript knows operators by `id`, and does not forget those
# of a library that is gone. Whatever came to lie at such a place would be taken for the operator.
_LIBRARY = torch.library.Library("nhwc_strict_test", "DEF")


def nothing_patched() -> bool:
    return not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: f"{case.name}-{case.kind}")
def test_strict_agrees_with_what_is_known(case: Expected):
    net = nhwc.convert_(Between(case.operator, out=case.out).eval())
    x = last(2, 3, 8, 8)
    if case.kind == "lost":
        with pytest.raises(FormatLost, match=case.name), strict(net):
            net(x)
    else:
        with strict(net):
            net(x)
    assert nothing_patched()


def test_code_that_lies_in_no_file_has_no_line_to_show():
    code = (
        "import nhwc, torch\n"
        "norm = torch.nn.InstanceNorm2d(8)\n"
        "net = nhwc.convert_(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), norm))\n"
        "with nhwc.strict(net): net(torch.rand(2, 3, 8, 8))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert "at an unknown line in module 1 (InstanceNorm2d). Inputs: " in said


def test_the_message_names_everything():
    net = nhwc.convert_(Between(cat_slice_first, out=16))
    with pytest.raises(FormatLost) as caught, strict(net):
        net(last(2, 3, 8, 8))
    text = str(caught.value)
    assert "torch.cat lost channels last at " in text
    assert "nets.py:" in text
    assert "(Between)" in text
    assert "torch.cat((torch.rand(2, 16, 8, 8)[:, :8], x), dim=1)" in text
    assert "shape (2, 8, 8, 8) strides (1024, 64, 8, 1) (other)" in text
    assert "shape (2, 8, 8, 8) strides (512, 1, 64, 8) (channels_last)" in text
    assert "shape (2, 16, 8, 8) strides (1024, 64, 8, 1) (contiguous)" in text
    assert "input 1 of 2 is a slice" in text


def notes_of(error):
    """What is printed with an error; Python 3.10 has no notes, and the message tells it there."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_an_error_of_an_operator_gets_its_inputs():
    net = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3))
    with pytest.raises(RuntimeError, match="expected input") as caught, strict(net):
        net(last(2, 3, 8, 8))
    told = notes_of(caught.value)
    assert "torch.nn.functional.conv2d raised at " in told
    assert "test_strict.py:" in told
    assert "in module 1 (Conv2d). Inputs: shape (2, 3, 8, 8) strides (192, 1, 24, 3)" in told
    assert "(channels_last) float32; shape (4, 4, 3, 3) strides (36, 9, 3, 1) (contiguous)" in told
    assert nothing_patched()


def test_an_error_of_the_backward_pass_and_of_an_operator_without_tensors_too():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.view(-1, 5)

    y = Refuses.apply(last(2, 3, 8, 8).requires_grad_())
    with pytest.raises(RuntimeError, match="invalid for input") as caught, strict():
        y.backward(last(2, 3, 8, 8))
    assert "view raised at " in notes_of(caught.value)
    with pytest.raises(RuntimeError) as caught, strict():
        torch.zeros(2, -1)
    assert "torch.zeros raised at " in notes_of(caught.value)
    assert "It got no tensor." in notes_of(caught.value)


def test_an_error_that_no_operator_raised_stays_as_it_is():
    def recovers():
        with contextlib.suppress(RuntimeError):
            last(2, 3, 8, 8).view(-1)
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught, strict():
        recovers()
    assert notes_of(caught.value) == "'mine'"


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cat([torch.rand(2, 3, 8, 8), x], dim=1),
        lambda x: torch.cat(tensors=[torch.rand(2, 3, 8, 8), x], dim=1),
        lambda x: torch.tril(input=x),
        lambda x: x.tril(),
    ],
)
def test_lists_and_keywords_count(call):
    with pytest.raises(FormatLost), strict():
        call(last(2, 3, 8, 8))


def test_a_custom_operator_with_nested_arguments():
    _LIBRARY.define("pack(Tensor[] parts) -> Tensor")
    _LIBRARY.impl("pack", lambda parts: torch.cat([p.contiguous() for p in parts], 1), "CPU")
    with pytest.raises(FormatLost, match="pack"), strict():
        torch.ops.nhwc_strict_test.pack([last(2, 3, 8, 8), last(2, 3, 8, 8)])


@pytest.mark.parametrize("results", ["(Tensor, Tensor)", "Tensor[]"])
def test_a_custom_operator_whose_second_result_is_lost(results):
    name = "pair" if results.startswith("(") else "listed"
    _LIBRARY.define(f"{name}(Tensor x) -> {results}")
    both = tuple if name == "pair" else list
    _LIBRARY.impl(name, lambda x: both((x * 2, x.contiguous() * 3)), "CPU")
    with pytest.raises(FormatLost, match=name), strict():
        getattr(torch.ops.nhwc_strict_test, name)(last(2, 3, 8, 8))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.frexp(x),
        lambda x: torch.sort(x, 1),
        lambda x: torch.max(x, 1, keepdim=True),
        lambda x: F.max_pool2d(x, 2, return_indices=True),
        lambda x: F.adaptive_max_pool2d(x, 4, return_indices=True),
        lambda x: torch._foreach_mul([x, x.contiguous()], 2.0),
        lambda x: torch._foreach_mul([x.contiguous(), x], 2.0),
    ],
)
def test_further_results_that_lie_as_they_should_are_no_loss(call):
    with strict():
        call(last(2, 3, 8, 8))


def test_the_backward_pass_counts():
    x = last(2, 3, 8, 8).requires_grad_()

    def step():
        y = x[:, :, 1:]
        y.backward(last(*y.shape))

    with pytest.raises(FormatLost, match="in the backward pass"), strict():
        step()
    assert nothing_patched()


def test_values_and_views_are_untouched():
    x = last(2, 4, 8, 8)
    with strict():
        assert torch.equal(x[:, :2].permute(0, 2, 3, 1).permute(0, 3, 1, 2), x[:, :2])


def test_nothing_stays_patched_when_the_body_raises():
    with pytest.raises(ZeroDivisionError), strict():
        _ = 1 / 0
    assert nothing_patched()
    last(2, 3, 8, 8).tril()


def test_nested():
    with strict():
        with strict():
            last(2, 3, 8, 8).relu()
        with pytest.raises(FormatLost):
            last(2, 3, 8, 8).tril()
    assert nothing_patched()


def test_other_threads_are_not_concerned_and_may_have_their_own():
    inside, errors = threading.Event(), []
    leave = threading.Event()

    def holder():
        with strict():
            inside.set()
            leave.wait(10)
            try:
                last(2, 3, 8, 8).tril()
            except FormatLost as error:
                errors.append(error)

    thread = threading.Thread(target=holder)
    thread.start()
    assert inside.wait(10)
    last(2, 3, 8, 8).tril()
    leave.set()
    thread.join()
    assert len(errors) == 1


def test_the_model_itself_is_called_the_model():
    norm = torch.nn.InstanceNorm2d(8)
    with pytest.raises(FormatLost, match=r" in the model \(InstanceNorm2d\): "), strict(norm):
        norm(last(2, 8, 4, 4))


def scripted(*layers):
    """The layers as TorchScript in every form it comes in."""
    model = nhwc.convert_(torch.nn.Sequential(torch.nn.Conv2d(4, 8, 1), *layers).eval())
    x = last(2, 4, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script, trace = torch.jit.script(model), torch.jit.trace(model, x)
        return (script, trace, torch.jit.freeze(trace)), x


class Lower(torch.nn.Module):
    def forward(self, x):
        return x.tril()


def test_inside_torchscript_too():
    forms, x = scripted(Lower())
    for model in (*forms, torch.nn.Sequential(torch.nn.ReLU(), forms[0])):
        for gradients in (True, False):
            lost = pytest.raises(FormatLost, match=r"aten::tril lost .* in .*Module\)")
            with lost, torch.set_grad_enabled(gradients), strict(model):
                model(x)
            assert nothing_patched()
    forms, x = scripted(torch.nn.ReLU())
    for model in forms:
        with strict(model):
            model(x)


def test_other_errors_of_torchscript_stay_what_they_are():
    forms, _ = scripted(torch.nn.ReLU())
    with pytest.raises(RuntimeError) as caught, strict():
        forms[0](last(2, 3, 8, 8))
    assert not isinstance(caught.value, FormatLost)
    assert "raised at" in notes_of(caught.value)
    assert "shape (2, 3, 8, 8) strides (192, 1, 24, 3)" in notes_of(caught.value)

    def caught_and_told():
        try:
            last(2, 3, 8, 8).tril()
        except FormatLost:
            raise RuntimeError("mine") from None

    with pytest.raises(RuntimeError, match="mine"), strict():
        caught_and_told()


def test_a_copy_in_torchscript_that_may_be_asked_for_is_warned_of():
    forms, x = scripted(torch.nn.InstanceNorm2d(8))
    for model in forms:
        warned = pytest.warns(UserWarning, match="to contiguous inside TorchScript at .*py")
        with warned, strict():
            model(x)
        lost = pytest.raises(FormatLost, match="aten::instance_norm")
        with lost, torch.inference_mode(), strict():
            model(x)


def test_tensors_that_have_no_strides_have_no_format_to_keep():
    with strict():
        last(2, 3, 8, 8).to_mkldnn().relu().to_dense()


def _steps(model, x):
    with StepWatch(model).forward() as made:
        made.append(model(x))


def _calls(model, x):
    with strict():
        model(x)


@pytest.mark.parametrize("watches", [_calls, _steps, partial(nhwc.audit, compare=True)])
def test_a_compiled_model_that_is_watched_first_is_compiled_later(watches):
    """Under a mode Dynamo leaves a function to Python, in each later call, too."""
    ran = []

    def backend(graph, examples):
        return lambda *given: ran.append("compiled") or graph(*given)

    torch.compiler.reset()
    x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    model = torch.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), backend=backend)
    with torch.no_grad():
        watches(model, x)
        ran.clear()
        model(x)
    assert ran == ["compiled"]


def test_threads_that_watch_in_turns_leave_the_compiler_as_it_was():
    stance = importlib.import_module("torch._dynamo.eval_frame")
    before = stance._stance
    one, other = strict(), strict()

    def enters():
        other.__enter__()
        first.set()
        last.wait()
        other.__exit__(None, None, None)

    first, last = threading.Event(), threading.Event()
    one.__enter__()
    thread = threading.Thread(target=enters)
    thread.start()
    first.wait()
    one.__exit__(None, None, None)
    assert stance._stance.stance == "force_eager"
    last.set()
    thread.join()
    assert stance._stance is before


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return torch.cond(x.mean() > 0, lambda y: self.conv(y), lambda y: self.conv(y) * 2, (x,))


@pytest.mark.parametrize("exported", [False, True])
@torch.no_grad()
def test_a_branch_of_torch_is_one_call(exported):
    """Torch asks each mode whether it takes operators that run code, or ends the run."""
    torch.compiler.reset()
    net, x = nhwc.convert_(Chooses()), last(2, 3, 8, 8)
    answer = net(x)
    if exported:
        net = torch.export.export(net, (x,)).module()
    with strict():
        torch.testing.assert_close(net(x), answer)
    assert "cond" in [call.operator for call in nhwc.audit(net, x).calls]
    torch.testing.assert_close(net(x), answer)
