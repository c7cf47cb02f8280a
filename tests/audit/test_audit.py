import contextlib
import copy
import dataclasses
import re
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import nhwc
from nhwc import Format, ModelFailed, _audit, audit
from nhwc.graph.modules.mended import Cat
from nhwc.machine.others import Others
from nhwc.models.trees import every_tensor_of
from nhwc.render.audit_text import audit_text
from nhwc.testing import assert_keeps_format

from ..nets import EXPECTED, Between, Expected, cat_slice_first, channel_shuffle, last
from ..optimizing import force

# For as long as the process lives: TorchScript knows operators by `id`, and does not forget those
# of a library that is gone. Whatever came to lie at such a place would be taken for the operator.
_LIBRARY = torch.library.Library("nhwc_audit_test", "DEF")


def names(findings):
    return [(f.kind, f.operator.rpartition(".")[2], len(f.calls)) for f in findings]


@pytest.mark.parametrize("case", EXPECTED, ids=lambda case: f"{case.name}-{case.kind}")
def test_each_operator_is_judged_as_torch_does_it(case: Expected):
    net = Between(case.operator, out=case.out).eval()
    report = audit(net, torch.rand(2, 3, 8, 8))
    assert report.converted
    if case.kind is None:
        assert report.clean, report.findings
    else:
        (finding,) = report.findings
        assert (finding.kind, finding.operator.rpartition(".")[2]) == (case.kind, case.name)
        assert len(finding.payers) == 1
        assert finding.copied_bytes > 0
        assert finding.remedy.endswith(".")


def test_shufflenet_loses_it_at_its_cat():
    report = audit(nhwc.load_model("shufflenet_v2_x1_0"), torch.rand(2, 3, 64, 64))
    (lost,) = report.lost
    assert (lost.operator, len(lost.calls)) == ("torch.cat", 13)
    assert lost.site.file.endswith("torchvision/models/shufflenetv2.py")
    assert lost.site.source == "out = torch.cat((x1, self.branch2(x2)), dim=1)"
    assert "is a slice" in lost.remedy
    # Thirteen losses are paid for by fifteen convolutions: a block with stride 2 has two branches.
    assert len(lost.payers) == 15
    assert {report.calls[i].operator for i in lost.payers} == {"torch.nn.functional.conv2d"}
    (shuffle,) = (f for f in report.findings if f.kind == "converted")
    assert shuffle.site.source.endswith(".contiguous()")
    assert (len(shuffle.calls), len(shuffle.payers)) == (3, 3)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 64),
        ("densenet121", 64),
        ("mobilenet_v2", 64),
        ("squeezenet1_1", 64),
        ("googlenet", 64),
        ("inception_v3", 96),
        ("convnext_tiny", 64),
    ],
)
def test_clean_models_are_clean(name, size):
    report = audit(nhwc.load_model(name), torch.rand(2, 3, size, size))
    assert report.clean, report.findings
    assert report.counts["keeps"] > 10


def test_a_channels_last_3d_model():
    net = Between(nn.InstanceNorm3d(8), dims=3)
    report = audit(net, torch.rand(2, 3, 4, 8, 8))
    assert report.converted
    assert ("lost", "instance_norm", 1) in names(report.findings)
    assert report.calls[0].outputs[0].format is Format.CHANNELS_LAST_3D


def test_hidden_copies_of_an_operator_that_keeps_the_format():
    _LIBRARY.define("plain_inside(Tensor x) -> Tensor")

    def plain_inside(x):
        return (x.contiguous() * 2).contiguous(memory_format=torch.channels_last)

    _LIBRARY.impl("plain_inside", plain_inside, "CPU")
    report = audit(Between(torch.ops.nhwc_audit_test.plain_inside), torch.rand(2, 3, 8, 8))
    (finding,) = report.findings
    assert finding.kind == "copies"
    assert len(report.calls[finding.calls[0]].copies) == 2
    assert finding.copied_bytes == 2 * (2 * 8 * 8 * 8) * 4
    assert not report.lost


def test_a_copy_of_what_is_spread_converts_nothing():
    report = audit(Between(lambda x: x[:1].expand(x.shape)), torch.rand(2, 3, 8, 8))
    assert report.calls[-1].inputs[0].strides[0] == 0
    assert report.clean


def test_an_ambiguous_tensor_that_is_misread():
    class OneChannel(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 1, 3, padding=1), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            mask = self.one(x).contiguous()
            return self.two(mask.expand(-1, 4, -1, -1) * 2)

    report = audit(OneChannel(), torch.rand(2, 3, 8, 8))
    assert ("misread", "mul", 1) in names(report.findings)
    (finding,) = report.lost
    assert "to_format" in finding.remedy


def test_what_returns_the_strides_it_was_given_misreads_nothing():
    class Groups(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(2, 4, 1)

        def forward(self, x):
            pixel = self.first(x).mean((2, 3), keepdim=True)
            return self.last(pixel.view(1, 2, 2, 2).sigmoid())

    assert not audit(Groups(), torch.rand(1, 3, 8, 8)).lost


def test_a_reshape_that_must_copy_converts_however_its_input_is_marked():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(2, 4, 1)

        def forward(self, x):
            pixel = self.first(x).mean((2, 3), keepdim=True)
            return self.last(pixel.expand(-1, -1, 4, 4).reshape(1, 2, 8, 8))

    report = audit(Blocks(), torch.rand(1, 3, 8, 8))
    assert not report.lost
    assert ("converted", "reshape", 1) in names(report.findings)


def test_the_advice_on_circular_padding_names_what_keeps_the_format():
    conv = nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular")
    (finding,) = audit(nn.Sequential(nn.Conv2d(3, 8, 1), conv), torch.rand(2, 3, 8, 8)).lost
    assert 'nn.Conv2d(padding_mode="circular"), which calls it' in finding.remedy
    assert "nhwc.optimize pads in NHWC" in finding.remedy


@pytest.mark.parametrize("batch", [1, 2])
def test_one_image_made_of_tokens_is_misread_by_its_batch_stride(batch):
    def resized(x):
        tokens = x.flatten(2).transpose(1, 2).contiguous()
        return F.interpolate(tokens.transpose(1, 2).unflatten(2, (8, 8)), scale_factor=2)

    report = audit(Between(resized), torch.rand(batch, 3, 8, 8))
    assert [f.kind for f in report.lost] == ["misread"] * (batch == 1)
    assert all("is one image with a batch stride of 8" in f.remedy for f in report.lost)


def test_what_is_spread_over_a_batch_decides_nothing():
    class Biased(nn.Module):
        """Scores of windows, contiguous, and a bias that a convolution has made of one image."""

        def __init__(self):
            super().__init__()
            self.bias = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return torch.ones(6, 4, 8, 8) + self.bias(x)

    report = audit(Biased(), torch.rand(1, 3, 8, 8))
    assert not report.lost


def test_attention_within_one_window_misreads_nothing():
    class Window(nn.Module):
        """Vectors of a window as batch, windows, pixels, channels: one window is no channel."""

        def __init__(self):
            super().__init__()
            self.conv, self.keys = nn.Conv2d(3, 8, 3), nn.Linear(8, 16)

        def forward(self, x):
            pixels = self.conv(x).permute(0, 2, 3, 1).flatten(1, 2).unsqueeze(1)
            heads = self.keys(pixels).unflatten(-1, (4, 4)).permute(0, 1, 3, 2, 4)
            return heads * 0.5

    assert not audit(Window(), torch.rand(1, 3, 8, 8)).lost


FIRST_AGAIN = 'F.pad(x, (0, 0, 0, 0, n, 0), mode="replicate")'


@pytest.mark.parametrize(
    ("between", "operator", "says"),
    [
        (lambda x: torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], 2), "repeat", FIRST_AGAIN),
        (lambda x: torch.cat([x[:, :, :1].expand(-1, -1, 2, -1, -1), x], 2), "cat", FIRST_AGAIN),
        (
            lambda x: x.permute(0, 2, 1, 3, 4).contiguous().transpose(1, 2),
            *("contiguous", "x.transpose(1, 2).flatten(0, 1) of a volume"),
        ),
        (lambda x: torch.tril(x), "tril", "memory_format=torch.channels_last_3d"),
        (lambda x: torch.softmax(x, 1), "softmax", "x.permute(0, 2, 3, 4, 1)"),
    ],
)
def test_a_remedy_for_volumes_is_in_their_words(between, operator, says):
    report = audit(Between(between, dims=3), torch.rand(2, 3, 4, 8, 8))
    found = {finding.operator.rpartition(".")[2]: finding for finding in report.findings}
    assert says in found[operator].remedy
    assert "torch.channels_last " not in found[operator].remedy


def test_the_frame_that_a_remedy_pads_with_keeps_the_format():
    def causal(x):
        return F.pad(x, (0, 0, 0, 0, 2, 0), mode="replicate")

    assert audit(Between(causal, dims=3), torch.rand(2, 3, 4, 8, 8)).clean


def test_torch_convolves_a_small_clip_without_channels_last_and_two_with_it():
    net = nn.Sequential(nn.Conv3d(4, 4, 3, padding=1), nn.ReLU())
    clip = torch.rand(1, 4, 4, 8, 8)
    (finding,) = audit(net, clip).lost
    assert finding.operator == "torch.nn.functional.conv3d"
    assert "20480" in finding.remedy
    assert not audit(net, clip.repeat(2, 1, 1, 1, 1)).lost
    (finding,) = audit(net.double(), clip.double()).lost
    assert "20480" not in finding.remedy


def test_a_clip_of_one_channel_is_not_to_be_marked_where_torch_has_no_path_for_it():
    net = nn.Sequential(nn.Conv3d(3, 1, 3, padding=1), nn.Conv3d(1, 8, 3, padding=1))
    found = audit(net, torch.rand(1, 3, 4, 8, 8)).findings
    assert "misread" in {finding.kind for finding in found}
    assert all("single clip this small" in finding.remedy for finding in found)


@pytest.mark.parametrize("size", [1, (3, 1, 1)])
def test_torch_convolves_clips_pixel_by_pixel_without_channels_last_on_one_thread(size):
    net, clips = nn.Conv3d(8, 8, size), torch.rand(2, 8, 6, 8, 8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (finding,) = audit(net, clips).lost
        assert "torch.set_num_threads(2)" in finding.remedy
        torch.set_num_threads(2)
        assert not audit(net, clips).lost
    finally:
        torch.set_num_threads(before)


def test_a_clip_of_one_channel_is_not_clean_where_nothing_was_channels_last():
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 4, 3))
    (finding,) = audit(net, torch.rand(1, 1, 4, 8, 8)).findings
    assert (finding.kind, finding.calls) == ("lost", (0,))
    assert "20480" in finding.remedy


def test_images_of_one_channel_are_clean():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3), nn.Conv2d(1, 4, 3))
    report = audit(net, torch.rand(2, 1, 12, 12))
    assert report.clean
    assert report.counts["keeps"] == 4


class Batching(nn.Module):
    """Takes a list of images, as detectors do, or the frames of a clip."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images):
        batch = torch.stack(images) if isinstance(images, list) else images.flatten(0, 1)
        return self.conv(batch * 2)


def test_what_the_model_itself_makes_contiguous_is_charged_to_who_makes_it():
    (finding,) = audit(Batching(), [torch.rand(3, 8, 8), torch.rand(3, 8, 8)]).findings
    assert (finding.kind, finding.operator) == ("unconverted", "torch.stack")
    assert [len(finding.calls), len(finding.payers)] == [1, 1]
    assert "torch.stack(images)" in finding.site.source
    text = audit_text(audit(Batching(), [torch.rand(3, 8, 8)]))
    assert "Was never converted to channels last; 1 conv2d call later pays to convert;" in text


def test_a_loss_that_follows_from_another_names_it():
    class Skip(Between):
        def forward(self, x):
            before = self.before(x)
            return self.after(torch.cat((self.operator(before), before), dim=1))

    report = audit(Skip(nn.InstanceNorm2d(8), out=16), torch.rand(2, 3, 8, 8))
    norm, cat = sorted(report.lost, key=lambda finding: finding.calls)
    assert cat.operator == "torch.cat"
    assert f"lost it in `instance_norm` ({norm.site.place}): mend that first." in cat.remedy
    assert "mend that first" not in norm.remedy
    traced = torch.fx.symbolic_trace(Skip(nn.InstanceNorm2d(8), out=16))
    norm, cat = sorted(audit(traced, torch.rand(2, 3, 8, 8)).lost, key=lambda one: one.calls)
    assert norm.site.file == ""
    assert "lost it in `instance_norm` (operator): mend that first." in cat.remedy


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_text_is_as_wide_as_the_terminal_and_no_wider_than_reads_well(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    net = Between(nn.InstanceNorm2d(8))
    report = audit(net, torch.rand(2, 3, 8, 8), name="a_model_with_a_name_of_some_length")
    slow = dataclasses.replace(report.findings[0], cost_s=1.23456, share=0.999)
    report = dataclasses.replace(report, findings=(slow,))
    lines = audit_text(report, color=False).splitlines()
    assert max(map(len, lines)) <= min(columns, 96)
    assert max(map(len, lines)) > min(columns, 96) - 15


def test_a_clip_for_2d_convolutions_is_no_volume():
    report = audit(Batching(), torch.rand(1, 2, 3, 8, 8))
    assert report.calls[0].inputs[0].format is Format.CONTIGUOUS
    (finding,) = report.findings
    assert (finding.kind, finding.operator) == ("unconverted", "input")


class Long(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        for _ in range(1200):
            x = x + 1
        return self.conv(x)


def test_what_is_paid_for_is_found_behind_any_number_of_calls():
    report = audit(nhwc.convert_(Long()), torch.rand(2, 3, 8, 8), convert=False)
    [finding] = report.findings
    assert (finding.kind, finding.operator) == ("unconverted", "input")


def test_a_model_that_works_in_a_thread_is_not_called_clean():
    class Elsewhere(nn.Module):
        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(torch.relu, x).result()

    text = audit_text(audit(Elsewhere(), torch.rand(1, 3, 8, 8)))
    assert "clean" not in text
    assert "in threads of its own" in text


def test_an_optimized_model_is_audited_as_its_graph():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    image = torch.rand(1, 3, 12, 12)
    fast = nhwc.optimize(net.eval(), image)
    recipes = fast.recipes
    report = audit(fast, image)
    assert report.clean, report.findings
    assert any("which ran as the graph below it" in text for text in report.unseen)
    assert fast.recipes == recipes


def test_what_was_never_converted_is_said():
    net = nhwc.convert_(Between(nn.ReLU()))
    report = audit(net, torch.rand(2, 3, 8, 8))
    assert not report.converted
    (finding,) = report.findings
    assert (finding.kind, finding.operator) == ("unconverted", "input")
    assert "Convert the input once" in finding.remedy
    report = audit(Between(nn.ReLU()), last(2, 3, 8, 8))
    (finding,) = report.findings
    assert finding.kind == "unconverted"
    assert finding.remedy.startswith("2 convolution weights are contiguous (before, after)")
    assert audit(net, last(2, 3, 8, 8)).clean

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.fixed_weight = nn.Parameter(torch.rand(8, 3, 3, 3))

        def forward(self, x):
            return F.conv2d(x, self.fixed_weight)

    (finding,) = audit(nn.Sequential(Own()), last(2, 3, 8, 8)).findings
    assert finding.remedy.startswith("1 convolution weight is contiguous (0.fixed_weight)")


def test_an_instance_norm_with_computed_weights_is_not_said_to_be_mended():
    class Adaptive(nn.Module):
        def __init__(self):
            super().__init__()
            self.style = nn.Linear(4, 16)

        def forward(self, x):
            weight, bias = self.style(x.mean((0, 2, 3))[:4]).chunk(2)
            return F.instance_norm(x, weight=weight, bias=bias)

    class Behind(Adaptive):
        def forward(self, x):
            weight, bias = self.style(x.mean((0, 2, 3))[:4]).chunk(2)
            return F.instance_norm(x) * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)

    x = torch.rand(2, 3, 8, 8)
    for kind, mended in ((Adaptive, False), (Behind, True)):
        model = Between(kind()).eval()
        (lost,) = audit(model, x).findings
        assert ("optimize` mends it" in lost.remedy) is mended
        assert ("weight.view(-1, 1, 1) + bias" in lost.remedy) is not mended
        assert audit(force(model, x), x).clean is mended


def test_a_weight_that_the_audit_converts_is_no_image():
    class Fixed(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.weight = kind(torch.rand(8, 8, 3, 3))

        def forward(self, x):
            return F.conv2d(F.instance_norm(x), self.weight, stride=2)

    x = torch.rand(2, 3, 8, 8)
    for kind in (nn.Parameter, nn.Buffer):
        (lost,) = audit(Between(Fixed(kind)), x).findings
        assert (lost.kind, len(lost.calls), len(lost.payers)) == ("lost", 1, 1)
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3)).eval()))
    (call,) = audit(frozen, x).calls
    assert [spec.source for spec in call.inputs] == [-1, None, -1]


def test_the_backward_pass():
    net = Between(lambda x: x[:, :, 1:])
    assert audit(net, torch.rand(2, 3, 8, 8)).clean
    report = audit(net, torch.rand(2, 3, 8, 8), backward=True)
    (finding,) = report.lost
    assert finding.operator == "aten::slice_backward"
    assert finding.site.source == "net = Between(lambda x: x[:, :, 1:])"
    assert all(report.calls[i].backward for i in finding.calls)


def test_the_gradients_that_a_backward_pass_begins_with_are_no_calls():
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.rand(2, 3, 8, 8)
    report = audit(net, x, backward=True, compare=True)
    forward = [call.operator for call in report.calls if not call.backward]
    assert forward == ["torch.nn.functional.conv2d", "torch.nn.functional.relu"]
    assert report.agreement.calls == 2


def test_of_a_small_clip_it_says_that_a_plan_has_another_kernel():
    net = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1))
    x = torch.rand(1, 3, 4, 8, 8)
    fast = force(net.eval(), x)
    (lost,) = audit(fast, x).lost
    assert "A plan of nhwc.optimize takes a kernel that has one; the graph below it" in lost.remedy


def test_what_to_do_about_a_loss_that_has_no_backward_pass_in_channels_last():
    class Loss(nn.Module):
        def __init__(self, loss):
            super().__init__()
            self.scores, self.loss = nn.Conv2d(3, 5, 1), loss

        def forward(self, x, target):
            return self.loss(self.scores(x), target)

    x, target = torch.rand(2, 3, 7, 9), torch.randint(0, 5, (2, 7, 9))
    with pytest.raises(ModelFailed, match=r"Give it x\.contiguous\(\), or take F\.cross_entropy"):
        audit(Loss(F.nll_loss), x, target, backward=True)
    audit(Loss(F.cross_entropy), x, target, backward=True)
    audit(Loss(lambda s, t: F.nll_loss(s.contiguous(), t)), x, target, backward=True)


@pytest.mark.parametrize("mode", ["nearest", "reflect"])
def test_backward_passes_that_keep_it(mode):
    def operator(x):
        if mode == "nearest":
            return F.interpolate(x, scale_factor=2, mode="nearest")
        return F.pad(x, (1, 1, 1, 1), mode="reflect")

    assert audit(Between(operator), torch.rand(2, 3, 8, 8), backward=True).clean


def test_modules_called_many_times_are_one_finding():
    class Looped(Between):
        def forward(self, x):
            x = self.before(x)
            for _ in range(3):
                x = self.after(self.operator(x))
            return x

    report = audit(Looped(nn.InstanceNorm2d(8)), torch.rand(2, 3, 8, 8))
    assert names(report.findings) == [("lost", "instance_norm", 3)]
    assert {report.calls[i].site.module for i in report.findings[0].calls} == {"operator"}


def test_an_intended_layout_change_is_no_alarm():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.attend = nn.Conv2d(3, 8, 4, 4), nn.MultiheadAttention(8, 2)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x).flatten(2).transpose(1, 2)
            x, _ = self.attend(x, x, x)
            return self.head(x.mean(1))

    assert audit(Tokens(), torch.rand(2, 3, 16, 16)).clean


def test_several_inputs_keywords_and_nested_outputs():
    @dataclasses.dataclass
    class Output:
        image: torch.Tensor
        extra: dict

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x, y, *, scale):
            image = self.conv(x + y["image"] * scale)
            return Output(image, {"low": [image.mean()]})

    report = audit(
        Model(),
        torch.rand(2, 3, 8, 8),
        {"image": torch.rand(2, 3, 8, 8)},
        kwargs={"scale": torch.tensor(2.0)},
        backward=True,
    )
    assert report.clean
    assert report.inputs == ((2, 3, 8, 8), (2, 3, 8, 8), ())


class Images(UserDict):
    pass


class Listed(list):
    pass


@dataclasses.dataclass(frozen=True)
class Image:
    image: torch.Tensor


@pytest.mark.parametrize(
    "holder",
    [
        Image,
        lambda x: SimpleNamespace(image=x),
        lambda x: Images(image=x),
        lambda x: Listed([{"image": x}]),
        lambda x: [Images(inner=Image(x))],
    ],
)
def test_images_within_objects_are_converted_copies_of_their_owners(holder):
    class Writes(nn.Conv2d):
        def forward(self, held):
            (image,) = every_tensor_of(held)
            return super().forward(image.add_(1))

    x = torch.zeros(2, 3, 8, 8)
    report = audit(Writes(3, 4, 3), holder(x))
    assert report.clean
    assert report.inputs == ((2, 3, 8, 8),)
    assert not x.any()


def test_control_flow_checkpoints_and_autocast():
    class Model(Between):
        def forward(self, x):
            x = self.before(x)
            if x.mean() > -1e9:
                x = checkpoint(self.operator, x, use_reentrant=False)
            return self.after(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = audit(Model(nn.Softmax(1)), torch.rand(2, 3, 8, 8), backward=True)
    assert ("lost", "softmax", 1) in names(report.findings)
    assert any(o.dtype == "bfloat16" for call in report.calls for o in call.outputs)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_backward_pass_of_a_checkpoint_is_charged_to_the_layers_in_it(reentrant):
    inner = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3))
    net = Between(lambda x: checkpoint(net.inner, x, use_reentrant=reentrant))
    net.inner = inner
    calls = audit(net, torch.rand(2, 3, 8, 8), backward=True).calls
    modules = {call.operator: call.site.module for call in reversed(calls) if call.backward}
    assert modules["aten::upsample_nearest2d_backward"] == "inner.0"
    convolved = [c.site.module for c in calls if c.operator == "aten::convolution_backward"]
    assert convolved == ["after", "inner.1", "before"]


def test_what_to_do_about_a_softmax_holds_for_any_dimension():
    (finding,) = audit(Between(nn.Softmax(-1)), torch.rand(2, 3, 8, 8)).lost
    assert "Over the channels (1), x.permute(0, 2, 3, 1).softmax(-1)" in finding.remedy
    assert "Over another dimension" in finding.remedy


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("how", [lambda x, i: x[:, i], lambda x, i: x.index_select(1, i)])
def test_what_to_do_about_a_gather_of_channels_keeps_the_format(dims, how):
    index, image = torch.tensor([3, 1, 0, 2, 5, 4, 7, 6]), torch.rand(2, 3, *(8,) * dims)
    (finding,) = audit(Between(lambda x: how(x, index), dims=dims), image).lost
    (code,) = re.findall(r"(x\.permute\(.*\)) is x\[:, index\]", finding.remedy)
    mended = eval(f"lambda x, index: {code}")
    assert audit(Between(lambda x: mended(x, index), dims=dims), image).clean
    x = torch.rand(2, 8, *(3,) * dims)
    assert torch.equal(mended(x, index), how(x, index))


def test_a_compiled_model_runs_as_plain_python_and_says_so():
    report = audit(torch.compile(Between(channel_shuffle)), torch.rand(2, 3, 8, 8))
    assert names(report.findings) == [("converted", "contiguous", 1)]
    assert any("torch.compile" in text for text in report.unseen)


def test_compiled_functions_of_a_model_run_as_plain_python_too():
    ran = []

    def noted(graph, inputs):
        return lambda *given: ran.append(1) or graph(*given)

    tril = torch.compile(torch.tril, backend=noted)

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.fill = torch.compile(lambda x: x.tril(), backend=noted)

        @torch.compile(backend=noted)
        def lower(self, x):
            return tril(x)

        def forward(self, x):
            return self.lower(self.fill(x))

    net = Between(Holds())
    report = audit(net, torch.rand(2, 3, 8, 8))
    assert not ran
    assert [call.operator.rpartition(".")[2] for call in report.calls].count("tril") == 2
    (told,) = (text for text in report.unseen if "torch.compile" in text)
    assert told.startswith("operator.lower, operator.fill and 1 more compiled by torch.compile ran")
    with torch.no_grad():
        net(torch.rand(2, 3, 8, 8))
    assert ran


@torch.compile
def doubled(x):
    return x * 2


def doubled_twice(x):
    return doubled(doubled(x))


def test_a_compiled_function_of_a_file_runs_as_plain_python_too():
    class Doubles(nn.Conv2d):
        def forward(self, x):
            return doubled_twice(super().forward(x))

    report = audit(Doubles(3, 4, 3), torch.rand(2, 3, 8, 8))
    (told,) = (text for text in report.unseen if "torch.compile" in text)
    assert told.startswith("doubled compiled by torch.compile ran as plain Python")


def test_a_scripted_part_is_seen_operator_by_operator():
    class Tril(nn.Module):
        def forward(self, x):
            return x.tril()

    report = audit(Between(torch.jit.trace(Tril(), last(2, 8, 8, 8))), torch.rand(2, 3, 8, 8))
    (finding,) = report.lost
    assert "tril" in finding.operator
    assert any("TorchScript" in text for text in report.unseen)


def snapshot(model):
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "strides": [p.stride() for p in model.parameters()],
        "ids": [id(t) for t in (*model.parameters(), *model.buffers())],
        "training": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "grad_ids": [id(p.grad) for p in model.parameters()],
        "random": torch.get_rng_state(),
        "threads": torch.get_num_threads(),
    }


def test_the_model_is_left_as_it_was_found():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.Conv2d(8, 8, 3))
    model.train()
    model[1].eval()
    model[3].weight.requires_grad_(False)
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    x = torch.rand(2, 3, 8, 8)
    kept = x.clone()
    before = snapshot(model)
    for options in ({}, {"backward": True}, {"compare": True}):
        audit(model, x, **options)
        torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)
        assert torch.equal(x, kept)


def test_threads_that_audit_one_model_take_turns():
    model, x = Between(nn.InstanceNorm2d(8)), torch.rand(2, 3, 8, 8)
    before = snapshot(model)
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(audit, model, x, backward=b) for b in (False, True, False, True)]
        reports = [one.result() for one in waiting]
    assert all(report.converted for report in reports)
    assert {names(report.lost)[0] for report in reports} == {("lost", "instance_norm", 1)}
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


def test_the_model_is_left_as_found_when_it_raises():
    class Broken(nn.Sequential):
        def forward(self, x):
            super().forward(x)
            raise KeyError("inside")

    model = Broken(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).train()
    x = torch.rand(2, 3, 8, 8)
    before = snapshot(model)
    with pytest.raises(
        nhwc.ModelFailed, match=r"raised KeyError on this input at .*py:\d+: 'inside'"
    ):
        audit(model, x)
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


def test_a_model_that_raises_is_told_with_the_operator_and_its_inputs():
    class Recovers(nn.Module):
        def forward(self, x):
            try:
                x.view(-1)
            except RuntimeError:
                raise KeyError("mine") from None

    with pytest.raises(nhwc.ModelFailed) as caught:
        assert_keeps_format(nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3)), last(2, 3, 8, 8))
    text = str(caught.value)
    assert "conv2d raised at " in text
    assert "in module 1 (Conv2d). Inputs: shape (2, 3, 8, 8) strides (192, 1, 24, 3)" in text
    assert "\n" not in text
    with pytest.raises(nhwc.ModelFailed) as caught:
        audit(Recovers(), last(2, 3, 8, 8))
    assert "raised at" not in str(caught.value)


def test_what_a_model_says_when_it_raises_moves_no_cursor():
    class Coloured(nn.Module):
        def forward(self, x):
            raise ValueError("\x1b[31mtoo small\x1b[0m\x1b[2J")

    x = last(2, 3, 8, 8)
    for run in (audit, nhwc.optimize):
        with pytest.raises(nhwc.ModelFailed, match=r"too small\\x1b\[2J\. "):
            run(Coloured().eval(), x)


def test_an_error_that_the_model_catches_moves_no_finding():
    def viewed(x):
        try:
            rows = x.view(len(x), -1)
        except RuntimeError:
            rows = x.reshape(len(x), -1)
        return x.tril() + rows.sum()

    report = audit(Between(viewed), torch.rand(2, 3, 8, 8))
    assert [call.index for call in report.calls] == [*range(len(report.calls))]
    lost = report.lost[0]
    assert lost.operator == report.calls[lost.calls[0]].operator == "torch.Tensor.tril"
    assert report.calls[lost.payers[0]].site.module == "after"
    assert "1 conv2d call later pays to convert back" in audit_text(report)


def test_a_buffer_replaced_in_forward_is_put_back():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            self.calls = self.calls + 1
            x += 1
            return self.conv(x)

    model, x = Counter(), torch.zeros(1, 3, 8, 8)
    audit(model, x)
    assert model.calls == 0
    assert not x.any()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "no input given"),
        ((torch.rand(8, 8, 3),), "The input has 3 dimensions; a vision model needs 4"),
        ((torch.rand(0, 3, 8, 8),), "is empty"),
        ((torch.full((1, 3, 8, 8), float("nan")),), "contains NaN"),
        ((torch.rand(1, 3, 8, 8, device="meta"),), "meta device"),
        ((torch.rand(1, 4, 8, 8),), "raised RuntimeError on this input"),
    ],
)
def test_bad_input_is_refused_in_one_line(inputs, message):
    with pytest.raises(nhwc.InputError, match=message) as caught:
        audit(nn.Conv2d(3, 4, 3), *inputs)
    assert "\n" not in str(caught.value)


def test_not_a_model():
    with pytest.raises(nhwc.InputError, match="cannot audit a function"):
        audit(lambda x: x, torch.rand(1, 3, 8, 8))


def test_comparison_of_both_formats():
    report = audit(nn.Conv2d(3, 8, 3), torch.rand(1, 3, 8, 8), compare=True)
    assert report.comparison is not None
    assert len(report.comparison.before.seconds) == len(report.comparison.after.seconds) == 10


def test_plain_data():
    report = audit(Between(cat_slice_first, out=16), torch.rand(2, 3, 8, 8), name="net")
    data = report.to_dict()
    assert (data["schema"], data["model"], data["clean"]) == (1, "net", False)
    assert data["calls"][0]["outputs"][0]["format"] == "channels_last"
    assert [call["effect"] for call in data["calls"]].count("loses") == 1
    assert copy.deepcopy(report).findings == report.findings


def test_assert_keeps_format():
    assert_keeps_format(Between(nn.ReLU()), torch.rand(2, 3, 8, 8))
    with pytest.raises(AssertionError, match=r"1 place loses channels last[\s\S]*instance_norm"):
        assert_keeps_format(Between(nn.InstanceNorm2d(8)), torch.rand(2, 3, 8, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    net = Between(nn.InstanceNorm2d(8)).cuda()
    report = audit(net, torch.rand(2, 3, 32, 32, device="cuda"), backward=True)
    assert all(call.seconds >= 0 for call in report.calls)
    assert any(call.seconds > 0 for call in report.calls)
    assert report.environment.device != "cpu"


def run_in(function):
    class Model(nn.Module):
        def forward(self, x):
            return function(x)

    return Model()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "model",
    [
        run_in(lambda x: torch.nested.nested_tensor([x[0], x[1]])),
        run_in(lambda x: x.to_sparse()),
        run_in(lambda x: torch.fft.fft2(x).abs()),
        run_in(lambda x: x[:, :2]),
        run_in(lambda x: (x * 255).to(torch.uint8)),
        nn.Sequential(nn.Conv2d(3, 4, 3).requires_grad_(False)),
        nn.DataParallel(nn.Conv2d(3, 4, 3)),
    ],
    ids=["nested", "sparse", "complex", "view", "integer", "frozen", "parallel"],
)
def test_unusual_models_are_audited_all_the_same(model):
    audit(model, torch.rand(2, 3, 8, 8))


def test_hooks_run_and_stay():
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    net[0].register_forward_hook(lambda module, args, out: out.contiguous())
    report = audit(net, torch.rand(2, 3, 8, 8))
    assert names(report.findings) == [("converted", "contiguous", 1)]
    assert len(net[0]._forward_hooks) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("norm", "undo"),
    [
        (weight_norm, torch.nn.utils.parametrize.remove_parametrizations),
        (torch.nn.utils.weight_norm, torch.nn.utils.remove_weight_norm),
    ],
)
def test_a_weight_computed_on_every_call_is_told_from_a_slow_kernel(norm, undo):
    net = nn.Sequential(norm(nn.Conv2d(3, 4, 3)))
    (finding,) = audit(net, torch.rand(2, 3, 8, 8)).findings
    assert "copies its weight" in finding.remedy
    assert undo.__name__ in finding.remedy
    undo(net[0], "weight")
    assert audit(nhwc.convert_(net), last(2, 3, 8, 8), convert=False).clean


@pytest.mark.parametrize("channels", [4, 8])
def test_a_convolution_pays_for_its_input_whatever_its_weight_is_computed_from(channels):
    layer = spectral_norm(nn.Conv2d(8, channels, 3))
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), layer)
    (lost,) = audit(net, torch.rand(2, 3, 12, 12)).findings
    assert (lost.kind, len(lost.payers)) == ("lost", 1)


def test_a_lazy_model_is_refused():
    with pytest.raises(
        nhwc.InputError, match=r"^0\.weight, 0\.bias of Sequential has no shape yet"
    ):
        audit(nn.Sequential(nn.LazyConv2d(4, 3)), torch.rand(2, 3, 8, 8))


def test_code_of_operators_and_of_python_is_never_the_users():
    """A call of einops is charged to the line of the model, and so is one of Python's own."""
    source = "def rearrange(x):\n    return x.reshape(len(x), -1).view(x.shape)\n"
    einops: dict = {}
    exec(compile(source, "/env/site-packages/einops/einops.py", "exec"), einops)

    class Rearranged(nn.Module):
        def forward(self, x):
            return copy.deepcopy(einops["rearrange"](x)).relu()

    calls = audit(Rearranged(), torch.rand(1, 4, 8, 8)).calls
    assert len(calls) > 2
    assert {call.site.source for call in calls} == {
        'return copy.deepcopy(einops["rearrange"](x)).relu()'
    }


def test_our_own_code_is_never_the_users():
    """What a mended layer does is charged to the line that calls it."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.cat = Cat()

        def forward(self, x):
            return self.cat([x, x])

    report = audit(Joined(), torch.rand(1, 4, 8, 8))
    assert {Path(call.site.file).name for call in report.calls} == {"test_audit.py"}


def test_a_profiler_around_it_is_left_alone():
    net, x = nn.Conv2d(3, 8, 3), torch.rand(1, 3, 8, 8)
    with torch.profiler.profile() as profile:
        with pytest.raises(nhwc.InputError, match="a profiler of torch runs around this call"):
            audit(net, x)
        net(x)
    assert "aten::conv2d" in {event.key for event in profile.key_averages()}


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_strides_are_looked_at_by_their_parts():
    class Held(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.register_buffer("held", held)

        def forward(self, x):
            return x * 2

    x, rows = torch.rand(1, 3, 8, 8), [torch.ones(3, 8, 8), torch.ones(3, 8, 4)]
    for odd in (x.to_mkldnn(), torch.nested.nested_tensor(rows)):
        assert audit(Held(torch.ones(1)), odd).calls
        assert audit(Held(odd), x).calls
        with pytest.raises(nhwc.InputError, match="cannot copy the Held"):
            nhwc.optimize(Held(odd).eval(), x)


class Mixed(nn.Module):
    """A convolution, what `middle` makes of its result with one more image, and a convolution."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


class Called(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


OTHER = torch.rand(2, 8, 16, 16)


@pytest.mark.parametrize("backward", [False, True])
def test_a_product_over_columns_is_charged_with_what_the_next_layer_pays(backward):
    over_columns = Mixed(lambda x: F.linear(x, torch.eye(16)))
    report = audit(over_columns, OTHER, backward=backward)
    (finding,) = [one for one in report.findings if one.kind == "unconverted"]
    assert finding.operator == "torch.nn.functional.linear"
    assert [report.calls[i].operator for i in finding.payers] == ["torch.nn.functional.conv2d"]
    mended = Mixed(lambda x: F.linear(x, torch.eye(16)).to(memory_format=torch.channels_last))
    assert not [f for f in audit(mended, OTHER).findings if "conv2d" in f.operator]


def test_a_product_of_rows_of_channels_keeps_the_format():
    over_channels = Mixed(
        lambda x: F.linear(x.permute(0, 2, 3, 1), torch.eye(8)).permute(0, 3, 1, 2)
    )
    assert audit(over_channels, OTHER).clean


@pytest.mark.parametrize("operator", [torch.add, torch.mul])
def test_the_gradient_of_a_parameter_lies_as_the_parameter_does(operator):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = nn.Parameter(torch.rand(1, 8, 8, 8))

        def forward(self, x):
            return operator(x, self.position)

    net = nhwc.convert_(Between(Positions()))
    assert not audit(net, last(2, 3, 8, 8), backward=True).lost
    with nhwc.strict(net):
        net(last(2, 3, 8, 8)).sum().backward()


@pytest.mark.parametrize(
    "mean", [lambda x: x.mean((2, 3), keepdim=True), lambda x: x.mean(1, keepdim=True)]
)
def test_what_a_mean_spreads_over_an_image_in_the_backward_pass_is_no_loss(mean):
    report = audit(Mixed(lambda x: x * mean(x).sigmoid()), OTHER, backward=True)
    assert report.clean, report.findings


@pytest.mark.parametrize(
    ("middle", "may_swap"),
    [
        (lambda x: OTHER + x, True),
        (lambda x: torch.maximum(OTHER, x), True),
        (lambda x: OTHER - x, False),
        (lambda x: OTHER / x, False),
        (lambda x: OTHER**x, False),
        (lambda x: torch.where(OTHER > 0.5, x, 0.0), False),
        (lambda x: torch.lerp(OTHER, x, 0.5), False),
        (lambda x: torch.atan2(OTHER, x), False),
        (lambda x: OTHER.clamp(max=x), False),
        (lambda x: OTHER // x, False),
    ],
)
def test_operands_are_swapped_only_where_that_changes_nothing(middle, may_swap):
    (lost,) = audit(Mixed(middle), OTHER).lost
    assert "the first, which is contiguous, decided" in lost.remedy
    assert ("Swap them" in lost.remedy) is may_swap


@pytest.mark.parametrize("cut", [lambda x: x[:, :4], lambda x: x[:, 2:6, 1:, ::2]])
@pytest.mark.parametrize(("operator", "lost"), [(F.relu, False), (F.instance_norm, True)])
def test_a_slice_of_what_was_given_is_channels_last_as_that_is(cut, operator, lost):
    net = nn.Sequential(Called(lambda x: operator(cut(x))), nn.Conv2d(4, 4, 3))
    report = audit(net, torch.rand(2, 8, 16, 16))
    assert [(f.kind, len(f.payers)) for f in report.findings] == [("lost", 1)] * lost
    assert report.counts["restores"] == lost
    with pytest.raises(nhwc.FormatLost) if lost else contextlib.nullcontext(), nhwc.strict():
        operator(cut(last(2, 8, 16, 16)))


def _assigned(into, x):
    into[:, 2:6] = x[:, 2:6]


WRITES = {
    "__setitem__": _assigned,
    "copy_": torch.Tensor.copy_,
    "add": lambda into, x: torch.add(x, x, out=into),
    "cat": lambda into, x: torch.cat((x[:, :4], x[:, 4:]), 1, out=into),
    "add_": lambda into, x: into[:, :, 2:6].add_(x[:, :, 2:6]),
    "index_copy_": lambda into, x: into.index_copy_(1, torch.arange(8), x),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_writes_into_a_contiguous_image_converts_until_that_is_made_in_channels_last(name):
    def written(x, format):
        into = torch.empty(x.shape, memory_format=format).zero_()
        WRITES[name](into, x)
        return into.relu()

    def net(format):
        return nn.Sequential(nn.Conv2d(3, 8, 3), Called(lambda x: written(x, format)))

    x = torch.rand(2, 3, 10, 10)
    report = audit(net(torch.contiguous_format), x)
    (converted,) = (f for f in report.findings if f.operator.rpartition(".")[2] == name)
    assert converted.kind == "converted"
    assert "Make that one in channels last" in converted.remedy
    assert audit(net(torch.channels_last), x).clean


@pytest.mark.parametrize(
    "write",
    [
        lambda into, x: into.add_(x.mean((2, 3), keepdim=True)),
        lambda into, x: into.masked_fill_(x > 0, 1),
        lambda into, x: into.scatter_(1, x.argsort(1), 1.0),
        lambda into, x: into.__setitem__(x > 0, 1.0),
        lambda into, x: into.mul_(2),
    ],
)
def test_masks_and_indices_and_gates_are_not_written_into_an_image(write):
    def written(x):
        write(into := torch.zeros(x.shape), x)
        return into

    net = nn.Sequential(nn.Conv2d(3, 8, 3), Called(written))
    assert audit(net, torch.rand(2, 3, 10, 10)).counts["converts"] == 0


def test_what_is_added_to_an_image_that_lost_the_format_is_not_to_blame():
    def added(x):
        y = F.instance_norm(x)
        y += x
        return y

    (lost,) = audit(Between(added), torch.rand(2, 3, 8, 8)).findings
    assert (lost.kind, len(lost.payers)) == ("lost", 1)


def test_what_copies_into_a_contiguous_tensor_is_told_of_that_tensor():
    def copied(x):
        return torch.empty(x.shape).copy_(x)

    converted = next(f for f in audit(Mixed(copied), OTHER).findings if f.kind == "converted")
    assert "Make that one in channels last" in converted.remedy


@pytest.mark.parametrize(
    ("made", "may_be_made_so"),
    [
        (lambda x: torch.zeros(x.shape), True),
        (lambda x: x.new_zeros(x.shape), True),
        (lambda x: torch.bmm(x.flatten(2), torch.eye(256).expand(2, -1, -1)).view(x.shape), False),
    ],
)
def test_only_what_fills_a_new_tensor_can_make_it_so(made, may_be_made_so):
    model = Mixed(made).to(memory_format=torch.channels_last)
    image = OTHER.to(memory_format=torch.channels_last)
    said = [f.remedy for f in audit(model, image).findings if "Convert its result" in f.remedy]
    assert ["torch.empty(" in one for one in said] == [may_be_made_so]


def test_what_the_backward_pass_copies_is_no_line_to_drop():
    report = audit(Mixed(F.instance_norm), OTHER, backward=True)
    (clone,) = (f for f in report.findings if f.operator == "aten::clone")
    assert "The backward pass `clone` returns a contiguous gradient" in clone.remedy


def test_a_copy_in_a_backward_of_the_users_own_can_be_dropped():
    class Copies(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient.contiguous() * 2

    report = audit(Mixed(Copies.apply), OTHER, backward=True)
    (copied,) = (f for f in report.findings if f.site.source.startswith("return gradient"))
    assert copied.remedy.startswith("If this line is in a backward of your own, drop its copy.")


@pytest.mark.parametrize("size", [(0,), (2, 0, 8, 8)])
@pytest.mark.parametrize("mark", [nhwc.to_format, lambda x, format: x])
def test_an_empty_tensor_is_to_be_left_out_of_a_cat(size, mark):
    def joined(x):
        empty = torch.empty(size)
        return torch.cat([mark(empty, Format.CHANNELS_LAST) if len(size) == 4 else empty, x], 1)

    x = torch.rand(2, 8, 8, 8)
    (lost,) = audit(Mixed(joined), x).lost
    assert "input 1 of 2 is empty" in lost.remedy
    assert "Leave it out of the list" in lost.remedy
    assert not audit(Mixed(lambda x: torch.cat([x], 1)), x).lost


def test_layers_of_a_sequential_are_known_by_their_names():
    norms = nn.Sequential(nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8), nn.InstanceNorm2d(8))
    lost = audit(norms, OTHER).lost
    assert [(f.site.module, f.site.file) for f in lost][:1] == [("1", "")]


def test_a_convolution_called_by_keywords_in_any_order_is_judged_by_its_image():
    class Keywords(nn.Conv2d):
        def forward(self, x):
            weight = self.weight.reshape(8, -1).softmax(1).reshape(self.weight.shape)
            return F.conv2d(weight=weight, bias=self.bias, input=x)

    net = nn.Sequential(nn.Conv2d(3, 8, 3), Keywords(8, 8, 3))
    (finding,) = audit(net, torch.rand(2, 3, 12, 12)).findings
    assert "copies its weight" in finding.remedy


@pytest.mark.parametrize("in_autocast", [True, False])
def test_the_gradient_of_a_weight_that_autocast_made_is_no_image(in_autocast):
    class Half(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=in_autocast):
                return super().forward(x)

    net = Half(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    assert audit(net, torch.rand(2, 3, 16, 16), backward=True).clean


def test_a_copy_in_a_hook_on_a_gradient_is_charged_to_the_line_of_the_hook():
    def hooked(x):
        y = x.relu()
        y.register_hook(lambda gradient: gradient.contiguous())
        return y

    report = audit(Mixed(hooked), OTHER, backward=True)
    (copied,) = report.findings
    assert copied.site.source == "y.register_hook(lambda gradient: gradient.contiguous())"


def test_the_operand_that_decides_is_the_second_where_torch_swaps_them():
    (lost,) = audit(Mixed(lambda x: torch.rsub(x, OTHER)), OTHER).lost
    assert "the second, which is contiguous, decided. Convert that one" in lost.remedy


@pytest.mark.parametrize(("taken", "busy"), [(0.1, False), (2.0, True), (None, False)])
def test_an_audit_says_that_others_had_the_cores(monkeypatch, taken, busy):
    """Whatever the machine does meanwhile: the report says what was seen."""
    others = None if taken is None else Others(taken, torch.get_num_threads())
    monkeypatch.setattr(_audit, "watch_others", lambda: lambda: others)
    report = audit(nn.Conv2d(3, 8, 3), torch.rand(2, 3, 8, 8))
    text = " ".join(audit_text(report).split())
    assert (report.busy, " a run on a busy machine, " in text) == (busy, busy)
    told = report.to_dict()
    assert told["busy"] is busy
    assert told["others"] == (others and {"taken": taken, "cores": torch.get_num_threads()})
