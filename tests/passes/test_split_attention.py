"""The attention module of torch, split into its linear layers: the same answers always."""

import copy

import pytest
import torch
from torch import fx, nn

import nhwc
from nhwc.graph.tracing.captured import capture
from nhwc.passes.fold_constants import fold_constants
from nhwc.passes.sizes import for_sizes
from nhwc.passes.split_attention import split_attention

from ..fusing import rewrite, script
from ..optimizing import force


class Attends(nn.Module):
    """Attention of some inputs, `given` in this order, as query, key and value."""

    def __init__(self, given="xxx", call=None, **options):
        super().__init__()
        torch.manual_seed(3)
        self.given, self.call = given, call or {}
        self.attention = nn.MultiheadAttention(32, 4, **options)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x, y):
        known = {"x": x, "y": y}
        mixed, weights = self.attention(*(known[name] for name in self.given), **self.call)
        return (mixed + x, weights) if self.call.get("need_weights") else mixed + x


def tokens(*shape):
    generator = torch.Generator().manual_seed(4)
    return tuple(torch.randn(shape, generator=generator) for _ in "xy")


@pytest.mark.parametrize("given", ["xxx", "xyy", "xxy", "xyx"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(5, 3, 32), (5, 32)], ids=["batch", "no batch"])
def test_every_arrangement(given, batch_first, shape):
    model, inputs = Attends(given, batch_first=batch_first).eval(), tokens(*shape)
    changed, (report,) = rewrite(model, split_attention)
    assert [site.applied for site in report.sites] == [True]
    assert not any(isinstance(m, nn.MultiheadAttention) for m in changed.modules())
    torch.testing.assert_close(changed(*inputs), model(*inputs))
    torch.testing.assert_close(script(changed)(*inputs), model(*inputs))


@pytest.mark.parametrize("options", [{"kdim": 20, "vdim": 20}, {"kdim": 20}, {"vdim": 12}])
@pytest.mark.parametrize("batch_first", [True, False])
def test_keys_and_values_of_other_sizes(options, batch_first):
    class Across(Attends):
        def forward(self, x, key, value):
            return self.attention(x, key, value)[0] + x

    model = Across(batch_first=batch_first, **options).eval()
    attention = model.attention
    inputs = [torch.randn(5, 3, size) for size in (32, attention.kdim, attention.vdim)]
    changed, (report,) = rewrite(model, split_attention)
    assert [site.applied for site in report.sites] == [True]
    torch.testing.assert_close(changed(*inputs), model(*inputs))


def test_one_source_of_keys_and_values_of_other_sizes():
    class Across(Attends):
        def forward(self, x, y):
            return self.attention(x, y, y, need_weights=False)[0]

    model, inputs = Across(kdim=20, vdim=20).eval(), (torch.randn(5, 3, 32), torch.randn(6, 3, 20))
    changed, (report,) = rewrite(model, split_attention)
    assert [site.applied for site in report.sites] == [True]
    assert sum(isinstance(module, nn.Linear) for module in changed.modules()) == 3
    torch.testing.assert_close(changed(*inputs), model(*inputs))


def test_without_bias_and_called_twice():
    class Twice(Attends):
        def forward(self, x, y):
            return self.attention(x, x, x)[0] + self.attention(y, x, y, need_weights=False)[0]

    model, inputs = Twice(bias=False).eval(), tokens(6, 2, 32)
    changed, (report,) = rewrite(model, split_attention)
    assert [site.applied for site in report.sites] == [True, True]
    torch.testing.assert_close(changed(*inputs), model(*inputs))


def test_attention_of_what_attention_returned():
    class Twice(Attends):
        def forward(self, x, y):
            mixed, _ = self.attention(x, y, y)
            return self.attention(mixed, mixed, mixed)[0]

    model, inputs = Twice().eval(), tokens(6, 2, 32)
    changed, (report,) = rewrite(model, split_attention)
    assert [site.applied for site in report.sites] == [True, True]
    torch.testing.assert_close(changed(*inputs), model(*inputs))


HIDDEN = torch.zeros(6, 6, dtype=torch.bool)
HIDDEN[:, 1], HIDDEN[2] = True, True  # The third query sees no key.
OF_HEADS = torch.zeros(12, 6, 6, dtype=torch.bool)
OF_HEADS[1, 3], OF_HEADS[5, :, 4] = True, True
PADDED = torch.zeros(3, 6, dtype=torch.bool)
PADDED[1, 4:], PADDED[2] = True, True
FALLING = (torch.arange(6) - torch.arange(6)[:, None]).float()
CAUSAL = torch.full((6, 6), float("-inf")).triu(1)
MASKS = {
    "hidden": {"attn_mask": HIDDEN},
    "of heads": {"attn_mask": OF_HEADS},
    "padded": {"key_padding_mask": PADDED},
    "both": {"attn_mask": HIDDEN, "key_padding_mask": PADDED},
    "added": {"attn_mask": FALLING},
    "all added": {"attn_mask": FALLING, "key_padding_mask": PADDED * FALLING[:3]},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal in words": {"attn_mask": FALLING, "is_causal": True, "need_weights": False},
    "causal in words, hidden": {"attn_mask": HIDDEN, "is_causal": True, "need_weights": False},
    "falling and padded": {"attn_mask": FALLING, "key_padding_mask": PADDED, "is_causal": True},
    "causal and padded": {"attn_mask": CAUSAL, "key_padding_mask": PADDED, "is_causal": True},
}
MASKS |= {f"{name}, alone": {**call, "need_weights": False} for name, call in MASKS.items()}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("given", ["xxx", "xyy"])
@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_masks_are_added_where_their_sizes_are_known(name, given, batch_first):
    model = Attends(given, MASKS[name], batch_first=batch_first).eval()
    inputs = tokens(3, 6, 32) if batch_first else tokens(6, 3, 32)
    split, told = with_sizes_known(model, inputs)
    assert told == (True,)
    torch.testing.assert_close(split(*inputs), model(*inputs), equal_nan=True)


@pytest.mark.parametrize("options", [{"num_heads": 1}, {"num_heads": 4, "bias": False}])
@torch.no_grad()
def test_a_query_that_sees_no_key_where_heads_are_odd_or_without_bias(options):
    """There torch does not compute it by one operator, which would give NaN."""
    model = Attends(call={"attn_mask": HIDDEN, "need_weights": False}, batch_first=True).eval()
    model.attention = nn.MultiheadAttention(32, **options, batch_first=True).eval()
    split, told = with_sizes_known(model, tokens(3, 6, 32))
    assert told == (True,)
    torch.testing.assert_close(split(*tokens(3, 6, 32)), model(*tokens(3, 6, 32)))


@pytest.mark.parametrize("call", [{"attn_mask": OF_HEADS[:4]}, {"key_padding_mask": PADDED[1]}])
@torch.no_grad()
def test_masks_of_one_sample(call):
    model, inputs = Attends(call=call).eval(), tokens(6, 32)
    split, told = with_sizes_known(model, inputs)
    assert told == (True,)
    torch.testing.assert_close(split(*inputs), model(*inputs), equal_nan=True)


class MaskOverwritten(Attends):
    def forward(self, x, y):
        hidden = y[:, 0, :6] > 1.5
        mask = hidden.logical_and(HIDDEN)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        mask.view(-1).logical_or_(hidden.view(-1))
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


@torch.no_grad()
def test_a_mask_that_is_written_is_another():
    model, inputs = MaskOverwritten().eval(), tokens(6, 3, 32)
    split, told = with_sizes_known(model, inputs)
    assert told == (True, True)
    torch.testing.assert_close(split(*inputs), model(*inputs))


class Masked(Attends):
    """Attention, and attention of its result, with masks that the model holds."""

    def __init__(self, first, second, dtype=torch.float32):
        super().__init__()
        self.other = nn.MultiheadAttention(32, 4).to(dtype)
        self.dtype, self.first, self.second = dtype, first, second
        self.register_buffer("attn_mask", FALLING > 3)
        self.register_buffer("padded", torch.arange(6).expand(3, 6) > 4)
        self.register_buffer("unpadded", torch.arange(6).expand(3, 6) < 1)

    def masks(self, padded):
        return {"attn_mask": self.attn_mask, "key_padding_mask": getattr(self, padded)}

    def forward(self, x, y):
        wide = x.to(self.dtype)
        x = self.other(wide, wide, wide, **self.masks(self.first))[0].to(x.dtype)
        return self.attention(x, x, x, **self.masks(self.second))[0]


@pytest.mark.parametrize(
    ("masks", "dtype"),
    [(("padded", "padded"), torch.float64), (("padded", "unpadded"), torch.float32)],
)
@torch.no_grad()
def test_masks_are_shared_by_queries_of_one_type_and_with_the_same_others(masks, dtype):
    model, inputs = Masked(*masks, dtype).eval(), tokens(6, 3, 32)
    split, told = with_sizes_known(model, inputs)
    assert told == (True, True)
    torch.testing.assert_close(split(*inputs), model(*inputs))


def with_sizes_known(model, inputs):
    """The model after the pass, in a graph for these inputs alone, and whether that applied it."""
    captured = capture(copy.deepcopy(model))
    sized, _ = for_sizes(captured.module, inputs, captured.opaque, [split_attention])
    return sized.graph, tuple(site.applied for site in sized.passes[0].sites)


@pytest.mark.parametrize("norm_first", [True, False])
@torch.no_grad()
def test_tokens_of_a_batch_that_lie_otherwise_leave_so(norm_first):
    """In its order, a sum lies as its first operand does: `x + layer(x)` as x."""
    model = nn.TransformerDecoderLayer(16, 2, 32, norm_first=norm_first).eval()
    inputs = [torch.randn(2, length, 16).transpose(0, 1) for length in (3, 5)]
    fast = nhwc.optimize(model, *inputs)
    expected, found = model(*inputs), fast(*inputs)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


class Text(nn.Module):
    """Layers as CLIP's, whose mask is a buffer of the model, read by every layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4) for _ in "ab")
        self.norm = nn.LayerNorm(32)
        self.register_buffer("mask", CAUSAL.clone())

    def forward(self, x):
        for layer in self.layers:
            h = self.norm(x)
            x = x + layer(h, h, h, need_weights=False, attn_mask=self.mask)[0]
        return x


@torch.no_grad()
def test_a_mask_is_read_as_it_is_now(tmp_path):
    model, x = Text().eval(), torch.randn(6, 2, 32)
    fast = force(model, x)
    torch.testing.assert_close(fast(x), model(x))
    nhwc.save(fast, tmp_path / "text.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "text.nhwc")(x), model(x))
    for changed in (model, fast):
        (mask,) = changed.buffers()
        mask.copy_(FALLING)
    for changed in (copy.copy(fast), copy.deepcopy(fast), fast):
        with pytest.warns(UserWarning, match="the plan for 6x2x32 float32 is dropped"):
            found = changed(x)
        torch.testing.assert_close(found, model(x))
    for refuses in (model, fast):
        with pytest.raises(RuntimeError, match=r"shape of the 2D attn_mask is .*6, 6"):
            refuses(x[:4])


def hooked():
    model = Attends()
    model.attention.register_forward_hook(lambda *_: None)
    return model


def forward_of_its_own():
    model = Attends()
    torchs = model.attention.forward

    def doubled(query, *others):
        return torchs(query, *others)[0] * (2 if query.isfinite().all() else 1), None

    model.attention.forward = doubled
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Attends(call={"need_weights": True}), "weights are asked for"),
        (Attends(call={"attn_mask": torch.zeros(5, 5)}), "sizes of its mask"),
        (Attends(add_bias_kv=True), "a key of its own"),
        (Attends(add_zero_attn=True), "a key of its own"),
        (hooked(), "hooks"),
        (forward_of_its_own(), "a forward of its own"),
    ],
)
def test_what_is_left_alone_says_why(model, reason):
    model, inputs = model.eval(), tokens(5, 3, 32)
    changed, (report,) = rewrite(model, split_attention)
    for got, wanted in zip(changed(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(got, wanted)
    assert [reason in site.reason for site in report.sites] == [True]


def test_a_transformer_layer_is_optimized_and_saved(tmp_path):
    torch.manual_seed(5)
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 9, 64)
    fast = nhwc.optimize(model, x)
    split = next(r for r in fast.report.passes if r.name == "split_attention")
    assert len(split.applied) == 1
    torch.testing.assert_close(fast(x), model(x))
    nhwc.save(fast, tmp_path / "layer.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "layer.nhwc")(x), model(x))


class Functional(Attends):
    """The same by the function that the module calls."""

    def __init__(self, **call):
        super().__init__()
        own = {"bias_k": None, "bias_v": None, "add_zero_attn": False, "dropout_p": 0.5}
        self.more = own | {"need_weights": False} | call

    def forward(self, x, y):
        own = self.attention
        weights = {
            "in_proj_weight": own.in_proj_weight,
            "in_proj_bias": own.in_proj_bias,
            "out_proj_weight": own.out_proj.weight,
            "out_proj_bias": own.out_proj.bias,
        }
        return nn.functional.multi_head_attention_forward(x, y, y, 32, 4, **weights, **self.more)[0]


class Native(Attends):
    def forward(self, x, y):
        end = self.attention.out_proj
        weights = self.attention.in_proj_weight, self.attention.in_proj_bias
        return torch._native_multi_head_attention(
            x, x, x, 32, 4, *weights, end.weight, end.bias, need_weights=False
        )[0]


@pytest.mark.parametrize("model", [Functional(training=False), Native()])
def test_the_functions_that_the_module_calls(model):
    model, inputs = model.eval(), tokens(6, 3, 32)
    changed, (report,) = rewrite(model, split_attention)
    assert [site.applied for site in report.sites] == [True]
    assert not any(name in changed.code for name in ("torch._native", "functional.multi"))
    with torch.no_grad():
        torch.testing.assert_close(changed(*inputs), model(*inputs))


class Pools(nn.Module):
    """The pool at the end of CLIP's ResNets: its last layer returns other sizes than attention."""

    def __init__(self, apart):
        super().__init__()
        self.apart = apart
        self.queries, self.keys, self.values = (nn.Linear(32, 32) for _ in "qkv")
        self.end = nn.Linear(32, 20)

    def forward(self, x, y):
        layers = self.queries, self.keys, self.values
        pairs = zip("qkv", layers, strict=True)
        own = {f"{kind}_proj_weight": layer.weight for kind, layer in pairs}
        if not self.apart:
            own = {"in_proj_weight": torch.cat([layer.weight for layer in layers])}
        return nn.functional.multi_head_attention_forward(
            *(x[:1], x, x, 32, 4),
            in_proj_weight=own.pop("in_proj_weight", None),
            in_proj_bias=torch.cat([layer.bias for layer in layers]),
            bias_k=None,
            bias_v=None,
            add_zero_attn=False,
            dropout_p=0.0,
            out_proj_weight=self.end.weight,
            out_proj_bias=self.end.bias,
            training=False,
            need_weights=False,
            use_separate_proj_weight=self.apart,
            **own,
        )[0]


@pytest.mark.parametrize("apart", [False, True])
def test_a_last_layer_that_returns_other_sizes(apart):
    model, inputs = Pools(apart).eval(), tokens(6, 3, 32)
    changed, (_, report) = rewrite(model, fold_constants, split_attention)
    assert [site.applied for site in report.sites] == [True]
    with torch.no_grad():
        torch.testing.assert_close(changed(*inputs), model(*inputs))
        torch.testing.assert_close(nhwc.optimize(model, *inputs)(*inputs), model(*inputs))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"training": True}, "training mode"),
        ({"bias_k": torch.ones(1, 1, 32), "bias_v": torch.ones(1, 1, 32)}, "a key of its own"),
        ({"add_zero_attn": True}, "a key of its own"),
        ({"attn_mask": torch.zeros(6, 6)}, "mask"),
        ({"static_k": torch.zeros(12, 6, 8)}, "given"),
        ({"key_padding_mask": torch.zeros(3, 6, dtype=torch.bool)}, "mask"),
    ],
)
def test_functions_left_alone_say_why(call, reason):
    _, (report,) = rewrite(Functional(**{"training": False} | call).eval(), split_attention)
    assert [reason in site.reason for site in report.sites] == [True]


def test_a_function_that_is_not_told_whether_it_trains_does():
    graph = fx.symbolic_trace(Functional(training=False))
    (call,) = (node for node in graph.graph.nodes if "training" in node.kwargs)
    call.kwargs = {name: value for name, value in call.kwargs.items() if name != "training"}
    assert "training mode" in split_attention(graph).sites[0].reason


class Encoder(nn.Module):
    """`nn.TransformerEncoderLayer` as torch.compile sees it."""

    def __init__(self, *masks, norm_first=False, activation="relu"):
        super().__init__()
        torch.manual_seed(5)
        options = {"norm_first": norm_first, "activation": activation, "batch_first": True}
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, layer_norm_eps=1e-3, **options)
        self.masks, self.options = masks, (activation == "gelu", norm_first, 1e-3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x):
        own, end = self.layer.self_attn, self.layer.self_attn.out_proj
        layers = self.layer.norm1, self.layer.norm2, self.layer.linear1, self.layer.linear2
        tensors = (t for one in layers for t in (one.weight, one.bias))
        return torch._transformer_encoder_layer_fwd(
            *(x, 32, 4, own.in_proj_weight, own.in_proj_bias, end.weight, end.bias),
            *self.options,
            *tensors,
            *self.masks,
        )


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_encoder_layer_as_torch_compile_sees_it(norm_first, activation):
    model, (x, _) = Encoder(norm_first=norm_first, activation=activation).eval(), tokens(2, 6, 32)
    changed, (report,) = rewrite(model, split_attention)
    assert [site.applied for site in report.sites] == [True]
    assert "torch._transformer" not in changed.code
    with torch.no_grad():
        torch.testing.assert_close(changed(x), model(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(changed(x)[0], model.layer(x)[0], rtol=1e-4, atol=1e-4)


def test_an_encoder_layer_with_a_mask_is_left():
    _, (report,) = rewrite(Encoder(PADDED, 1).eval(), split_attention)
    assert [site.reason for site in report.sites] == ["it has a mask"]
