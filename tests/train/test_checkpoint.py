"""Checkpoints: readable anywhere, never half there, and clear words about any other file."""

from dataclasses import replace

import pytest
import torch

from nhwc import FileError, InputError, NhwcError, convert_, load_model
from nhwc._train import Recipe, load_checkpoint, save_checkpoint, synthetic, train
from nhwc._train.checkpoint import evaluation_weights
from nhwc._train.trainer import Trainer
from nhwc.models.vision import import_torchvision

from .training_nets import FILE, plain


@pytest.fixture
def written(tmp_path):
    data = synthetic(4, (12, 12, 3), classes=10, batches=3)
    path = tmp_path / "run" / "checkpoint.pt"
    net = plain()
    recipe = Recipe(channels_last=True, ema=0.9, optimizer="adamw", lr=0.01)
    train(net, data, recipe, checkpoint=path)
    return path, net


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list):
        for item in value:
            yield from tensors(item)


def test_all_tensors_are_contiguous_in_the_strictest_sense(written):
    path, net = written
    content = torch.load(path, weights_only=True)
    found = list(tensors(content))
    assert len(found) > 40
    for tensor in found:
        # is_contiguous() overlooks dimensions of size 1, as of a 1x1 weight.
        assert tensor.stride() == torch.empty(tensor.shape).stride()
    assert net[4].weight.stride() == (8, 1, 8, 8)


def test_its_weights_load_where_a_state_dict_is_wanted(written):
    path, net = written
    loaded = load_model(f"{FILE}:plain", weights=path)
    for name, value in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(written, monkeypatch):
    path, _ = written
    before = path.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nhwc.machine.disk.os.replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        save_checkpoint(path, {"epoch": 7})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]


def malicious(path):
    class Evil:
        def __reduce__(self):
            return open, (str(path.parent / "proof"), "w")

    torch.save(Evil(), path)


def without_meter(path):
    content = torch.load(path, weights_only=True)
    del content["meter"]
    torch.save(content, path)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda path: path.unlink(), InputError, "cannot read checkpoint .*No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), FileError, "damaged"),
        (lambda path: path.write_bytes(b""), FileError, "damaged"),
        (lambda path: path.write_text("hello"), FileError, "damaged"),
        (malicious, FileError, "damaged"),
        (lambda path: torch.save(plain().state_dict(), path), FileError, "as --weights"),
        (lambda path: torch.save([1, 2], path), FileError, "no checkpoint of nhwc train"),
        (without_meter, FileError, "no checkpoint of nhwc train"),
    ],
)
def test_another_file_is_refused(written, spoil, error, words):
    path, _ = written
    spoil(path)
    with pytest.raises(error, match=words):
        load_checkpoint(path)
    assert not (path.parent / "proof").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("state_dict", 3, "state_dict is 3, not dict"),
        ("optimizer", [1], r"optimizer is \[1\], not dict"),
        ("average", "a", "average is 'a', not dict"),
        ("epoch", "one", "epoch is 'one', not int"),
        ("batch", None, "batch is None, not int"),
        ("epoch", -1, "epoch is -1, no count"),
        ("order", 3, "order is 3, not dict"),
        ("order", {"batch_size": torch.ones(0)}, r"order\[batch_size\] is tensor.*, not int"),
        ("points", 3, "points is 3, not list"),
        ("points", [{"phase": "train"}], "missing 15 required positional arguments"),
        ("points", [3], "must be a mapping"),
        ("meter", {}, "does not fit this model and optimizer: 'sums'"),
        ("meter", {"sums": [], "elapsed_s": 1.0}, "the sums of its meter are no 4 numbers"),
        ("state_dict", {1: torch.ones(1)}, "a key of state_dict is 1, not str"),
        ("optimizer", {"param_groups": 3, "state": {}}, "does not fit this model"),
    ],
)
def test_what_is_of_another_type_is_refused_in_words(written, name, value, words):
    path, net = written
    torch.save({**torch.load(path, weights_only=True), name: value}, path)
    data = synthetic(4, (12, 12, 3), classes=10, batches=3)
    recipe = Recipe(channels_last=True, ema=0.9, optimizer="adamw", lr=0.01, epochs=2)
    with pytest.raises(NhwcError, match=words):
        train(net, data, recipe, resume=path)


def test_a_path_that_no_file_can_have_is_refused():
    with pytest.raises(InputError, match=r"cannot read checkpoint .*null"):
        load_checkpoint("a\0b")
    with pytest.raises(InputError, match=r"cannot write .*null"):
        save_checkpoint("a\0b", {})


@pytest.mark.parametrize("schema", [2, None, torch.ones(3), torch.ones(1), "1\n" * 99])
def test_one_of_a_newer_version_is_refused(written, schema):
    path, _ = written
    torch.save({**torch.load(path, weights_only=True), "schema": schema}, path)
    with pytest.raises(FileError, match="of schema") as refused:
        load_checkpoint(path)
    assert "\n" not in str(refused.value)


def test_another_model_cannot_go_on_from_it(written):
    path, _ = written
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 10, 3), torch.nn.Flatten())
    data = synthetic(4, (12, 12, 3), classes=10, batches=3)
    with pytest.raises(InputError, match=r"checkpoint\.pt does not fit this model") as raised:
        train(convert_(other), data, resume=path)
    assert len(str(raised.value)) < 500


def test_a_state_dict_keeps_the_versions_of_its_modules(tmp_path):
    """Without them torchvision's MNASNet refuses its own weights."""
    net = import_torchvision().models.mnasnet0_5(num_classes=8)
    data = synthetic(4, (32, 32, 3), classes=8, batches=1)
    train(net, data, Recipe(epochs=1, ema=0.9), checkpoint=tmp_path / "c.pt")
    again = import_torchvision().models.mnasnet0_5(num_classes=8)
    train(again, data, Recipe(epochs=2, ema=0.9), resume=tmp_path / "c.pt")
    again.load_state_dict(evaluation_weights(load_checkpoint(tmp_path / "c.pt")))


def images(count, classes=("a", "b")):
    return replace(synthetic(4, (12, 12, 3), classes=10, batches=5), classes=classes)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"accumulate": 4}, "stopped inside an epoch.*accumulate 1"),
        ({"optimizer": "adamw"}, r"does not fit this model and optimizer: .*without .*\. Resume"),
    ],
)
def test_other_settings_than_it_stopped_with_are_refused(tmp_path, changed, words):
    stop = iter([False, True, True]).__next__
    train(plain(), images(20), Recipe(epochs=2), checkpoint=tmp_path / "c.pt", stop=stop)
    with pytest.raises(InputError, match=words):
        train(plain(), images(20), Recipe(epochs=2, **changed), resume=tmp_path / "c.pt")


def test_other_classes_are_refused(tmp_path):
    train(plain(), images(20), Recipe(epochs=1), checkpoint=tmp_path / "c.pt")
    with pytest.raises(InputError, match="for other classes, or for these in another order"):
        train(plain(), images(20, ("b", "a")), Recipe(epochs=2), resume=tmp_path / "c.pt")


def test_weight_decay_is_that_of_the_run_that_goes_on(tmp_path):
    train(plain(), images(20), Recipe(epochs=1), checkpoint=tmp_path / "c.pt")
    nets = [plain(), plain()]
    for net, decay in zip(nets, (0.0, 5.0), strict=True):
        train(net, images(20), Recipe(epochs=2, weight_decay=decay), resume=tmp_path / "c.pt")
    assert not torch.equal(nets[0][0].weight, nets[1][0].weight)


def test_an_average_that_begins_later_begins_with_the_weights_that_were_trained(tmp_path):
    train(plain(), images(20), Recipe(epochs=1), checkpoint=tmp_path / "c.pt")
    state = load_checkpoint(tmp_path / "c.pt")
    trainer = Trainer(plain(), images(20), Recipe(epochs=2, ema=0.9), torch.device("cpu"))
    trainer.restore(state, "c.pt")
    for name, value in trainer.average.module.state_dict().items():
        torch.testing.assert_close(value, state["state_dict"][name])


@pytest.mark.parametrize("text", [b"R.", b"t", b"\x80\x02."])
def test_a_damaged_pickle_is_refused(tmp_path, text):
    (tmp_path / "c.pt").write_bytes(text)
    with pytest.raises(FileError, match="damaged"):
        load_checkpoint(tmp_path / "c.pt")
