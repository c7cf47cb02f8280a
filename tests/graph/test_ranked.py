"""Numbers of dimensions that the code before makes sure, and answers that depend on them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc.graph import capture

from ..fusing import Block, assert_same, script

X = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0))


def normed(self, x):
    return self.bn(self.conv(x))


def length(self, x):
    y = normed(self, x)
    return y * len(y.shape) if len(x.size()) == 4 else y


def rank(self, x):
    y = F.relu(normed(self, x))
    if y.dim() not in (3, 4) or y.ndim != 4 or y.ndim - 2 > 2:
        return y
    return y * 2


def last_sizes(self, x):
    *_, height, width = normed(self, x).shape
    return x.reshape(-1, height * width)


def starred(self, x):
    y = normed(self, x).flatten(2).transpose(1, 2)
    y = self.rows(y).view(*y.shape[:-1], 2, 2).transpose(1, 2)
    y = (y @ y.transpose(-1, -2)).transpose(1, 2).contiguous()
    y = y.view(y.size()[:-2] + (-1,))
    return y.reshape(*y.shape[:-1], -1)


def unpacked(self, x):
    n, _, h, w = x.shape
    y = self.conv(x)
    return F.interpolate(y, size=[side * 2 for side in y.shape[2:]]).reshape(n, -1, 4 * h * w)


def channels(self, x):
    y = F.relu(normed(self, x) + normed(self, x * 2))
    return x.mean() + y if y.shape[1] != 0 and y.size(1) == 4 else x


def channels_of_a_convolution(self, x):
    _, _, _, _ = x.shape
    y = self.conv(x)
    gate = torch.sigmoid(self.conv(x.mean((2, 3), keepdim=True)))
    y = self.off(F.hardswish(y) * gate)
    return y if y.shape[1] == 4 else x


def channels_of_an_asserted_norm(self, x):
    y = self.conv(x)
    torch._assert(y.ndim == 4, "an image")
    y = F.batch_norm(y, self.bn.running_mean, self.bn.running_var)
    return F.gelu(y) + y if y.shape[1] != 0 and y.size(1) == 4 else x


def channels_behind_permute(self, x):
    y = self.conv(x).permute(0, 2, 3, 1)
    y = self.last(F.layer_norm(y, (4,)))
    y = torch.permute(y, (0, 3, 1, 2)) * 2
    return y if y.shape[1] == 4 else x


def channels_of_rows(self, x):
    y = self.rows(x.permute(0, 2, 3, 1)).permute(0, -1, 1, 2)
    return y if y.shape[1] == 3 else x


def channels_that_it_made(self, x):
    b, _, h, w = x.shape
    made = torch.empty([b, 0, h, w]), torch.zeros(b, 2, h, w)
    return torch.cat([x, made[1]], 1) if made[0].size(1) == 0 and made[1].shape[1] == 2 else x


ANSWERED = {
    f.__name__: f
    for f in (
        *(channels_behind_permute, channels_of_rows, channels_that_it_made),
        *(length, rank, last_sizes, starred, unpacked, channels, channels_of_a_convolution),
        channels_of_an_asserted_norm,
    )
}


def of_one_image(self, x):
    y = self.conv(x)
    return y * 2 if len(y.shape) == 3 else y


def of_any(self, x):
    return self.conv(x) * 2 if x.dim() == 3 else self.conv(x)


def of_one_row(self, x):
    y = self.rows(x.transpose(-1, -3)).transpose(-1, -3)
    return y * len(y.shape)


def of_a_broadcast(self, x):
    y = self.conv(x) + self.conv.weight.new_ones(4, 1, 1)
    return y * len(y.shape)


def before_it_is_sure(self, x):
    doubled = len(x.shape) == 4
    _, _, _, _ = x.shape
    return self.conv(x) * (2 if doubled else 3)


def of_a_norm_of_any_channels(self, x):
    y = self.free(self.conv(x))
    return y * 2 if y.shape[1] == 4 else y


def of_a_part_with_the_name_of_a_function(self, x):
    y = self.relu(normed(self, x))
    _, _, _, _ = y.shape
    return y * 2 if y.shape[1] == 4 else y


def of_a_convolution_of_any_rank(self, x):
    y = F.relu(self.conv(x))
    return y * 2 if y.shape[1] == 4 else y


def of_a_sum_of_any_rank(self, x):
    y = F.batch_norm(self.conv(x), self.bn.running_mean, self.bn.running_var)
    y = F.relu(y + y)
    return y * 2 if y.shape[1] == 4 else y


def of_another_size_behind_permute(self, x):
    y = self.conv(x).permute(0, 2, 1, 3)
    return y * 2 if y.shape[1] == x.shape[2] else y


def of_sizes_that_it_computes(self, x):
    made = torch.zeros(x.shape)
    return x * 2 if made.shape[1] == 3 else x + made


def how_many_images(self, x):
    y = normed(self, x)
    return y * 2 if y.shape[0] == 2 else y


OPEN = {
    f.__name__: f
    for f in (
        *(of_one_image, of_any, of_one_row, of_a_broadcast, before_it_is_sure, how_many_images),
        *(of_a_norm_of_any_channels, of_a_part_with_the_name_of_a_function),
        *(of_a_convolution_of_any_rank, of_a_sum_of_any_rank),
        *(of_another_size_behind_permute, of_sizes_that_it_computes),
    )
}


class Twice(nn.Module):
    """Twice the channels, by code that stays a call."""

    def forward(self, x):
        return torch.cat([x, x], 1) if x.sum() > -1e9 else x


def model_of(forward):
    parts = {"conv": nn.Conv2d(3, 4, 3, padding=1), "bn": nn.BatchNorm2d(4)}
    parts["free"] = nn.BatchNorm2d(4, affine=False, track_running_stats=False)
    parts |= {"relu": Twice(), "off": nn.Dropout(), "last": nn.LayerNorm(4)}
    return Block(forward, **parts, rows=nn.Linear(4 if forward is starred else 3, 4)).eval()


@pytest.mark.parametrize("name", ANSWERED)
def test_what_is_sure_is_answered(name):
    model = model_of(ANSWERED[name])
    captured = capture(model)
    assert not captured.opaque
    for x in X, X[:1, :, :4, :2]:
        assert_same(model, captured.module, x)
    script(captured.module)


@pytest.mark.parametrize("name", OPEN)
def test_what_may_be_otherwise_stays_a_call(name):
    model = model_of(OPEN[name])
    captured = capture(model)
    assert captured.opaque
    for x in X, X[:1]:
        assert_same(model, captured.module, x)
    if name in (
        "of_one_image",
        "of_any",
        "of_one_row",
        "of_a_broadcast",
        "of_a_convolution_of_any_rank",
    ):
        assert_same(model, captured.module, X[0])


class Catching(nn.Module):
    """Its unpacking proves nothing, since it goes on without."""

    def forward(self, x):
        try:
            _, _, _, _ = x.shape
        except ValueError:
            return x
        return x * 2


class Unchecked(nn.BatchNorm2d):
    def _check_input_dim(self, x):
        pass


def behind(self, x):
    y = self.conv(self.part(x))
    return y * len(x.shape)


@pytest.mark.parametrize("part", [Catching(), Unchecked(3)])
def test_code_that_goes_on_for_other_ranks_makes_nothing_sure(part):
    model = Block(behind, conv=nn.Conv2d(3, 4, 1), part=part.eval()).eval()
    captured = capture(model)
    assert captured.opaque[0].path == ""
    if isinstance(part, Catching):
        assert_same(model, captured.module, X[0])
    assert_same(model, captured.module, X)


def through_chunks(self, x):
    y = [*normed(self, x).chunk(2, 1)]
    y.extend(part(y[-1]) for part in self.parts)
    return torch.cat(y, -3)


PARTED = {
    "chunks": through_chunks,
    "fewer chunks than asked for": lambda self, x: [*torch.chunk(normed(self, x), 3, dim=-3)],
    "pieces of a size": lambda self, x: [
        *normed(self, x).split(3, 1),
        *normed(self, x).split(4, dim=1),
    ],
    "pieces of sizes": lambda self, x: [*x.split([1, 2], 1), *torch.split(x, [4, 4], 3)],
    "sizes by name": lambda self, x: [*torch.split(x, split_size_or_sections=[1, 2], dim=1)],
    "sections": lambda self, x: [*x.tensor_split(4, 2), *torch.tensor_split(x, (1, 2), 3)],
    "channels": lambda self, x: sum(channel.sin() for channel in normed(self, x).unbind(1)),
    "pairs": lambda self, x: [*torch.sort(x), *x.topk(2), *x.max(1), *torch.min(x, dim=1)],
    "a length": lambda self, x: x * len(normed(self, x).chunk(3, 1)),
    "of a layer": lambda self, x: F.max_unpool2d(*self.pool(x), 2),
    "of a recurrent layer": lambda self, x: torch.mul(*self.gru(x.flatten(2))),
}


def parting(run):
    model = model_of(run)
    model.parts = nn.ModuleList([nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 3, 1)])
    model.pool, model.gru = nn.MaxPool2d(2, return_indices=True), nn.GRU(48, 5)
    return model.eval()


@pytest.mark.parametrize("name", PARTED)
def test_code_may_go_through_values_of_a_known_number(name):
    model = parting(PARTED[name])
    captured = capture(model)
    assert captured.opaque == ()
    for x in X, X[:1]:
        assert_same(model, captured.module, x)


class Own:
    """What a part returns: `split` gives one for each letter."""

    def split(self, sizes):
        return [size * 2 for size in sizes] * 2


def finds_its_own(self, x):
    return Own() if x.sum() < 1e9 else x


def gives_its_own(self, x):
    own = self.opaque(x)
    return x * sum(own.split([1, 2]))


ANY = {
    "chunks of an image": lambda self, x: [*x.chunk(4, 1)],
    "rows": lambda self, x: [*normed(self, x).split(4, 2)],
    "images": lambda self, x: [*normed(self, x).unbind()],
    "the greatest of two": lambda self, x: [*x.max(x + 1)],
    "chunks of a number that is computed": lambda self, x: [*normed(self, x).chunk(x.shape[0], 1)],
    "an object's own": gives_its_own,
}


@pytest.mark.parametrize("name", ANY)
def test_values_of_any_number_stay_where_they_are(name):
    model = parting(ANY[name])
    model.opaque = Block(finds_its_own)
    captured = capture(model)
    assert captured.opaque
    for x in X, X[:1], torch.cat((X, X), 2)[:, :, :6]:
        assert_same(model, captured.module, x)
