"""One step: what goes in, what comes out, what moves."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nhwc import Format, InputError, ModelFailed, convert_, format_of, strict
from nhwc._train import Normalize, TrainingStep

from ..processor import needing
from .training_nets import LayoutCopies, plain


def batch(count=8, classes=10, side=12):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(count, 3, side, side, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    return pixels.to(memory_format=torch.channels_last), labels


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("shape", [(4, 6, 7, 3), (4, 2, 6, 7, 3)])
def test_normalizing_gives_the_values_and_the_layout(shape, channels_last):
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8).movedim(-1, 1)
    out = Normalize(mean=(0.5, 0.25, 0.0), std=(1.0, 0.5, 2.0), channels_last=channels_last)(pixels)
    expected = pixels.double() / 255
    for channel, (mean, std) in enumerate([(0.5, 1.0), (0.25, 0.5), (0.0, 2.0)]):
        torch.testing.assert_close(out[:, channel], ((expected[:, channel] - mean) / std).float())
    last = Format.CHANNELS_LAST if len(shape) == 4 else Format.CHANNELS_LAST_3D
    assert format_of(out) is (last if channels_last else Format.CONTIGUOUS)


def test_a_whole_step_of_a_clean_net_changes_no_layout():
    net = convert_(
        nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
        )
    )  # fmt: skip
    step = TrainingStep(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True))
    pixels, labels = batch()
    with LayoutCopies() as copies:
        step(pixels, labels)
    assert copies.found == []
    with strict(net):
        step(pixels, labels)


@pytest.mark.parametrize("dtype", [None, needing(torch.bfloat16)])
def test_gradients_and_momentum_have_the_strides_of_their_weights(dtype):
    net = convert_(plain())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    seen = []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: seen.append((p.grad.stride(), p.stride()))
        )
    TrainingStep(net, optimizer, dtype=dtype)(*batch())
    assert len(seen) == len(list(net.parameters()))
    dense = [(grad, own) for grad, own in seen if len(own) == 4]
    assert all(grad == own for grad, own in dense)
    for parameter in net.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].stride() == parameter.stride()


@pytest.mark.parametrize("dtype", [needing(torch.bfloat16)])
def test_the_convolutions_compute_in_what_is_asked_for(dtype):
    net, seen = plain(), []
    net[4].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    loss, logits = TrainingStep(net, sgd(net), dtype=dtype)(*batch())
    assert seen == [dtype]
    assert loss.isfinite()
    assert not logits.requires_grad
    assert all(parameter.dtype is torch.float32 for parameter in net.parameters())


def test_accumulated_batches_move_the_weights_as_one_large_batch_does():
    whole, parts = plain(), plain()
    pixels, labels = batch()
    TrainingStep(whole, sgd(whole))(pixels, labels)
    step = TrainingStep(parts, sgd(parts))
    step(pixels[:4], labels[:4], share=0.5, update=False)
    assert torch.equal(weights(parts), weights(plain()))
    step(pixels[4:], labels[4:], share=0.5)
    torch.testing.assert_close(weights(parts), weights(whole))


def test_clipping_bounds_how_far_the_weights_move():
    net = plain()
    TrainingStep(net, sgd(net, lr=1.0), clip=0.01)(*batch())
    moved = (weights(net) - weights(plain())).norm()
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_the_running_average_follows_slowly_and_keeps_the_layout():
    net = convert_(plain())
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    step = TrainingStep(net, sgd(net), average=average)
    step(*batch())
    first = weights(net)
    step(*batch())
    torch.testing.assert_close(weights(average), 0.9 * first + 0.1 * weights(net))
    assert format_of(average.module[0].weight) is Format.CHANNELS_LAST


class Heads(nn.Module):
    """As GoogLeNet: logits and two auxiliary heads, of which one is off."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.side = nn.Conv2d(3, 4, 3), nn.Linear(4, 10), nn.Linear(4, 10)

    def forward(self, images):
        features = self.body(images).mean((2, 3))
        return self.head(features), self.side(features), None


def test_auxiliary_heads_count_for_a_third():
    net = Heads()
    pixels, labels = batch()
    main, side, _ = net(pixels)
    expected = F.cross_entropy(main, labels) + 0.3 * F.cross_entropy(side, labels)
    loss, logits = TrainingStep(copy.deepcopy(net), sgd(net))(pixels, labels)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(logits, main.detach())


class OfOneSize(nn.Module):
    """Asserts its size, as vision transformers do."""

    def forward(self, x):
        assert x.shape[-1] == 224, f"Wrong image height! Expected 224 but got {x.shape[-1]}!"


class Named(nn.Conv2d):
    """Answers with a dict, as models that segment do."""

    def forward(self, x):
        return {"out": super().forward(x)}


@pytest.mark.parametrize(
    ("net", "error", "words"),
    [
        (Named(3, 4, 3), InputError, "the model returned dict; training needs"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 1), OfOneSize()),
            ModelFailed,
            r"raised AssertionError on a batch of \(8, 3, 12, 12\): Wrong image height",
        ),
        (nn.Conv2d(3, 4, 3), InputError, r"returned a tensor \(8, 4, 10, 10\)"),
        (
            nn.Linear(5, 2),
            ModelFailed,
            r"raised RuntimeError on a batch of \(8, 3, 12, 12\): .*mat1",
        ),
        (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)),
            ModelFailed,
            r"IndexError on a batch of .*out of bounds",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_told_so(net, error, words):
    with pytest.raises(error, match=words):
        TrainingStep(net, sgd(net))(*batch())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_float16_scales_the_loss_on_a_gpu():
    net = convert_(plain().cuda())
    step = TrainingStep(net, sgd(net), dtype=torch.float16)
    pixels, labels = batch()
    before = weights(net)
    loss, _ = step(pixels.cuda(), labels.cuda())
    assert step.scaler.get_scale() > 1
    assert loss.isfinite()
    assert not torch.equal(weights(net), before)
