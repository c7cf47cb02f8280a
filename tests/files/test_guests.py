"""Saved models that call functions of torchvision, timm and einops: by name from one table."""

import importlib
import sys

import einops
import pytest
import torch
from einops import rearrange
from einops.layers.torch import Rearrange, Reduce
from torch import nn

import nhwc
from nhwc import FileError
from nhwc.files.container import read, write
from nhwc.files.guests import GUESTS, guest, guest_name
from nhwc.files.serial import restore
from nhwc.models.vision import import_torchvision
from nhwc.zoo import load_model, randomize_batchnorm_

from ..fusing import script
from ..optimizing import force

import_torchvision()
timm_layers = pytest.importorskip("timm.layers")


@pytest.mark.parametrize("home", GUESTS)
def test_each_name_of_the_table_is_a_function_there(home):
    module = importlib.import_module(home)
    for name in GUESTS[home].split():
        function = getattr(module, name)
        assert guest_name(function) == f"{home}.{name}"
        assert guest(f"{home}.{name}") is function


def test_whatever_timm_declares_untraceable_and_a_graph_may_call_is_a_guest():
    importlib.import_module("timm")
    declared = importlib.import_module("timm.layers._fx").get_notrace_functions()
    others = {function.__name__ for function in declared if guest_name(function) is None}
    # A dtype, a part of another one, and those of a model that takes its images in pieces.
    assert others == {
        *("_freq_buffer_dtype", "_apply_coord_augs"),
        *("create_attention_mask", "global_pool_naflex"),
    }


def test_no_other_function_is_a_guest():
    assert guest_name(timm_layers.create_conv2d) is None
    for name in ("timm.create_model", "os.system", "timm.layers.padding.math", "pad_same", ""):
        assert guest(name) is None


class Same(nn.Module):
    """A convolution padded as TensorFlow does, and an argument that nobody passes."""

    def __init__(self):
        super().__init__()
        self.conv = timm_layers.Conv2dSame(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x, mask=None):
        y = self.norm(self.conv(x))
        return y if mask is None else y * mask


@torch.no_grad()
def test_same_padding_is_a_call_around_which_a_batch_norm_is_folded(tmp_path):
    model = randomize_batchnorm_(Same()).eval()
    fused = nhwc.fuse(model)
    assert (len(fused.report.applied), fused.report.opaque) == (1, ())
    nhwc.save(fused, tmp_path / "same.nhwc")
    scripted = script(fused)
    for side in (7, 8):
        x = torch.randn(1, 3, side, side)
        torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(nhwc.load(tmp_path / "same.nhwc")(x), fused(x))
        assert torch.equal(scripted(x), fused(x))


class Patches(nn.Module):
    """Tokens and back, by functions of einops, by its layers, and by sizes that it reads."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.tokens, self.pooled = Rearrange("b c h w -> b (h w) c"), Reduce("b n c -> b c", "mean")
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        h, w = x.shape[2:]
        tokens = self.mix(self.tokens(self.norm(self.conv(x)).relu()))
        heads = rearrange(tokens, "b n (g d) -> b g n d", g=4)
        scores = einops.einsum(heads, heads, "b g n d, b g m d -> b g n m").softmax(-1)
        tokens = rearrange(scores @ heads, "b g n d -> b n (g d)")
        image = rearrange(tokens, "b (h w) c -> b c h w", h=h, w=w)
        half = einops.reduce(image, "b c (h 2) (w 2) -> b c h w", "max")
        return half, einops.repeat(self.pooled(tokens), "b c -> b c k", k=2)


@torch.no_grad()
def test_functions_and_layers_of_einops_are_calls_around_which_a_batch_norm_is_folded(tmp_path):
    model = randomize_batchnorm_(Patches()).eval()
    kinds = [type(part) for part in model.modules()]
    fused = nhwc.fuse(model)
    assert (len(fused.report.applied), fused.report.opaque) == (1, ())
    assert [type(part) for part in model.modules()] == kinds
    fast = nhwc.optimize(model, torch.randn(1, 3, 8, 8))
    nhwc.save(fast, tmp_path / "patches.nhwc")
    loaded = nhwc.load(tmp_path / "patches.nhwc")
    for sides in ((8, 8), (6, 10)):
        x = torch.randn(2, 3, *sides)
        for one in (fused, fast, loaded):
            torch.testing.assert_close(one(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("later", [False, True])
def test_what_is_written_through_a_view_by_einops_is_seen(later):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x):
            y = self.conv(x)
            view = rearrange(y, "b c h w -> b h w c")
            z = self.norm(y) if later else None
            view.mul_(2)
            return (z, y, view) if later else self.norm(y)

    model, x = randomize_batchnorm_(Written()).eval(), torch.randn(2, 3, 8, 8)
    for one in (nhwc.fuse(model), nhwc.optimize(model, x)):
        torch.testing.assert_close(one(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_file_gives_a_function_of_einops_no_keywords_but_the_axes_of_its_pattern(tmp_path):
    path = tmp_path / "patches.nhwc"
    nhwc.save(Patches().eval(), path)
    header, tensors = read(path)
    called = next(n for n in header["nodes"] if n["kwargs"]["dict"] and "einops" in n["target"])
    called["kwargs"]["dict"] = [["q", 4]]
    write(path, header, tensors)
    with pytest.raises(FileError, match="rearrange with 'q'"):
        nhwc.load(path)


@torch.no_grad()
def test_a_transformer_of_torchvision_comes_back(tmp_path):
    model = load_model("swin_t")
    nhwc.save(model, tmp_path / "swin.nhwc")
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(nhwc.load(tmp_path / "swin.nhwc")(x), model(x))


@torch.no_grad()
def test_a_function_that_is_closed_in_the_file_is_open_in_the_plan(tmp_path):
    from torchvision.models.swin_transformer import SwinTransformer

    windows = SwinTransformer([4, 4], 32, [2], [2], [4, 4], num_classes=10).eval()
    x = torch.randn(2, 3, 32, 32)
    nhwc.save(force(windows, x), tmp_path / "windows.nhwc")
    loaded = nhwc.load(tmp_path / "windows.nhwc")
    called = [str(node.target) for node in loaded.recipes[0].graph.graph.nodes]
    assert not any("shifted_window_attention" in target for target in called)
    assert any("shifted_window_attention" in str(n.target) for n in loaded.portable.graph.nodes)
    torch.testing.assert_close(loaded(x), windows(x), rtol=1e-5, atol=1e-5)
    other = torch.randn(1, 3, 48, 64)
    torch.testing.assert_close(loaded(other), windows(other), rtol=1e-5, atol=1e-5)
    # The plan of a graph for its sizes ends with its weights.
    loaded.portable.get_submodule("head").bias.add_(1)
    with pytest.warns(UserWarning, match="the plan for 2x3x32x32 float32 is dropped"):
        found = loaded(x)
    torch.testing.assert_close(found, windows(x) + 1, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_so_is_one_that_writes_into_a_list_that_it_is_given(tmp_path):
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    clips = SwinTransformer3d([2, 4, 4], 16, [2], [2], [4, 4, 4], num_classes=5).eval()
    x = torch.randn(1, 3, 4, 16, 16)
    nhwc.save(force(clips, x), tmp_path / "clips.nhwc")
    loaded = nhwc.load(tmp_path / "clips.nhwc")
    assert [recipe.inputs for recipe in loaded.recipes] == [("1x3x4x16x16 float32",)]
    torch.testing.assert_close(loaded(x), clips(x), rtol=1e-5, atol=1e-5)


def test_without_the_package_the_file_says_what_to_install(tmp_path, monkeypatch):
    nhwc.save(Same().eval(), tmp_path / "same.nhwc")
    monkeypatch.setitem(sys.modules, "timm.layers.padding", None)
    with pytest.raises(FileError, match=r"calls timm.layers.padding.pad_same. Install timm"):
        nhwc.load(tmp_path / "same.nhwc")


def test_a_function_from_elsewhere_is_refused(tmp_path):
    path = tmp_path / "same.nhwc"
    nhwc.save(Same().eval(), path)
    header, tensors = read(path)
    assert restore(header, tensors)
    for node in header["nodes"]:
        node["target"] = node["target"].replace("timm.layers.padding.pad_same", "os.system")
    write(path, header, tensors)
    with pytest.raises(FileError, match=r"the function 'os\.system'"):
        nhwc.load(path)
