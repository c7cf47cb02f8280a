"""The last block of a transformer computes the tokens that are read, and no others."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import nhwc
from nhwc.graph import capture
from nhwc.graph.nodes.seen import shape_at
from nhwc.graph.tracing.sized import capture_sized
from nhwc.operators.spelled import SPELLED
from nhwc.passes import FOLDING, run_passes
from nhwc.passes.join_attention import join_attention
from nhwc.passes.join_scores import join_scores
from nhwc.passes.narrow_tokens import narrow_tokens

TOKENS = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A block as timm has it: attention of packed rows, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.gamma = nn.Parameter(torch.randn(12))

    def attended(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, 12)

    def forward(self, x):
        x = x + self.proj(self.attended(self.norm1(x)))
        torch._assert(x.dim() == 3, "no rows of tokens")
        return x + self.gamma * self.mlp(self.norm2(x))


class Apart(Block):
    """As transformers has it: queries, keys and values each of a layer, in products or in torch's
    function, which also reads what it needs of sizes as numbers.
    """

    spelled = False

    def attended(self, x):
        q, k, v = (one.view(2, 5, 3, 4).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if self.spelled:
            mixed = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, scale=0.5)
        return mixed.transpose(1, 2).contiguous().reshape(2, 5, 12)


class Spelled(Apart):
    spelled = True


class Functions(Apart):
    def attended(self, x):
        q, k, v = (one.view(2, 5, 3, 4).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return torch.reshape(torch.transpose(mixed, 1, 2), (2, 5, 12))


class Causal(Apart):
    def attended(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Masked(Apart):
    def attended(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
        return F.scaled_dot_product_attention(q, k, v, mask)


class MaskedByName(Apart):
    def attended(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class OfItself(Apart):
    def attended(self, x):
        q, _, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, q, v)


class Classified(nn.Module):
    """Two blocks behind a class token, and a head."""

    def __init__(self, block=Block, read=lambda x: x[:, 0]):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.positions = nn.Parameter(torch.randn(1, 5, 12))
        self.blocks = nn.Sequential(block(), block())
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 7)
        self.read = read

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.read(self.norm(self.blocks(x))))


class Tokens(fx.Interpreter):
    """Runs a graph, and notes how many tokens each linear layer computes."""

    def __init__(self, graph):
        super().__init__(graph)
        self.counts = {}

    def call_module(self, target, args, kwargs):
        result = super().call_module(target, args, kwargs)
        if isinstance(self.module.get_submodule(target), nn.Linear):
            self.counts[target] = result.shape[1] if result.ndim == 3 else None
        return result

    def run_node(self, node):
        result = super().run_node(node)
        if isinstance(result, torch.Tensor):
            assert shape_at(node) in (None, result.shape), node
        return result


@torch.no_grad()
def narrowed(net, x=TOKENS[:, 1:], *, sized=False):
    """How often tokens were narrowed, and how many of them each linear layer computes."""
    net.eval()
    graph = capture(net).module
    if sized:
        graph, _ = capture_sized(graph, [x])
    *_, report = run_passes(graph, (*FOLDING, join_attention, join_scores, narrow_tokens))
    running = Tokens(graph)
    torch.testing.assert_close(running.run(x), net(x), rtol=1e-5, atol=1e-5)
    return len(report.applied), running.counts


OF_LAST = {f"blocks.1.{name}" for name in ("proj", "mlp.0", "mlp.2")}


def in_last(counts):
    """The tokens that the layers behind the attention of the last block compute."""
    return {count for name, count in counts.items() if name in OF_LAST}


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (lambda x: x[:, 0], 1),
        (lambda x: x[:, 2], 3),
        (lambda x: x[:, :2], 2),
        (lambda x: x[:, 1:2, :], 2),
        (lambda x: x[:, 0, :] + x[:, 1], 2),
    ],
)
def test_what_is_read_is_computed(read, count):
    times, counts = narrowed(Classified(read=read))
    assert (times, in_last(counts)) == (1, {count})
    # The attention of the last block needs keys and values of all tokens.
    assert {number for name, number in counts.items() if name not in OF_LAST | {"head"}} == {5}


@pytest.mark.parametrize("block", [Apart, Spelled])
def test_attention_of_known_sizes(block):
    times, counts = narrowed(Classified(block), sized=True)
    assert times == 1
    assert sorted(counts.values(), key=str) == [1, 1, 1, *[5] * 5, None]


@pytest.mark.parametrize("activation", SPELLED, ids=lambda kind: kind.__name__)
def test_an_activation_that_was_spelled_out_is_of_each_token(activation):
    net = Classified()
    net.blocks[1].mlp[1] = activation()
    assert in_last(narrowed(net)[1]) == {1}


@pytest.mark.parametrize("block", [Causal, Masked, MaskedByName, OfItself])
def test_attention_whose_queries_are_not_alone_computes_all(block):
    times, counts = narrowed(Classified(block))
    # What stands behind it does not.
    assert (times, counts["blocks.1.proj"], counts["blocks.1.mlp.2"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[:, -1],
        lambda x: x[:, -2:],
        lambda x: x[:, -4:3],
        lambda x: x[:, ::2],
        lambda x: x[:, 1:],
        lambda x: x[0],
        lambda x: x[:, 0] + x.mean(1),
        lambda x: x[:, 0] * x.shape[1],
        lambda x: x[:, 0].add_(1.0) + x[:, 1],
        lambda x: x[:, :, :][:, 0],
        lambda x: x[:, None, 0],
        lambda x: x[..., :, :1].expand(-1, -1, 12),
        lambda x: x.unsqueeze(1)[:, 0],
    ],
)
def test_other_tokens_are_read(read):
    assert narrowed(Classified(read=read))[0] == 0


def test_a_result_of_the_model_lies_as_it_did():
    net = Classified()
    net.head = nn.Identity()
    assert narrowed(net)[0] == 0


class ReadTwice(Block):
    def forward(self, x):
        x = x + self.proj(self.attended(self.norm1(x)))
        return x + self.mlp(self.norm2(x)) + x.mean(1, keepdim=True)


def test_what_is_read_elsewhere_is_computed():
    times, counts = narrowed(Classified(ReadTwice))
    assert (times, counts["blocks.1.proj"], counts["blocks.1.mlp.2"]) == (1, 5, 1)


def test_a_norm_alone_is_not_worth_a_slice():
    net = Classified()
    net.blocks = nn.Identity()
    assert narrowed(net)[0] == 0


@torch.no_grad()
def test_what_is_written_into_is_written_as_a_whole():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mix = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            x = self.first(x.reshape(2, 5, 12))
            y = self.mix(x.relu_() * 2.0)[:, 0].tanh()
            return y + x.mean(1)

    net = Writes().eval()
    graph = capture(net).module
    run_passes(graph, (narrow_tokens,))
    torch.testing.assert_close(graph(TOKENS), net(TOKENS))


def hooked(net):
    net.blocks[1].mlp[2].register_forward_hook(lambda module, inputs, result: result * 2)


def normalized_together(net):
    net.blocks[1].mlp = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm((5, 12)))


def mixed_together(net):
    net.blocks[1].mlp = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(5))


def sloped(net):
    net.blocks[1].mlp = nn.Sequential(nn.Linear(12, 12), nn.PReLU(5))


@pytest.mark.parametrize("change", [hooked, normalized_together, mixed_together, sloped])
def test_a_layer_that_sees_all_tokens_gets_them(change):
    net = Classified()
    change(net)
    assert in_last(narrowed(net)[1]) == {5}


@torch.no_grad()
def test_a_number_of_dimensions_that_is_not_sure_is_none():
    class Signals(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mix = nn.Conv1d(3, 12, 1), nn.Linear(12, 12)

        def forward(self, x):
            return self.mix(self.conv(x).transpose(-1, -2))[:, 0].relu()

    net = Signals().eval()
    fast = nhwc.optimize(net, torch.randn(2, 3, 12))
    signal = torch.randn(3, 5)  # without a batch, of which the slice takes a channel
    torch.testing.assert_close(fast(signal), net(signal))


def test_attention_whose_heads_are_put_together_by_functions():
    times, counts = narrowed(Classified(Functions), sized=True)
    assert (times, sorted(counts.values(), key=str).count(1)) == (1, 3)


def test_heads_that_become_tokens_are_all_computed():
    class Heads(Apart):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x):
            return self.mix(self.attended(x).reshape(2, 5, 3, 4).reshape(2, 15, 4))[:, 1].relu()

    times, counts = narrowed(Heads(), TOKENS, sized=True)
    assert (times, [*counts.values()]) == (1, [5, 2])


def test_what_is_empty_tells_no_number_of_dimensions():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.nothing, self.positions = torch.empty(0), nn.Parameter(torch.randn(1, 4, 12))
            self.mix = nn.Linear(12, 12)

        def forward(self, x):
            return self.mix(torch.cat([self.nothing, x], 1) + self.positions)[:, 0].relu()

    assert narrowed(Joined())[0] == 0


@pytest.mark.processor
@pytest.mark.parametrize("block", [Block, Apart, Spelled])
@torch.no_grad()
def test_planned_saved_and_with_other_sizes(block, tmp_path):
    net, x = Classified(block).eval(), TOKENS[:, 1:]
    fast = nhwc.optimize(net, x)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    nhwc.save(fast, tmp_path / "net.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "net.nhwc")(x), fast(x))
    if block is Block:
        more = torch.randn(3, 4, 12)
        torch.testing.assert_close(copy.deepcopy(fast)(more), net(more), rtol=1e-4, atol=1e-5)
