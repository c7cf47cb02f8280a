"""Whole runs in one process: they give the same numbers even if stopped and resumed."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from nhwc import Format, InputError, NhwcError, convert_, format_of
from nhwc._train import (
    Data,
    ImageFolder,
    Loader,
    Recipe,
    Trainer,
    evaluate,
    load_checkpoint,
    remarks,
    synthetic,
    train,
)
from nhwc.machine.bfloat16 import emulates_bfloat16

from ..processor import needing
from .training_nets import FILE, command, drops, environment, image_set, plain, volume

CLASSES = tuple("0123456789")


def random_data(batches=6, size=12):
    return synthetic(4, (size, size, 3), classes=10, batches=batches)


def losses(run):
    """Everything but what a clock says."""
    return [
        (p.phase, p.epoch, p.batch, p.step, p.loss, p.mean_loss, p.mean_prec1, p.mean_prec5, p.lr)
        for p in run.points
    ]


def weights(model):
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_channels_last_and_contiguous_learn_the_same(optimizer):
    runs = []
    for channels_last in (False, True):
        recipe = Recipe(epochs=2, optimizer=optimizer, lr=0.01, channels_last=channels_last)
        runs.append([p.loss for p in train(plain(), random_data(), recipe).points])
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)


def test_the_weights_end_up_as_the_recipe_says():
    net = plain()
    train(net, random_data(), Recipe(channels_last=True, lr=0.01))
    assert format_of(net[0].weight) is Format.CHANNELS_LAST
    contiguous = plain()
    train(contiguous, random_data(), Recipe(lr=0.01))
    assert format_of(contiguous[0].weight) is Format.CONTIGUOUS


@pytest.mark.parametrize(
    "settings",
    [
        {"amp": True, "channels_last": True},
        {"ema": 0.9, "optimizer": "adamw", "lr": 0.01},
        {"accumulate": 4, "clip": 1.0, "warmup_epochs": 1, "label_smoothing": 0.1},
    ],
)
@pytest.mark.parametrize("after", [3, 5, 8])
def test_a_stopped_run_goes_on_to_the_same_numbers(tmp_path, settings, after):
    recipe = Recipe(**{"epochs": 2, "lr": 0.05, **settings})
    whole_net = drops()
    whole = train(whole_net, random_data(), recipe)

    seen = []
    file = tmp_path / "checkpoint.pt"
    stopped = train(
        drops(),
        random_data(),
        recipe,
        checkpoint=file,
        on_batch=lambda epoch, batch: seen.append(batch),
        stop=lambda: len(seen) >= after,
    )
    # Another initialization, so that a value which is not restored shows.
    net = drops()
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    resumed = train(net, random_data(), recipe, resume=file)

    epoch, batch = stopped.stopped_at
    assert epoch * 6 + batch == len(seen) >= after
    assert losses(resumed) == losses(whole)
    assert torch.equal(weights(net), weights(whole_net))


def test_a_killed_process_goes_on_to_the_same_numbers(tmp_path):
    words = ["--synthetic", "-a", f"{FILE}:killed", "--size", 32, "-b", 4, "--max-batches", 20]
    words += ["--classes", 10, "--lr", 0.05, "--channels-last", "--amp", "--checkpoint-every", 5]
    words += ["--workers", 1]

    def go(folder, *more, **settings):
        return subprocess.run(
            command(*words, "-o", tmp_path / folder, *more),
            env=environment(**settings), cwd=tmp_path, capture_output=True, text=True,
        ).returncode  # fmt: skip

    assert go("whole") == 0
    assert go("killed", KILLED_AT="13") == -signal.SIGKILL
    file = tmp_path / "killed" / "checkpoint.pt"
    assert load_checkpoint(file)["batch"] == 10
    assert go("killed", "--resume", file) == 0

    whole, killed = (
        load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "killed")
    )
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, killed["state_dict"][name])
    for a, b in zip(whole["points"], killed["points"], strict=True):
        assert (a["batch"], a["loss"], a["mean_loss"]) == (b["batch"], b["loss"], b["mean_loss"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_stops(tmp_path, number):
    words = ["--synthetic", "-a", f"{FILE}:drops", "--size", 64, "-b", 4, "--max-batches", 5000]
    process = subprocess.Popen(
        command(*words, "--classes", 10, "-o", tmp_path, "--workers", 1, "--lr", 0.01),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # Under nohup it is ignored.
    )  # fmt: skip
    process.stdout.readline()
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number
    batch = load_checkpoint(tmp_path / "checkpoint.pt")["batch"]
    assert 10 <= batch < 5000
    assert f"stopped in epoch 0 after batch {batch}; go on with --resume" in said


def test_inside_an_epoch_the_order_must_not_change(tmp_path):
    file = tmp_path / "checkpoint.pt"
    recipe = Recipe(lr=0.01)
    train(plain(), random_data(), recipe, checkpoint=file, stop=lambda: True)
    other = synthetic(8, (12, 12, 3), classes=10, batches=6)
    with pytest.raises(InputError, match="batch_size 4, seed 0, batches 6"):
        train(plain(), other, recipe, resume=file)


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    file = tmp_path / "checkpoint.pt"
    run = train(plain(), random_data(), Recipe(lr=0.01), checkpoint=file)
    again = train(plain(), random_data(), Recipe(lr=0.01), resume=file)
    assert again.points == run.points
    longer = train(plain(), random_data(), Recipe(epochs=2, lr=0.01), resume=file)
    assert [point.epoch for point in longer.points] == [0, 1]


def test_points_come_every_ten_batches_and_at_the_end_of_an_epoch():
    seen = []
    train(plain(), random_data(batches=23), Recipe(lr=0.01), on_point=seen.append)
    assert [(point.batch, point.batches) for point in seen] == [(10, 23), (20, 23), (23, 23)]
    assert all(point.time_s > 0 and point.images_per_s > 0 for point in seen)


def test_the_mean_is_over_the_epoch_so_far():
    every = []
    data = random_data(batches=20)
    trainer = Trainer(plain(), data, Recipe(lr=0.01), torch.device("cpu"))
    trainer.step.loss, inner = (lambda *a: every.append(inner(*a)) or every[-1]), trainer.step.loss
    points = []
    for _ in trainer.batches(points.append):
        pass
    values = [float(loss.detach()) for loss in every]
    assert points[0].loss == pytest.approx(values[9])
    assert points[0].mean_loss == pytest.approx(sum(values[:10]) / 10)
    assert points[1].mean_loss == pytest.approx(sum(values) / 20)


def test_everything_else_is_left_as_it_was():
    net = plain()
    net[1].eval()
    modes = [module.training for module in net.modules()]
    identities = [id(parameter) for parameter in net.parameters()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    train(net, random_data(), Recipe(lr=0.01))
    assert [module.training for module in net.modules()] == modes
    assert [id(parameter) for parameter in net.parameters()] == identities
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in net.modules())


def test_gradients_from_before_do_not_count():
    fresh, used = plain(), plain()
    for parameter in used.parameters():
        parameter.grad = torch.ones_like(parameter)
    runs = [train(net, random_data(), Recipe(lr=0.01)) for net in (fresh, used)]
    assert losses(runs[0]) == losses(runs[1])


def test_a_loss_that_is_no_number_ends_the_run():
    with pytest.raises(NhwcError, match=r"the loss is nan in epoch 0 after batch 10\. Lower"):
        train(plain(), random_data(batches=30), Recipe(lr=1e12))


def test_a_model_with_too_few_outputs_is_told_so():
    data = synthetic(4, (12, 12, 3), classes=11, batches=2)
    with pytest.raises(InputError, match="has 10 outputs and the data 11 classes"):
        train(plain(), data)


@pytest.mark.processor
@pytest.mark.parametrize("dtype", [needing(torch.float32), needing(torch.bfloat16)])
def test_volumes_train_in_channels_last_3d(dtype):
    net, seen = volume(), []
    net[0].register_forward_hook(lambda module, args, out: seen.append(format_of(out)))
    data = synthetic(4, (6, 8, 8, 3), classes=10, batches=3)
    recipe = Recipe(channels_last=True, amp=dtype is torch.bfloat16, lr=0.01)
    run = train(net, data, recipe)
    assert format_of(net[0].weight) is Format.CHANNELS_LAST_3D
    assert set(seen) == {answer_of_conv3d(dtype)}
    assert run.points[-1].loss > 0
    lost = any("lost" in line for line in remarks(net, recipe, torch.device("cpu")))
    assert lost is (set(seen) != {Format.CHANNELS_LAST_3D})


@pytest.mark.parametrize("amp", [False, True])
def test_gradients_and_optimizer_state_of_volumes_are_channels_last_3d(amp):
    layers = (nn.Conv3d(3, 8, 3), nn.Conv3d(8, 8, 3, groups=4), nn.ConvTranspose3d(8, 4, 2, 2))
    net = convert_(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(net.parameters())
    clips = torch.rand(2, 3, 6, 9, 9).to(memory_format=torch.channels_last_3d)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
        loss = net(clips).float().square().mean()
    loss.backward()
    optimizer.step()
    for layer in net:
        kept = optimizer.state[layer.weight]
        tensors = (layer.weight, layer.weight.grad, kept["exp_avg"], kept["exp_avg_sq"])
        assert {format_of(tensor) for tensor in tensors} == {Format.CHANNELS_LAST_3D}


def answer_of_conv3d(dtype):
    """In bfloat16 torch keeps the format on some processors, and on others it does not."""
    image, weight = (
        torch.zeros(shape, dtype=dtype).to(memory_format=torch.channels_last_3d)
        for shape in ((4, 3, 6, 8, 8), (8, 3, 3, 3, 3))
    )
    return format_of(torch.conv3d(image, weight))


@pytest.mark.processor
@pytest.mark.parametrize(
    ("capability", "flags", "emulated"),
    [
        ("AVX2", "avx2 fma", True),
        ("AVX2", "avx512f avx512_bf16", True),
        ("AVX512", "avx512f avx512bw", True),
        ("AVX512", "avx512f avx512_bf16", False),
        ("AVX512_BF16", "avx512f avx512_bf16 amx_bf16", False),
        ("NEON", "asimd bf16", False),
    ],
)
def test_whether_bfloat16_is_emulated_is_asked_of_the_machine(
    capability, flags, emulated, monkeypatch
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags\t\t: {flags}\n")
    assert emulates_bfloat16() is emulated
    said = remarks(volume(), Recipe(amp=True), torch.device("cpu"))
    assert any("bfloat16 is emulated" in line for line in said) is emulated
    assert remarks(volume(), Recipe(channels_last=True), torch.device("cpu")) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as inductor is imported
def test_a_compiled_model_learns_the_same_and_is_not_left_compiled():
    alone = train(drops_without_dropout(), random_data(), Recipe(lr=0.01, channels_last=True))
    net = drops_without_dropout()
    run = train(net, random_data(), Recipe(lr=0.01, channels_last=True, compile=True))
    assert [p.loss for p in run.points] == pytest.approx([p.loss for p in alone.points], rel=1e-4)
    assert net._compiled_call_impl is None


def drops_without_dropout():
    """Compiled dropout draws other numbers than eager dropout."""
    net = drops()
    net[3].p = 0.0
    return net


def test_evaluation_counts_every_image_once_and_learning_shows(tmp_path):
    root = image_set(tmp_path, train=20, val=7)
    found = ImageFolder.find(root / "train", size=12)
    held_out = ImageFolder.find(root / "val", size=12)
    data = Data(Loader(found, 10), Loader(held_out, 4, train=False), found.classes)
    net = drops()
    before = evaluate(net, data.val)
    run = train(net, data, Recipe(epochs=6, lr=0.1, channels_last=True))
    assert before.mean_prec1 < 70
    assert run.of("val")[-1].mean_prec1 == 100
    assert run.of("val")[-1].batches == 6
    after = evaluate(net, data.val, Recipe(channels_last=True))
    assert after.mean_loss == pytest.approx(run.of("val")[-1].mean_loss, rel=1e-5)


def test_evaluation_uses_the_running_average(tmp_path):
    root = image_set(tmp_path)
    found = ImageFolder.find(root / "train", size=12)
    data = Data(Loader(found, 12), Loader(found, 12, train=False), found.classes)
    net = drops()
    run = train(net, data, Recipe(epochs=3, lr=0.3, ema=0.99))
    own = evaluate(net, data.val).mean_loss
    assert run.of("val")[-1].mean_loss != pytest.approx(own, rel=1e-3)


def test_a_result_can_be_written_as_json():
    run = train(plain(), random_data(), Recipe(lr=0.01))
    content = run.to_dict()
    assert content["schema"] == 1
    assert content["points"][0]["batches"] == 6
    assert content["recipe"]["lr"] == 0.01
    assert content["environment"]["torch"] == torch.__version__


def test_a_run_ends_soon_after_it_is_told_to():
    start = time.monotonic()
    run = train(plain(), random_data(batches=10_000), Recipe(lr=0.01), stop=lambda: True)
    assert run.stopped_at == (0, 1)
    assert time.monotonic() - start < 60
