"""What the code asks for is no loss, and a tensor that is made anew had nothing to lose."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc import audit, strict
from nhwc._audit.remedies import remedy
from nhwc.render.audit_text import audit_text
from nhwc.watch.effects import Effect, Tracker, short_name
from nhwc.watch.recorder import Recorder

from ..nets import Between, channel_shuffle, last

PLAIN = torch.contiguous_format
SHAPE = (2, 4, 8, 8)
X = last(*SHAPE)


def effects(call):
    """What each operator in `call` did to the format, and the calls."""
    recorder, tracker = Recorder(None), Tracker()
    with recorder:
        call()
    return [tracker.follow(one).effect for one in recorder.calls], recorder.calls


def takes_a_format():
    """Every overload of torch that takes an image and a memory format."""
    for schema in torch._C._jit_get_all_schemas():
        names = [argument.name for argument in schema.arguments]
        is_aten = schema.name.startswith("aten::") and not schema.name.endswith("_")
        first = str(schema.arguments[0].type) if names else ""
        takes_image = is_aten and names[:1] == ["self"] and first == "Tensor"
        if takes_image and "memory_format" in names and "out" not in names:
            yield schema


def arguments_of(schema):
    plain = {"number": 2, "int": 2, "List[int]": [*SHAPE], "bool": False, "Tensor": torch.tensor(2)}
    plain |= {"Device": torch.device("cpu")}
    values = {}
    for argument in schema.arguments[1:]:
        if not argument.has_default_value() and argument.name != "memory_format":
            by_name = {"dtype": torch.float64, "generator": None, "low": 0}
            if argument.name in by_name:
                values[argument.name] = by_name[argument.name]
            else:
                values[argument.name] = plain[str(argument.type)]
    return values


SCHEMAS = [
    pytest.param(schema, id=f"{schema.name}.{schema.overload_name}") for schema in takes_a_format()
]


def test_torch_has_many_operators_that_take_a_format():
    names = {parameter.values[0].name.partition("::")[2] for parameter in SCHEMAS}
    assert names >= {"clone", "contiguous", "to", "_to_copy", "empty_like", "zeros_like"}
    assert names >= {"ones_like", "full_like", "rand_like", "randn_like", "randint_like"}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("schema", SCHEMAS)
def test_no_operator_that_takes_a_format_is_blamed_for_it(schema):
    operator = getattr(torch.ops.aten, schema.name.partition("::")[2])
    overload = getattr(operator, schema.overload_name or "default")
    given = arguments_of(schema)

    def call():
        # Not on their own tensors, in TorchScript alone, or not of this kind of tensor.
        try:
            overload(X, **given, memory_format=PLAIN)
        except nhwc.FormatLost:
            raise
        except (NotImplementedError, RuntimeError) as error:
            pytest.skip(str(error).splitlines()[0])

    with strict():
        call()
    assert not {Effect.LOSES, Effect.MISREADS}.intersection(effects(call)[0])


METHODS = {
    "float": torch.float64,
    "double": torch.float32,
    "half": torch.float32,
    "bfloat16": torch.float32,
    **dict.fromkeys(("int", "long", "short", "char", "byte", "bool", "cfloat"), torch.float32),
    "cpu": torch.float32,
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_convert_are_asked_and_say_so(name):
    x = X.to(METHODS[name])
    (effect,), (call,) = effects(lambda: getattr(x, name)(memory_format=PLAIN))
    assert effect is Effect.CONVERTS
    said = remedy(call, effect)
    assert said.startswith(f"This `{name}` is asked for memory_format=torch.contiguous_format.")
    assert "no channels-last path" not in said
    assert effects(lambda: getattr(x, name)())[0] == [Effect.KEEPS]


def test_a_shuffle_is_not_told_to_take_a_format_that_its_view_cannot():
    (shuffle,) = nhwc.audit(Between(channel_shuffle), torch.rand(2, 3, 8, 8)).findings
    assert "nn.ChannelShuffle" in shuffle.remedy
    assert "memory_format" not in shuffle.remedy
    (effect,), (call,) = effects(last(2, 4, 4, 8, 8).contiguous)
    assert effect is Effect.CONVERTS
    assert "memory_format=torch.channels_last_3d" in remedy(call, effect)


@pytest.mark.parametrize(
    "between",
    [
        channel_shuffle,
        nn.InstanceNorm2d(8),
        nn.Softmax(1),
        lambda x: torch.cat((x[:, :4].contiguous(), x[:, 4:]), 1),
    ],
)
def test_a_graph_of_torch_export_gets_the_words_of_the_code_it_was_made_of(between):
    net, x = Between(between).eval(), torch.rand(2, 3, 8, 8)
    reports = [nhwc.audit(model, x) for model in (net, torch.export.export(net, (x,)))]
    eager, exported = (
        {(f.kind, short_name(f.operator), f.remedy.partition(" That input")[0]) for f in r.findings}
        for r in reports
    )
    assert exported == eager != set()


def test_what_a_graph_of_torch_export_leaves_empty_differs_by_nature():
    class Filled(nn.Conv2d):
        def forward(self, x):
            x = super().forward(x)
            return torch.empty_like(x), x

    model = torch.export.export(Filled(3, 8, 3), (torch.rand(2, 3, 8, 8),))
    agreement = nhwc.audit(model, torch.rand(2, 3, 8, 8), compare=True).agreement
    assert agreement.first is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.zeros_like(X, memory_format=PLAIN),
        lambda: X.to(torch.float64, memory_format=PLAIN),
        lambda: X.to(torch.float64, False, True, memory_format=PLAIN),
        lambda: torch.clone(X, memory_format=PLAIN),
        lambda: X[:1, :, :, :].to(memory_format=PLAIN),
    ],
)
def test_other_ways_of_asking(call):
    with strict():
        call()
    assert effects(call)[0][-1] is Effect.CONVERTS


@pytest.mark.parametrize(
    "call",
    [
        lambda: X.new_zeros(SHAPE),
        lambda: X.new_ones(SHAPE),
        lambda: X.new_empty(SHAPE),
        lambda: X.new_full(SHAPE, 1.0),
        lambda: X.new_tensor(X.tolist()),
        lambda: X.new_empty_strided(SHAPE, (256, 64, 8, 1)),
    ],
)
def test_new_tensors_are_fresh(call):
    with strict():
        call()
    assert Effect.LOSES not in effects(call)[0]


def test_a_fresh_tensor_in_channels_last_pays_for_nothing():
    plain = torch.rand(SHAPE)
    made = lambda: torch.zeros_like(plain, memory_format=torch.channels_last)
    assert effects(made)[0] == [Effect.KEEPS]


def test_torchscript_that_asks_is_only_warned_of():
    class Asks(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x, memory_format=torch.contiguous_format) + 1

    with pytest.warns(UserWarning, match="asked for, or inside"), strict():
        torch.jit.script(Asks())(X)


CORRECT = {
    "factory": lambda x: x + torch.zeros_like(x) * torch.ones_like(x) + torch.empty_like(x).zero_(),
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "mask": lambda x: x[x > 0.5],
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "scalars": lambda x: x.sum() + x.mean() + x.max() + x.norm(),
    "pooled": lambda x: x.mean((2, 3)) + x.amax((2, 3)),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "nonzero": lambda x: x.nonzero(),
    "argmax": lambda x: x.argmax(1),
    "sort": lambda x: x.sort(1).values,
    "complex": lambda x: torch.view_as_real(x.to(torch.complex64)),
    "stack": lambda x: torch.stack([x, x], 1).flatten(0, 1),
    "einsum": lambda x: torch.einsum("nchw,dc->ndhw", x, torch.rand(4, 4)),
    "attention": lambda x: (x.flatten(2).transpose(1, 2) @ x.flatten(2)).softmax(-1),
    "norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
    "tokens": lambda x: F.linear(x.flatten(2).transpose(1, 2), torch.rand(8, 4)),
    "embedding": lambda x: F.embedding(x.argmax(1), torch.rand(4, 4)).permute(0, 3, 1, 2),
    "one hot": lambda x: F.one_hot(x.argmax(1), 4).permute(0, 3, 1, 2),
    "views": lambda x: torch.cat([x.chunk(2, 1)[0], x[:, 2:]], 1),
    "out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "head": lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
    "loss": lambda x: F.cross_entropy(x, torch.zeros(2, 8, 8, dtype=torch.long)),
    "shuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "quantized": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 255),
    "mapped": lambda x: torch.vmap(lambda one: one * 2)(x),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_code_is_not_blamed(name):
    with strict():
        CORRECT[name](X.clone())


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, words):
        return self.layer(self.table(words)).relu()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Tokens(), torch.zeros(2, 5, dtype=torch.long)),
        (nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.rand(8)),
        (nn.Conv1d(3, 4, 3), torch.rand(2, 3, 16)),
        (nn.Conv2d(3, 4, 3), torch.rand(3, 8, 8)),
    ],
)
def test_where_no_image_is_at_work_there_is_nothing_to_judge(model, inputs):
    report = audit(model, inputs)
    assert (report.clean, report.judged) == (True, 0)
    assert "nothing to judge: " in audit_text(report)


def test_a_model_that_maps_over_its_images_is_audited():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, images):
            return torch.vmap(lambda image: self.conv(image[None])[0])(images)

    operators = [call.operator for call in audit(Mapped().eval(), X).calls]
    assert "torch.nn.functional.conv2d" in operators


def test_what_vmap_makes_is_charged_to_the_line_that_it_maps():
    net = Between(torch.vmap(torch.Tensor.tril))
    (finding,) = nhwc.audit(net, torch.rand(2, 3, 8, 8)).findings
    assert short_name(finding.operator) == "tril"
    assert (len(finding.calls), len(finding.payers)) == (1, 1)
    assert nhwc.audit(Between(torch.vmap(torch.relu)), torch.rand(2, 3, 8, 8)).clean


def test_the_verdict_counts_what_was_kept_and_what_was_not_there_to_keep():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.mix = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 8)

        def forward(self, x):
            tokens = self.mix(self.conv(x).relu().permute(0, 2, 3, 1))
            return tokens.roll(1, 1)

    report = audit(Windows(), torch.rand(2, 3, 8, 8))
    assert report.clean
    text = " ".join(audit_text(report).split())
    assert "channels last is never lost: " in text
    told = [int(word) for word in text.split("never lost: ")[1].split("not visible")[0].split()
            if word.isdigit()]  # fmt: skip
    assert sum(told) == len(report.calls)
