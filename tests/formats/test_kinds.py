"""Models that are no plain modules: TorchScript, exported programs, graphs, compiled and packed."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

import nhwc
from nhwc import Format, audit, convert_, format_of
from nhwc._bench.engines import channels_last
from nhwc._bench.propagation import propagation
from nhwc._bench.runner import _names_and_bytes
from nhwc._bench.worker import _received
from nhwc.formats import source
from nhwc.formats.source import weights_in_code
from nhwc.formats.weights import convolution_weights, packed_convolutions

LAST = torch.channels_last

X = torch.rand(2, 3, 8, 8)


class Net(nn.Module):
    """A layer, a batch norm, and a weight of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.weight = nn.Parameter(torch.rand(8, 8, 3, 3))
        self.place = nn.Parameter(torch.rand(1, 8, 8, 8))

    def forward(self, x):
        return F.conv2d(self.norm(self.conv(x)).relu() + self.place, self.weight)


def quietly(make, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(*args)


def saved_and_loaded(net):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(net), file)
    file.seek(0)
    return torch.jit.load(file)


KINDS = {
    "plain": lambda net: net,
    "scripted": torch.jit.script,
    "traced": lambda net: torch.jit.trace(net, X),
    "loaded": saved_and_loaded,
    "frozen": lambda net: torch.jit.freeze(torch.jit.script(net)),
    "graph": torch.fx.symbolic_trace,
    "exported": lambda net: torch.export.export(net, (X,)),
    "exported module": lambda net: torch.export.export(net, (X,)).module(),
    "unflattened": lambda net: torch.export.unflatten(torch.export.export(net, (X,))),
    "compiled": lambda net: torch.compile(net, backend="eager"),
    "inside": lambda net: nn.Sequential(nn.Identity(), torch.jit.script(net)),
}


def made(kind):
    return quietly(KINDS[kind], Net().eval())


def stored(model):
    """The convolution weights as `convert_` leaves them, wherever the model holds them."""
    inner = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    return [weight.tensor for weight in convolution_weights(inner)]


def run(model, x):
    inner = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    with torch.no_grad():
        return inner(x)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_converted_in_place_and_back(kind):
    model = made(kind)
    want, plain = run(model, X), [tuple(w.stride()) for w in stored(model)]
    assert convert_(model) is model
    assert [format_of(w) for w in stored(model)] == [Format.CHANNELS_LAST] * 2
    got = run(model, X)
    assert format_of(got) is Format.CHANNELS_LAST
    torch.testing.assert_close(got, want)
    convert_(model, Format.CONTIGUOUS)
    assert [tuple(w.stride()) for w in stored(model)] == plain
    assert format_of(run(model, X)) is Format.CONTIGUOUS


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_weights_of_convolutions_is_converted(kind):
    model = convert_(made(kind))
    inner = model.module() if isinstance(model, torch.export.ExportedProgram) else model
    places = [p for name, p in inner.named_parameters() if name.endswith("place")]
    assert [format_of(p) for p in places] == [Format.CONTIGUOUS] * (kind != "frozen")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_audited_and_left_as_it_was(kind):
    model = made(kind)
    before = [(w.data_ptr(), w.stride()) for w in stored(model)]
    report = audit(model, X)
    assert report.converted
    assert not report.lost
    convolutions = [c for c in report.calls if "conv" in c.operator]
    assert len(convolutions) == 2
    assert all(c.inputs[1].format is Format.CHANNELS_LAST for c in convolutions)
    assert [(w.data_ptr(), w.stride()) for w in stored(model)] == before


@pytest.mark.parametrize("kind", ["scripted", "frozen", "exported"])
def test_formats_are_compared_on_copies_of_every_kind(kind):
    model = made(kind)
    before = [w.data_ptr() for w in stored(model)]
    assert len(audit(model, X, compare=True).comparison.before.seconds) == 10
    assert [w.data_ptr() for w in stored(model)] == before


@pytest.mark.parametrize("kind", ["scripted", "traced", "loaded", "frozen"])
@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("fuse", nhwc.fuse),
        ("optimize", lambda model: nhwc.optimize(model, X)),
        ("save", lambda model: nhwc.save(model, "never.nhwc")),
    ],
)
def test_torchscript_is_refused_by_what_rewrites(kind, verb, call):
    word = "traced" if kind == "traced" else "scripted"
    says = rf"^cannot {verb} a TorchScript module \({word}\): its code is compiled\. Pass the"
    with pytest.raises(nhwc.InputError, match=says) as caught:
        call(made(kind))
    assert "\n" not in str(caught.value)


def test_torchscript_in_a_wrapper_is_refused_as_it_is_alone():
    with pytest.raises(nhwc.InputError, match=r"^cannot fuse a TorchScript module \(scripted\)"):
        nhwc.fuse(nn.DataParallel(made("scripted")).eval())


def test_torchscript_inside_of_a_model_is_left_with_its_reason():
    model = made("inside").eval()
    fused = nhwc.fuse(model)
    assert [(part.path, part.reason) for part in fused.report.opaque] == [
        ("1", "it is a TorchScript module")
    ]
    torch.testing.assert_close(run(fused, X), run(model, X))


def modes_of(program):
    parts = program.named_modules() if isinstance(program, nn.Module) else ()
    return {name: part.training for name, part in parts}


@pytest.mark.parametrize("kind", ["exported", "exported module"])
def test_an_exported_program_is_rewritten_with_its_guards(kind):
    program = made(kind)
    want = run(program, X)
    modes = modes_of(program)
    results = nhwc.fuse(program), nhwc.optimize(program, X)
    assert modes_of(program) == modes
    for result in results:
        torch.testing.assert_close(run(result, X), want, atol=1e-4, rtol=1e-4)
        with pytest.raises((AssertionError, RuntimeError), match="Guard failed"):
            result(torch.rand(1, 3, 8, 8))


def test_a_program_exported_in_training_mode_is_no_model_for_inference():
    program = quietly(lambda: torch.export.export(Net().train(), (X,)))
    with pytest.raises(nhwc.InputError, match="is in training mode"):
        nhwc.optimize(program, X)


def test_a_function_of_torchscript_is_no_model():
    function = quietly(lambda: torch.jit.trace(lambda x: x * 2, X))
    for verb, call in (("audit", audit), ("optimize", nhwc.optimize)):
        with pytest.raises(nhwc.InputError, match=f"cannot {verb} a TorchScript function"):
            call(function, X)


@pytest.mark.parametrize("kind", ["scripted", "frozen", "exported", "graph"])
def test_bench_times_converted_weights_of_every_kind(kind):
    model = made(kind)
    names, sent = _names_and_bytes([model])
    received = _received(sent[names[0]])
    assert propagation(received, (X,)) == "clean"
    function, arguments = channels_last.prepare(received, (X,))
    assert [format_of(w) for w in stored(received)] == [Format.CHANNELS_LAST] * 2
    torch.testing.assert_close(run(function, *arguments), run(model, X))


def test_weights_that_are_packed_have_no_format():
    packed = quietly(
        lambda: torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.script(Net().eval())))
    )
    if packed_convolutions(packed):
        with pytest.raises(nhwc.InputError, match="holds its weight packed for one kernel"):
            convert_(packed)
    report = audit(packed, X)
    assert not report.findings


def test_quantized_convolutions_are_left():
    conv = quietly(lambda: torch.ao.nn.quantized.Conv2d(3, 8, 3))
    net = nn.Sequential(nn.Conv2d(3, 3, 3), conv)
    assert packed_convolutions(net) == ["1"]
    assert format_of(convert_(net)[0].weight) is Format.CHANNELS_LAST
    with pytest.raises(nhwc.InputError, match="every convolution of the Sequential holds its"):
        convert_(nn.Sequential(conv))


class Standardized(nn.Module):
    """Weights that reach their convolution through names, a method, a list and a dict."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.rand(4, 4, 3, 3))
        self.mixed = nn.Parameter(torch.rand(4, 4, 3, 3))
        self.listed = nn.ParameterList([torch.rand(4, 4, 3, 3) for _ in range(2)])
        self.named = nn.ParameterDict({"one": torch.rand(4, 4, 3, 3)})
        self.register_buffer("blur", torch.rand(4, 1, 3, 3))
        self.volume = nn.Parameter(torch.rand(4, 4, 3, 3, 3))
        self.image = nn.Parameter(torch.rand(1, 4, 8, 8))
        self.vector = nn.Parameter(torch.rand(4))

    def standardized(self):
        return self.kernel - self.kernel.mean((1, 2, 3), keepdim=True)

    def forward(self, x):
        x = F.conv2d(x + self.image, self.standardized(), self.vector, padding=1)
        weight = self.mixed * 2
        for one in self.listed:
            x = torch.conv2d(x, one, padding=1)
        x = torch.nn.functional.conv2d(input=x, weight=weight, padding=1)
        x = F.conv_transpose2d(x, self.named["one"], padding=1)
        y = F.conv3d(x[:, :, None].expand(-1, -1, 3, -1, -1), self.volume, padding=1)
        return F.conv2d(y[:, :, 0], self.blur.expand(4, 1, 3, 3), groups=4)


def test_weights_in_code_are_found_however_they_get_there():
    assert weights_in_code(Standardized) >= {"kernel", "mixed", "listed", "named", "blur", "volume"}
    net = convert_(Standardized())
    found = {weight.name for weight in convolution_weights(net)}
    assert found == {
        *("kernel", "mixed", "listed.0", "listed.1", "named.one", "blur", "volume"),
    }
    assert format_of(net.image) is Format.CONTIGUOUS
    assert format_of(net.volume) is Format.CHANNELS_LAST_3D
    assert format_of(convert_(net, Format.CONTIGUOUS).kernel) is Format.CONTIGUOUS


def test_code_that_names_no_convolution_is_not_parsed(monkeypatch):
    class Scales(nn.Module):
        def forward(self, x):
            return x * self.scale

    def parsed(kind):
        raise AssertionError(kind)

    monkeypatch.setattr(source.inspect, "getsource", parsed)
    assert weights_in_code(Scales) == frozenset()
    with pytest.raises(AssertionError):
        weights_in_code(Standardized)


def test_a_weight_that_another_function_convolves_is_named_by_audit():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8, 3, 3, 3))

        def forward(self, x):
            return convolve(x, self.weight)

    (finding,) = audit(Hidden(), X).findings
    assert (finding.kind, finding.operator) == ("unconverted", "weight")
    assert "which nhwc.convert_ does not find" in finding.remedy
    assert finding.site.source == "return F.conv2d(x, weight)"


def convolve(x, weight):
    return F.conv2d(x, weight)


def test_a_weight_that_depends_on_the_input_is_nobodys():
    class Dynamic(nn.Module):
        def __init__(self):
            super().__init__()
            self.image = nn.Parameter(torch.rand(2, 3, 3, 3))

        def forward(self, x):
            return torch.conv2d(x, x[:, :, :3, :3] + self.image)

    for model in (torch.jit.script(Dynamic()), torch.fx.symbolic_trace(Dynamic())):
        assert not convolution_weights(model)


@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        lambda conv: prune.l1_unstructured(conv, "weight", 0.3),
        lambda conv: parametrize.register_parametrization(conv, "weight", nn.Tanh()),
    ],
)
def test_changed_layers_compute_the_same(change):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conv = change(nn.Conv2d(3, 8, 3)).eval()
    want = conv(X)
    torch.testing.assert_close(convert_(conv)(X), want)
    own = [p for p in (*conv.parameters(), *conv.buffers()) if p.ndim == 4 and p[0].numel() > 1]
    assert {format_of(p) for p in own} == {Format.CHANNELS_LAST}


def test_a_pruned_weight_is_computed_in_the_format():
    conv = convert_(prune.l1_unstructured(nn.Conv2d(3, 8, 3), "weight", 0.3))
    conv(X)
    assert format_of(conv.weight) is Format.CHANNELS_LAST


def test_models_made_in_inference_mode_and_on_the_meta_device():
    with torch.inference_mode():
        served = nn.Conv2d(3, 8, 3)
    assert format_of(convert_(served).weight) is Format.CHANNELS_LAST
    with torch.device("meta"):
        planned = nn.Conv2d(3, 8, 3)
    assert convert_(planned).weight.is_contiguous(memory_format=LAST)


def test_weights_that_overlap_are_refused():
    one, two = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 4, 3)
    two.weight = nn.Parameter(one.weight.data[2:6])
    with pytest.raises(nhwc.InputError, match=r"0\.weight and 1\.weight share memory and do not"):
        convert_(nn.Sequential(one, two))
    flat = torch.rand(2 * 8 * 3 * 9)
    one.weight = nn.Parameter(flat[:216].view(8, 3, 3, 3))
    two.weight = nn.Parameter(flat[216:324].view(4, 3, 3, 3))
    convert_(nn.Sequential(one, two))


def test_weights_in_tensors_of_another_class_are_refused():
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        def __tensor_flatten__(self):
            return ["inner"], None

        @staticmethod
        def __tensor_unflatten__(inner, context, size, strides):
            return Wrapped(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            unwrapped = [a.inner if isinstance(a, Wrapped) else a for a in args]
            result = func(*unwrapped, **(kwargs or {}))
            return Wrapped(result) if isinstance(result, torch.Tensor) else result

    conv = nn.Conv2d(3, 8, 3)
    conv.weight = nn.Parameter(Wrapped(torch.rand(8, 3, 3, 3)), requires_grad=False)
    with pytest.raises(nhwc.InputError, match=r"weight is a .*, which lays out its memory itself"):
        convert_(conv)


def test_copies_of_frozen_torchscript_share_their_constants_with_it():
    # What `audit` and `bench` reckon with: should torch change it, they may do without.
    frozen = made("frozen")
    pairs = zip(stored(frozen), stored(copy.deepcopy(frozen)), strict=True)
    assert all(one.data_ptr() == other.data_ptr() for one, other in pairs)
