import py_compile
import re
import struct
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
from torch import nn

import nhwc
from nhwc.zoo import load_model, load_weights_, randomize_batchnorm_, randomize_constants_
from nhwc.zoo.definitions import definition_of


@pytest.mark.parametrize("name", ["squeezenet1_1", "torchvision:squeezenet1_1", "timm:resnet10t"])
def test_names(name):
    model = load_model(name)
    assert not model.training
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 1000)


def test_a_path_is_a_name_and_a_number_is_none(tmp_path):
    nhwc.save(nhwc.fuse(nn.Sequential(nn.Conv2d(3, 4, 1)).eval()), tmp_path / "net.nhwc")
    assert load_model(tmp_path / "net.nhwc")(torch.rand(1, 3, 2, 2)).shape == (1, 4, 2, 2)
    with pytest.raises(nhwc.InputError, match=r"names a file. Add the callable: .*net.py:NAME"):
        load_model(tmp_path / "net.py")
    with pytest.raises(nhwc.InputError, match=r"^3 is no name of a model"):
        load_model(3)


def test_the_seed_decides_the_weights_and_nothing_else_moves():
    before = torch.get_rng_state()
    one, two, three = (load_model("squeezenet1_1", seed=s).state_dict() for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert not torch.equal(one["features.0.weight"], three["features.0.weight"])


def test_detection_models_build_without_a_download():
    assert isinstance(load_model("ssdlite320_mobilenet_v3_large"), nn.Module)


def test_torchvision_is_usable_after_us_for_everybody():
    code = (
        "from nhwc.models.vision import import_torchvision; tv = import_torchvision(); "
        "import torchvision.models; print(tv is torchvision)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_file_may_import_its_neighbours(tmp_path):
    (tmp_path / "parts_of_it.py").write_text("from torch import nn\nclass Part(nn.Conv2d): pass\n")
    (tmp_path / "whole.py").write_text(
        "from parts_of_it import Part\ndef net(): return Part(3, 4, 3)\n"
    )
    assert isinstance(load_model(f"{tmp_path}/whole.py:net"), nn.Conv2d)


def test_a_file_that_cannot_be_run(tmp_path):
    (tmp_path / "wrong.py").write_text("1/0")
    with pytest.raises(nhwc.ModelNotFound, match="ZeroDivisionError: division by zero"):
        load_model(f"{tmp_path}/wrong.py:net")
    with pytest.raises(nhwc.ModelNotFound, match="Add the callable"):
        load_model(f"{tmp_path}/wrong.py")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("os.path:join", "os.path:join raised TypeError: join.. missing 1 required positional"),
        ("there/is/none", "^no such file: there/is/none.$"),
        ("none.nhwc", "^no such file: none.nhwc.$"),
        ("/dev/null", "^/dev/null is no file. Name a saved model, or file.py:callable.$"),
        ("resnet1", r"did you mean resnet18, resnet152, resnet101\? timm has no"),
        ("torchvision:nothing_like_it", "^torchvision has no 'nothing_like_it'.$"),
        ("nets.py:", "^'nets.py:' has nothing after its colon. Write torchvision:NAME"),
        ("timm:", "^'timm:' has nothing after its colon"),
        (":net", "^':net' has nothing before its colon"),
    ],
)
def test_names_that_lead_nowhere(name, says):
    with pytest.raises(nhwc.InputError, match=says):
        load_model(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("script.pt", r"is a TorchScript archive, which holds code: load .* torch\.jit\.load\('"),
        ("program.pt2", r"is an exported program, .* torch\.export\.load\('"),
        ("weights.pt", r"with weights or a pickled model: .* --weights .*weights\.pt\.$"),
        ("model.pth", "with weights or a pickled model"),
        ("old.pt", "with weights or a pickled model"),
        ("weights.safetensors", r"is a file of weights \(safetensors\) without a model: name the"),
        ("model.onnx", "is an ONNX model: name the PyTorch model that it was exported from"),
        ("text.txt", "is no model saved by nhwc"),
    ],
)
def test_files_of_other_kinds_are_refused_by_their_kind(tmp_path, name, says):
    net, path = nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), tmp_path / name
    if name == "script.pt":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(torch.jit.script(net), path)
    elif name == "program.pt2":
        torch.export.save(torch.export.export(net, (torch.rand(1, 3, 8, 8),)), path)
    elif name == "weights.safetensors":
        header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    elif path.suffix in (".pt", ".pth"):
        saved = net if name == "model.pth" else net.state_dict()
        torch.save(saved, path, _use_new_zipfile_serialization=name != "old.pt")
    else:
        path.write_bytes(b"\x08\x08pytorch")
    with pytest.raises(nhwc.ModelNotFound, match=says) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import sys; sys.exit(3)", "could not be run: SystemExit: 3"),
        ("x = 1\nraise ValueError('one\\ntwo')", r"ValueError: one two \(.*broken.py, line 2\)\.$"),
        ("def net(: pass", "could not be run: SyntaxError"),
        ("def net(): raise SystemExit('bye')", "raised SystemExit: bye"),
        (
            "def net():\n    raise ValueError('one\\ntwo')",
            r"one two \(.*broken.py, line 2\)\. Name",
        ),
        ("import torch\ndef net():\n    return torch.nn.Conv2d(3, 8, 3, groups=2)", "line 3"),
        ("def net(size): pass", "missing 1 required positional argument: 'size'. Name a callable"),
        ("def net(): pass", "returned NoneType, not a torch.nn.Module"),
        ("async def net(): pass", "returned coroutine, not a torch.nn.Module"),
        ("net = 3", "has no callable 'net'"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_said_in_one_line(tmp_path, body, says):
    (tmp_path / "broken.py").write_text(body)
    with pytest.raises(nhwc.InputError, match=says) as caught:
        load_model(f"{tmp_path}/broken.py:net")
    assert "\n" not in str(caught.value)


def test_a_folder_is_called_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models", f"{tmp_path}/models"):
        with pytest.raises(nhwc.ModelNotFound, match=r"models is a folder\. Name a saved model"):
            load_model(name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(nhwc.ModelNotFound, match=r"Name a file in it: models/FILE\.py:tiny\."):
        load_model("models:tiny")
    with pytest.raises(nhwc.ModelNotFound, match=r"^no model named ''"):
        load_model("")


def test_a_package_that_breaks_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(nhwc.ModelNotFound, match=r"cannot import .* ZeroDivisionError: division"):
        load_model("broken_package:net")


def test_what_a_users_file_prints_is_no_data(tmp_path, capsys):
    (tmp_path / "chatty.py").write_text(
        "from torch import nn\nprint('one')\ndef net(): print('two'); return nn.ReLU()\n"
    )
    load_model(f"{tmp_path}/chatty.py:net")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "one\ntwo\n")


def test_what_a_package_of_models_prints_is_no_data(tmp_path, monkeypatch, capsys):
    (tmp_path / "timm.py").write_text(
        "from torch import nn\nprint('welcome')\ndef is_model(name): return True\n"
        "def create_model(name, pretrained): return nn.ReLU()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    load_model("timm:net")
    assert capsys.readouterr() == ("", "welcome\n")
    del sys.modules["timm"]


@pytest.mark.parametrize("made", ["", ".module()"])
def test_a_function_may_load_an_exported_program(tmp_path, made):
    net, x = nn.Conv2d(3, 4, 3), torch.rand(1, 3, 8, 8)
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "program.pt2")
    (tmp_path / "loads.py").write_text(
        f"import torch\ndef net(): return torch.export.load('{tmp_path}/program.pt2'){made}\n"
    )
    model = load_model(f"{tmp_path}/loads.py:net")
    torch.testing.assert_close(model(x), net(x))


def test_a_compiled_module_has_no_line_that_defines_a_model(tmp_path, monkeypatch):
    (tmp_path / "only_code.py").write_text("from torch import nn\nnet = nn.ReLU\n")
    py_compile.compile(tmp_path / "only_code.py", tmp_path / "only_code.pyc")
    (tmp_path / "only_code.py").unlink()
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(nhwc.load_model("only_code:net"), nn.ReLU)
    assert definition_of("only_code:net") is None


def test_a_model_of_a_file_may_stand_there_made(tmp_path):
    (tmp_path / "made.py").write_text("from torch import nn\nnet = nn.Conv2d(3, 4, 3)\n")
    assert isinstance(load_model(f"{tmp_path}/made.py:net"), nn.Conv2d)


@pytest.mark.parametrize(
    ("name", "absent", "says"),
    [
        ("timm:resnet18", ["timm", "torchvision"], "timm"),
        ("timm:resnet18", ["timm"], "timm"),
        ("torchvision:resnet18", ["torchvision"], "torchvision"),
        ("resnet18", ["timm", "torchvision"], "torchvision"),
    ],
)
def test_a_missing_extra_is_named_once(monkeypatch, name, absent, says):
    for package in absent:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(nhwc.MissingPackage) as caught:
        load_model(name)
    assert str(caught.value) == f"{says} is not installed: pip install 'nhwc[zoo]'."


def test_weights(tmp_path):
    net = nn.Conv2d(3, 4, 3)
    torch.save({"state_dict": net.state_dict()}, tmp_path / "w.pt")
    other = load_weights_(nn.Conv2d(3, 4, 3), tmp_path / "w.pt")
    torch.testing.assert_close(other.state_dict(), net.state_dict())
    with pytest.raises(nhwc.InputError, match="does not fit the model: size mismatch"):
        load_weights_(nn.Conv2d(3, 5, 3), tmp_path / "w.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(nhwc.InputError, match=r"text.pt is no file of plain tensors\. Save it"):
        load_weights_(net, tmp_path / "text.pt")
    with pytest.raises(nhwc.InputError, match=r"is a folder\. Name the file of weights in it"):
        load_weights_(net, tmp_path)
    nhwc.save(net, tmp_path / "model.nhwc")
    with pytest.raises(nhwc.InputError, match=r"saved by nhwc\. Name it in place of the model"):
        load_weights_(net, tmp_path / "model.nhwc")


@pytest.mark.parametrize(
    "wrapper", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
)
def test_weights_of_a_wrapped_model(tmp_path, wrapper):
    """DistributedDataParallel and torch.compile write their own name before each of them."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    wrapped = {wrapper + name: tensor for name, tensor in net.state_dict().items()}
    torch.save(wrapped, tmp_path / "w.pt")
    other = load_weights_(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), tmp_path / "w.pt")
    torch.testing.assert_close(other.state_dict(), net.state_dict())


def test_names_that_are_the_models_own_stay(tmp_path):
    net = nn.ModuleDict({"module": nn.Conv2d(3, 4, 3)})
    torch.save(net.state_dict(), tmp_path / "w.pt")
    other = load_weights_(nn.ModuleDict({"module": nn.Conv2d(3, 4, 3)}), tmp_path / "w.pt")
    torch.testing.assert_close(other.state_dict(), net.state_dict())


def test_weights_of_another_model_are_refused_in_a_line_that_can_be_read(tmp_path):
    torch.save({f"layer.{i}.weight": torch.zeros(1) for i in range(1000)}, tmp_path / "w.pt")
    with pytest.raises(
        nhwc.InputError, match=r"Unexpected key.*\.\.\. Give weights of this"
    ) as one:
        load_weights_(nn.Conv2d(3, 4, 3), tmp_path / "w.pt")
    assert len(str(one.value)) < 600


def test_a_name_of_weights_in_several_lines_is_told_in_one(tmp_path):
    torch.save({"weight\nand\x1b[2Jmore": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(nhwc.InputError, match=r'Unexpected .* "weight and.x1b\[2Jmore"\. Give'):
        load_weights_(nn.Conv2d(3, 4, 3), tmp_path / "w.pt")


@pytest.mark.parametrize("name", [3, None, ("a", "weight")])
def test_a_name_of_weights_that_is_no_text_is_told(tmp_path, name):
    torch.save({"weight": torch.ones(1), name: torch.ones(1)}, tmp_path / "w.pt")
    with pytest.raises(nhwc.InputError, match=f"it has {re.escape(repr(name))} where a weight has"):
        load_weights_(nn.Conv2d(3, 4, 3), tmp_path / "w.pt")


@pytest.mark.parametrize("kind", [torch.complex64, torch.int8, torch.bool])
def test_weights_that_a_cast_would_spoil_are_refused(tmp_path, kind):
    net = nn.BatchNorm2d(4)
    torch.save(net.state_dict() | {"weight": net.weight.detach().to(kind)}, tmp_path / "w.pt")
    with pytest.raises(nhwc.InputError, match=f"weight is {kind} there and torch.float32 in the"):
        load_weights_(nn.BatchNorm2d(4), tmp_path / "w.pt")


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16, torch.int64])
def test_weights_of_another_precision_are_cast(tmp_path, kind):
    net = nn.BatchNorm2d(4)
    torch.save({name: one.to(kind) for name, one in net.state_dict().items()}, tmp_path / "w.pt")
    assert torch.equal(load_weights_(nn.BatchNorm2d(4), tmp_path / "w.pt").weight, net.weight)


def test_compiled_weights_are_refused_without_a_warning(tmp_path):
    torch.jit.script(nn.Conv2d(3, 4, 3)).save(tmp_path / "script.pt")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(nhwc.InputError, match=r"\(a TorchScript archive, which holds code\)"):
            load_weights_(nn.Conv2d(3, 4, 3), tmp_path / "script.pt")
    assert not warned


def test_weights_of_safetensors(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    net = nn.Conv2d(3, 4, 3)
    files.save_file(net.state_dict(), tmp_path / "weights.safetensors")
    other = load_weights_(nn.Conv2d(3, 4, 3), tmp_path / "weights.safetensors")
    torch.testing.assert_close(other.state_dict(), net.state_dict())
    cut, whole = tmp_path / "cut.safetensors", (tmp_path / "weights.safetensors").read_bytes()
    for damaged in (whole[:-4], b"", b"\xff" * 8 + whole[8:]):
        cut.write_bytes(damaged)
        with pytest.raises(nhwc.InputError, match=r"damaged file of safetensors\. Copy it again"):
            load_weights_(net, cut)


def test_an_archive_whose_names_are_no_text_is_no_model_and_no_weights(tmp_path):
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("é/data.pkl", "")
    path.write_bytes(path.read_bytes().replace("é".encode(), b"\xff\xfe"))
    with pytest.raises(nhwc.ModelNotFound, match="is no model saved by nhwc"):
        load_model(str(path))
    with pytest.raises(nhwc.InputError, match="is no file of plain tensors"):
        load_weights_(nn.Conv2d(3, 4, 3), path)


def test_a_path_that_no_file_can_have_is_refused():
    with pytest.raises(nhwc.ModelNotFound):
        load_model("a\0b.nhwc")
    with pytest.raises(nhwc.InputError, match="is no file of plain tensors"):
        load_weights_(nn.Conv2d(3, 4, 3), "a\0b")


def test_what_begins_as_one_number_shows_errors_afterwards():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.scale = nn.LayerNorm(64), nn.Parameter(torch.full((64,), 1e-6))
            self.head, self.lazy = nn.Linear(64, 64), nn.LazyLinear(3)

    torch.manual_seed(0)
    net, again = Net(), Net()
    for one in (net, again):
        nn.init.zeros_(one.head.weight)
        kept = one.head.bias.clone()
        randomize_constants_(one)
        assert torch.equal(one.head.bias, kept)
        assert 0.1 < one.norm.weight.std() < 0.4
        assert abs(one.norm.weight.mean() - 1) < 0.1
        assert all(p.std() > 0.05 for p in (one.norm.bias, one.scale, one.head.weight))
    assert torch.equal(net.head.weight, again.head.weight)


def test_random_batch_norm_statistics():
    net = randomize_batchnorm_(nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm1d(8, affine=False)))
    assert net[0].running_var.std() > 0.1
    assert net[0].weight.std() > 0.1
    assert net[1].running_mean.std() > 0.01
    again = randomize_batchnorm_(nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm1d(8, affine=False)))
    torch.testing.assert_close(net.state_dict(), again.state_dict())


class Gated(nn.Module):
    """Thirty blocks that add to their input what a gate lets through, and a norm used twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
            for _ in range(30)
        )
        self.gates = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(30))
        self.twice, self.unused = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        for block, gate in zip(self.blocks, self.gates, strict=True):
            y = block(x) * 3
            x = x + y * torch.sigmoid(gate(y.mean((2, 3), keepdim=True)))
        return self.twice(self.twice(x).relu())


def test_statistics_near_those_of_a_run_keep_numbers_in_bounds():
    image = torch.randn(1, 8, 8, 8)
    net, again, other = (Gated().eval() for _ in range(3))
    for one in (again, other):
        one.load_state_dict(net.state_dict())
    randomize_batchnorm_(net, inputs=[image])
    randomize_batchnorm_(again, inputs=[image])
    torch.testing.assert_close(net.state_dict(), again.state_dict(), rtol=0, atol=0)
    randomize_batchnorm_(other)
    assert torch.equal(other.unused.running_var, net.unused.running_var)
    assert net(image).abs().max() < 100
    drawn = net.blocks[3][1].running_var / net.blocks[3][1].running_var.mean()
    assert drawn.std() > 0.1
    assert not any(module._forward_pre_hooks for module in net.modules())


@torch.no_grad()
def test_a_channel_that_hardly_varies_is_not_blown_up():
    image = torch.randn(1, 8, 8, 8)
    image[:, 3] = 2 + 1e-5 * image[:, 3]
    net = nn.Sequential(nn.BatchNorm2d(8)).eval()
    answer = randomize_batchnorm_(net, inputs=[image])(image)
    assert answer[:, 3].std() < 1e-3 * answer[:, 2].std()
    torch.testing.assert_close(answer, net.double()(image.double()).float())


def test_a_channel_of_one_number_has_no_statistics():
    net = randomize_batchnorm_(
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8)).eval(),
        inputs=[torch.randn(1, 8, 4, 4)],
    )
    assert torch.equal(net[1].running_var, randomize_batchnorm_(nn.BatchNorm2d(8)).running_var)


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbfimport torch\n\ndef net(): ...\n",
        b"# coding: latin-1\n\xe9 = 1\ndef net(): ...\n",
        b"text = '\xe2\x80\xa8'\n\x0c\ndef net(): ...\n",
    ],
    ids=["mark", "latin-1", "separators"],
)
def test_the_line_of_a_definition_is_found_as_python_reads_the_file(source, tmp_path):
    file = tmp_path / "net.py"
    file.write_bytes(source)
    site = definition_of(f"{file}:net")
    assert (site.line, site.source) == (3, "def net(): ...")
