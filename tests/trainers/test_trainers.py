"""Channels last in the loops of Lightning, transformers and accelerate, with the real packages."""

import copy
import doctest
import importlib
import logging
import os
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader

import nhwc
from nhwc import Format, format_of
from nhwc.models.vision import mend_torchvision

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own


@pytest.fixture(autouse=True, scope="module")
def _torchvision():
    """What these packages import may not match torch, and dies at import."""
    mend_torchvision()


LOSES = {"torch.cat", "autograd::slice_backward"}


class Slices(nn.Module):
    """Loses the format forward at `cat`, and backward at the slices of channels."""

    def __init__(self, loses=True, raises=False):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.loses, self.raises, self.seen = loses, raises, []

    def forward(self, pixel_values, labels=None):
        self.seen.append(format_of(pixel_values))
        x = self.first(pixel_values)
        if self.raises:
            raise RuntimeError("a mishap")
        if self.loses:
            plain = x[:, :4].contiguous()
            x = torch.cat([plain, x[:, 4:]], 1)
        logits = self.second(x).mean((2, 3))
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def samples(count=8):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, 12, 12, generator=generator)
    return [{"pixel_values": image, "labels": n % 8} for n, image in enumerate(pixels)]


def check(net, step):
    last = Format.CHANNELS_LAST
    assert {*net.seen} == {last}
    assert format_of(net.second.weight) is last
    assert (step.weights, step.checked) == (2, 2)
    assert step.gradients == step.states == ()
    behind = [call for call in step.audit.calls if call.backward]
    assert {"autograd::convolution_backward"} <= {call.operator for call in behind}
    convolved = [call for call in step.audit.calls if "conv" in call.operator]
    assert {(call.site.file, call.site.module.rpartition(".")[2]) for call in convolved} == {
        (__file__, "first"),
        (__file__, "second"),
    }
    assert {finding.operator for finding in step.audit.lost} == (LOSES if net.loses else set())
    assert _get_current_function_mode_stack() == []
    assert "torch.cat" in step._repr_html_() or step.clean


@pytest.fixture(params=["lightning", "pytorch_lightning"])
def lightning(request):
    """Makes a module, a trainer that says nothing else, and the callback in it."""
    pytest.importorskip(request.param)
    home = "lightning.pytorch" if request.param == "lightning" else request.param
    package = importlib.import_module(home)
    ours = importlib.import_module(f"nhwc.trainers.{request.param}")

    class Plain(package.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, index):
            self.net(**batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def made(strategy="auto"):
        callback = ours.ChannelsLast()
        trainer = package.Trainer(
            max_steps=3, callbacks=[callback], logger=False, enable_checkpointing=False, devices=1,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
            strategy=strategy,
        )  # fmt: skip
        return Plain, trainer, callback, home

    before = dict(os.environ)
    yield made
    # It leaves the ranks of its processes there.
    os.environ.clear()
    os.environ.update(before)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
@pytest.mark.parametrize("loses", [True, False])
def test_lightning(lightning, loses, strategy, caplog):
    plain, trainer, callback, home = lightning(strategy)
    net, loader = Slices(loses), DataLoader(samples(), 2)
    logging.getLogger(home).propagate = True
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(plain(net), loader, loader)
    assert not [one for one in warned if "Grad strides" in str(one.message)]
    check(net, callback.first_step)
    said = [record.getMessage() for record in caplog.records if "nhwc: " in record.getMessage()]
    assert len(said) == 1
    assert ("did not keep the format" in said[0]) == loses


def test_lightning_leaves_no_mode_where_the_model_raises(lightning):
    plain, trainer, callback, _ = lightning()
    with pytest.raises(RuntimeError, match="a mishap"):
        trainer.fit(plain(Slices(raises=True)), DataLoader(samples(), 2))
    assert _get_current_function_mode_stack() == []
    assert callback.first_step is None


class Narrowing(Slices):
    """Its first layer's weight gradient is one that torch writes past its memory."""

    def __init__(self):
        super().__init__(loses=False)
        self.first = nn.Conv2d(3, 8, 1, stride=2)


REFUSED = r"weight gradient of (net\.)?first past its memory .* Train in mixed precision, or"


def test_lightning_does_not_train_what_would_spoil_memory(lightning):
    plain, trainer, callback, _ = lightning()
    net = Narrowing()
    with pytest.raises(nhwc.InputError, match=REFUSED):
        trainer.fit(plain(net), DataLoader(samples(), 2))
    assert (callback.first_step, len(net.first._forward_pre_hooks)) == (None, 0)
    net.first.requires_grad_(False)
    trainer.fit(plain(net), DataLoader(samples(), 2), DataLoader(samples(), 2))
    assert callback.first_step is not None
    assert not net.first._forward_pre_hooks


def test_lightning_sees_what_is_compiled(lightning):
    plain, trainer, callback, _ = lightning()
    net = Slices()
    trainer.fit(torch.compile(plain(net), backend="eager"), DataLoader(samples(), 2))
    assert {finding.operator for finding in callback.first_step.audit.lost} == LOSES
    torch.compiler.reset()


def hugging_face(net, folder):
    """A Trainer with the callback for it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from nhwc.trainers.transformers import ChannelsLast

    callback = ChannelsLast()
    options = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=3, gradient_accumulation_steps=2,
        use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    data = samples()
    return transformers.Trainer(net, options, train_dataset=data, callbacks=[callback]), callback


@pytest.mark.parametrize("loses", [True, False])
def test_transformers(loses, tmp_path, capsys):
    net = Slices(loses)
    trainer, callback = hugging_face(net, tmp_path)
    trainer.train()
    check(net, callback.first_step)
    assert capsys.readouterr().err.count("convolution weights are channels last") == 1
    assert not net._forward_pre_hooks
    assert not net._forward_hooks


def test_transformers_leaves_no_mode_where_the_model_raises(tmp_path):
    trainer, callback = hugging_face(Slices(raises=True), tmp_path)
    with pytest.raises(RuntimeError, match="a mishap"):
        trainer.train()
    assert _get_current_function_mode_stack() == []
    assert callback.first_step is None


def test_transformers_does_not_train_what_would_spoil_memory(tmp_path):
    net = Narrowing()
    trainer, _ = hugging_face(net, tmp_path)
    with pytest.raises(nhwc.InputError, match=REFUSED):
        trainer.train()
    net.first.requires_grad_(False)
    trainer.train()
    assert not net.first._forward_pre_hooks


@pytest.fixture
def accelerate():
    """The package without what it keeps of other tests for the process."""
    package = pytest.importorskip("accelerate")

    def reset():
        package.state.AcceleratorState._reset_state(True)
        package.state.GradientState._reset_state()

    reset()
    yield package
    reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_accelerate(compiled, accelerate, capsys):
    from nhwc.trainers.accelerate import ChannelsLast

    net, more = Slices(), {"dynamo_backend": "eager"} if compiled else {}
    channels_last = ChannelsLast(accelerate.Accelerator(cpu=True, **more))
    optimizer = torch.optim.AdamW(net.parameters())
    parts = (net, optimizer, DataLoader(samples(), 2))
    model, optimizer, loader = channels_last.prepare(*parts)
    for batch in loader:
        loss = model(**batch)["loss"]
        channels_last.accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    (step,) = channels_last.first_steps
    said = capsys.readouterr().out
    if compiled:
        assert (step.audit.calls, step.checked, step.clean) == ((), 2, True)
        assert "ran compiled" in said
    else:
        check(net, step)
        assert "torch.cat loses channels last" in said
    torch.compiler.reset()


def test_accelerate_goes_on_from_a_state_in_another_order(accelerate):
    """A fused kernel walks weight and momentum side by side in memory."""
    from nhwc.trainers.accelerate import ChannelsLast

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 3, 6, 6)).square().mean().backward()
        optimizer.step()

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
        return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)

    net, optimizer = made()
    step(net, optimizer)
    last, resumed = ChannelsLast(accelerate.Accelerator(cpu=True)).prepare(*made())
    last.load_state_dict(net.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(net, optimizer)
    step(last, resumed)
    for expected, found in zip(net.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(expected, found)


def test_accelerate_does_not_train_what_would_spoil_memory(accelerate):
    from nhwc.trainers.accelerate import ChannelsLast

    net, batch = Narrowing(), next(iter(DataLoader(samples(), 2)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, _ = ChannelsLast(accelerate.Accelerator(cpu=True)).prepare(net, optimizer)
    with pytest.raises(nhwc.InputError, match=REFUSED):
        model(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**batch)["loss"].requires_grad
    with torch.no_grad():
        model(**batch)


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning", "transformers", "accelerate"])
def test_its_example_runs(name):
    pytest.importorskip(name)
    results = doctest.testmod(importlib.import_module(f"nhwc.trainers.{name}"))
    assert (results.failed, results.attempted > 0) == (0, True)
