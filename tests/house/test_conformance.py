"""A sample of the suites of others, and that a wrong answer would be seen."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from benchmarks.conformance import __main__ as conformance
from benchmarks.conformance import (
    judging,
    models,
    modules,
    networks,
    onnx,
    opinfo,
    shapes,
    verbs,
    weights,
)  # fmt: skip
from benchmarks.conformance.judging import Case, Verb, judge
from benchmarks.conformance.ledger import Ledger, Row
from benchmarks.conformance.page import BEGIN, END, README, page, recorded, summary
from benchmarks.conformance.verbs import USUAL, VERBS
from torch import nn
from torch._dynamo.backends import registry

from nhwc.errors import VerificationError
from nhwc.machine.workers import Ended, Nursery
from nhwc.models.vision import mend_torchvision

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of its own samples

OPERATORS = ("nn_functional_conv2d", "nn_functional_batch_norm", "cat", "add", "item", "empty")


def outcomes(cases, *verbs):
    chosen = {verb: VERBS[verb] for verb in verbs}
    return [outcome for case in cases for outcome in judge(case, chosen)]


@pytest.mark.parametrize("name", OPERATORS)
def test_samples_of_torch_itself(name):
    found = outcomes(opinfo.cases(f"{name} float32"), "fuse")
    assert found
    assert [one for one in found if one.verdict != "right"] == []


def test_samples_with_weights_of_the_model():
    found = outcomes(weights.cases("nn_functional_batch_norm float32"), "fuse", "gradients")
    assert {one.verb for one in found} == {"fuse", "gradients"}
    assert [one for one in found if one.verdict != "right"] == []
    # A grid that is not finite ends the process in torch's own backward pass: no suite asks for it.
    sampled = [*weights.cases("nn_functional_grid_sample float32")]
    assert {case.name.split(" ", 3)[3] for case in sampled} == {"plain", "strided", "channels last"}
    assert [one for one in outcomes(sampled, "fuse") if one.verdict != "right"] == []
    case = next(weights.cases("nn_functional_linear float32"))
    assert len(case.inputs) == 1
    assert [*case.model.state_dict()] == ["weight0", "weight1"]


@pytest.mark.parametrize("group", ["nn.BatchNorm2d float32 eval", "nn.GroupNorm float32 eval"])
def test_samples_of_torchs_modules(group):
    found = outcomes(modules.cases(group), "fuse", "gradients")
    assert {one.verb for one in found} == {"fuse", "gradients"}
    assert [one for one in found if one.verdict != "right"] == []


def test_a_sample_behind_torch_compile_and_looked_at_backwards():
    cases = itertools.islice(modules.cases("nn.Conv2d float32 eval"), 1)
    found = outcomes(cases, "compile", "audit backwards")
    assert [one.verdict for one in found] == ["right", "right"]


def test_compile_is_asked_where_the_package_is_read_from_its_folder(monkeypatch):
    registry._lazy_import()
    monkeypatch.delitem(registry._BACKENDS, "nhwc", raising=False)
    monkeypatch.delitem(registry._COMPILER_FNS, "nhwc", raising=False)
    case = Case("", nn.Conv2d(3, 4, 3).eval(), (torch.zeros(1, 3, 5, 5),))
    assert [one.verdict for one in outcomes([case], "compile")] == ["right"]


def test_a_model_without_weights_is_not_asked_behind_torch_compile():
    assert outcomes([Case("", nn.ReLU(), (torch.zeros(3),))], "compile") == []


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + self.count


@pytest.mark.parametrize(("more", "verdict"), [(0, "right"), (1, "wrong")])
def test_behind_torch_compile_a_wrong_graph_is_seen(more, verdict, monkeypatch):
    def backend(graph, examples):
        return lambda *inputs: tuple(x + more for x in graph(*inputs))

    monkeypatch.setattr(verbs, "by_name", backend)
    [outcome] = outcomes([Case("", Counts().eval(), (torch.zeros(3),))], "compile")
    assert outcome.verdict == verdict


def test_samples_of_onnx():
    mend_torchvision()  # onnx2torch imports it
    pytest.importorskip("onnx2torch")
    found = outcomes(onnx.cases("test_Conv2d_depthwise"), "fuse", "load")
    assert [one.verdict for one in found] == ["right", "right"]


def test_a_model_of_torchvision_in_every_form():
    found = outcomes(models.cases("torchvision:squeezenet1_1"), "fuse", "script", "trace")
    assert len(found) == 6
    assert [one for one in found if one.verdict != "right"] == []


def test_models_that_take_minutes_to_answer_are_no_groups():
    """One process with a model of 412 million parameters and its copy in float64 took 7 GB."""
    mend_torchvision()
    timm = pytest.importorskip("timm")
    every = models.groups()
    names = timm.list_models(module="deepseek_vit") + timm.list_models(module="tiny_vit")
    assert any(map(models.is_large, names))
    assert not any(map(models.is_large, every))
    assert any(group.startswith("timm:tiny_vit") for group in every)


@pytest.mark.parametrize("shape", ["ic17oc17ih8oh4kh3ph1sh2", "g128ic128ih14oh8oc128kh4sh2ph1"])
def test_shapes_of_onednn(shape, monkeypatch):
    monkeypatch.setattr(shapes, "_shapes", lambda: {shape: shapes.read(shape)})
    verdicts = [one.verdict for case in shapes.cases(shape) for one in shapes.judge(case, [""])]
    assert len(verdicts) >= 2
    assert set(verdicts) == {"right"}


def test_a_shape_is_read_as_it_is_meant():
    spec = shapes.read("mb1g16ic16oc16ih15oh7kh6sh2ph3iw10ow10kw3")
    assert (spec.padding, spec.wanted) == ((3, 1), (7, 10))
    spec = shapes.read("ic35oc32id13od11kd3pd0ih13oh12kh3ph0")
    assert (spec.wanted, spec.w, spec.frames) == ((12, 12), 13, shapes.Frames(13, 3))
    assert shapes.read("ic16oc16iw5ow5kw3pw1").h == 1


def test_random_networks():
    cases = itertools.islice(networks.cases("0"), 40)
    assert [one for one in outcomes(cases, "fuse") if one.verdict != "right"] == []


@pytest.mark.parametrize("seed", [5, 9])
def test_random_networks_through_every_verb(seed):
    case = next(case for case in networks.cases("0") if case.name == f"network {seed}")
    found = outcomes([case], "plan", *USUAL)
    assert [one for one in found if one.verdict in ("wrong", "failed")] == []


def test_a_lot_chooses_many_kernels_and_remembers_none():
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
    case = Case("", net, (torch.randn(1, 8, 9, 9),))
    found = [VERBS["plan"].prepare(replace(case, name=str(seed))).report for seed in range(8)]
    assert {report.chosen for report in found} == {"plan"}
    assert len({report.plans[0].layers[0].chosen.kernel for report in found}) > 2
    again = VERBS["plan"].prepare(replace(case, name="0")).report
    first, same = (report.plans[0].layers[0].chosen for report in (found[0], again))
    assert (same.kernel, same.layout) == (first.kernel, first.layout)
    assert not again.remembered


def test_a_wrong_fold_is_seen_and_shrunk(monkeypatch):
    folding = sys.modules["nhwc.passes.fold_bn_into_conv"]
    right = folding.scale_and_shift

    def too_large(*args, **kwargs):
        scale, shift = right(*args, **kwargs)
        return scale * 1.01, shift

    monkeypatch.setattr(folding, "scale_and_shift", too_large)
    wrong = [
        case
        for case in itertools.islice(networks.cases("0"), 12)
        if any(one.verdict == "wrong" for one in outcomes([case], "fuse"))
    ]
    assert wrong

    def fails(model):
        again = Case("", model, wrong[0].inputs, strides=False, wide=True)
        return [one.verdict for one in outcomes([again], "fuse")] == ["wrong"]

    assert len(networks.smaller(wrong[0].model, fails).steps) <= 2


class Keeps(nn.Module):
    def forward(self, x):
        return x.relu_()


@pytest.mark.parametrize(
    ("instead", "why"),
    [
        (lambda x: x.relu(), "inputs after the call"),
        (lambda x: x.relu_().clone(), "share memory"),
        (lambda x: x.relu_().double(), "dtype"),
        (lambda x: x.relu_().sum(), "shape"),
        (lambda x: x.relu_().mT, "strides"),
        (lambda x: x.relu_().add_(1), "not close"),
        (lambda x: [x.relu_()], "list of 1"),
        (lambda x: torch.zeros(2) + torch.zeros(3), "raises RuntimeError"),
    ],
)
def test_every_kind_of_difference_is_told(instead, why):
    case = Case("", Keeps().eval(), (torch.randn(3, 3),))
    [outcome] = judge(case, {"instead": Verb(lambda case: instead)})
    assert outcome.verdict == "wrong"
    assert why in outcome.why


def test_a_verb_that_writes_into_the_example_is_wrong():
    def written(case):
        case.inputs[0].add_(1)
        return case.model

    case = Case("", nn.ReLU(), (torch.zeros(3),))
    outcome, after = judge(case, {"writes": Verb(written), "reads": Verb(lambda case: case.model)})
    assert outcome.verdict == "wrong"
    assert outcome.why.startswith("the example inputs: ")
    assert after.verdict == "right"


def test_values_that_nothing_was_written_to_may_be_refused():
    def refuses(case):
        raise VerificationError("two calls differ")

    case = Case("", nn.ReLU(), (torch.zeros(3),))
    for unset, verdict in ((True, "refused"), (False, "wrong")):
        [outcome] = judge(replace(case, unset=unset), {"refuses": Verb(refuses)})
        assert outcome.verdict == verdict


class Steep(nn.Module):
    def forward(self, x):
        return (x - 1) * 1e4


def test_an_error_that_the_model_makes_of_any_rounding_is_told_and_right():
    case = Case("", Steep().eval(), (1 + 1e-4 * torch.randn(50),), strides=False, wide=True)
    rounded, other = (lambda x, by=by: (x * 1.1 * by / 1.1 - 1) * 1e4 for by in (1, 1.00001))
    verbs = {
        name: Verb(lambda case, call=call: call) for name, call in (("a", rounded), ("b", other))
    }
    right, wrong = judge(case, verbs)
    assert (right.verdict, wrong.verdict) == ("right", "wrong")
    assert "the model itself by" in right.why
    row = Row()
    row.add(right)
    assert row.told == [right]
    assert "Right, though farther off than eager" in page([Ledger("networks", "avx2", {"g": row})])


class Tied(nn.Module):
    """Marks the largest pixel of a plain image: any is, as its layer rounds."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3)

    def forward(self, x):
        return F.one_hot(self.conv(x * 0).flatten().argmax(), 36).to(x.dtype)


def test_which_of_equal_numbers_is_taken_is_up_to_rounding():
    case = Case("", Tied().eval(), (torch.randn(1, 1, 8, 8),), strides=False, wide=True)
    other = lambda x: F.one_hot(torch.tensor(7), 36).to(x.dtype)
    verbs = {"a": Verb(lambda case: other), "b": Verb(lambda case: lambda x: other(x) * 99)}
    right, wrong = judge(case, verbs)
    assert (right.verdict, wrong.verdict) == ("right", "wrong")


def test_a_process_that_dies_is_an_outcome():
    with Nursery("benchmarks.conformance.worker", networks.__name__, threads=1) as nursery:
        row = conformance.run_group(nursery, "networks", "no number", ["fuse"])
    assert row.counts == {("fuse", "failed"): 1}


class Scripted:
    """A nursery whose workers say what is written here, and note what they were asked."""

    def __init__(self, *scripts):
        self.scripts, self.requests = [list(script) for script in scripts], []

    def worker(self):
        self.said = self.scripts.pop(0)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def send(self, request):
        self.requests.append(request[2:])

    def hear(self, patience_s):
        said = self.said.pop(0)
        if isinstance(said, Ended):
            raise said
        return said


def right(case, verb):
    return judging.Outcome(case, verb, "right")


def test_behind_a_death_a_group_goes_on():
    verbs = ["audit", "fuse", "load"]
    nursery = Scripted(
        ["a", *(right("a", verb) for verb in verbs), "b", right("b", "audit"), Ended("gone")],
        ["b", Ended("gone again")],
        ["c", *(right("c", verb) for verb in verbs), None],
    )
    row = conformance.run_group(nursery, "opinfo", "g", verbs)
    assert nursery.requests == [(verbs, 0, verbs), (verbs, 1, ["load"]), (verbs, 2, verbs)]
    assert [(one.case, one.verb, one.why) for one in row.told] == [
        ("b", "fuse", "gone"),
        ("b", "load", "gone again"),
    ]
    assert row.counts.total() == 9


def test_a_group_that_dies_between_cases_stops():
    nursery = Scripted(["a", right("a", "fuse"), Ended("gone")])
    row = conformance.run_group(nursery, "opinfo", "g", ["fuse"])
    assert row.counts == {("fuse", "right"): 1, ("fuse", "failed"): 1}


def test_a_group_is_asked_about_the_verbs_that_it_lacks():
    ledger = Ledger("opinfo", "avx2")
    assert ledger.lacking("g", ["audit", "fuse"]) == ["audit", "fuse"]
    ledger.rows["g"] = Row(asked={"audit"})
    ledger.rows["g"].add(judging.Outcome("a", "audit", "right"))
    assert ledger.lacking("g", ["audit", "fuse"]) == ["fuse"]
    more = Row(asked={"fuse"})
    more.add(judging.Outcome("a", "fuse", "wrong", "why"))
    ledger.rows["g"].update(more)
    assert ledger.lacking("g", ["audit", "fuse"]) == []
    assert [one.why for one in ledger.told("wrong")] == ["why"]


def test_the_page_counts_and_names_reasons(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.conformance.ledger.RESULTS", tmp_path / "rows")
    row = Row(asked={"fuse"})
    row.add(judging.Outcome("a", "fuse", "right"))
    row.add(judging.Outcome("b 1", "fuse", "refused", "input 1 | 2 is empty"))
    Ledger("opinfo", "avx2", {"a": row}).write()
    [again] = recorded()
    assert again.rows == {"a": row}
    text = page([again])
    assert "| [opinfo](#opinfo) | avx2 | 1 of 0 | 2 | 1 | 1 | 0 | 0 |" in text
    assert "| opinfo | fuse | 1 | 1 | 0 | 0 |" in text
    said = summary([again])
    assert said.startswith("2 cases of 1 suites, with kernels for avx2, were asked 2 questions: 1 ")
    assert "| 1 | fuse | input # \\| # is empty | b 1 |" in text


def test_the_page_and_the_readme_say_what_the_results_hold():
    ledgers = recorded()
    assert ledgers
    assert page(ledgers) == (README.parent / "docs" / "conformance.md").read_text()
    assert f"{BEGIN}\n{summary(ledgers)}\n{END}" in README.read_text()


def test_operators_with_the_fewest_rows_come_first():
    ledger = Ledger("opinfo", "avx2", {"add int64": Row(), "sub int64": Row()})
    groups = ["add float32", "mul bool", "sub float32", "mul float32", "abs bool"]
    for seed in range(5):
        ordered = conformance._broad(groups, ledger, seed)
        assert sorted(ordered) == sorted(groups)
        assert {group.split()[0] for group in ordered[:2]} == {"mul", "abs"}


def test_structures_come_behind_the_plain_networks():
    plain, structured = (
        {step.name for seed in range(first, first + 30) for step in networks.network(seed)[0].steps}
        for first in (0, 10_000)
    )
    assert len(structured - plain) > 15
    found = outcomes(itertools.islice(networks.cases("10000"), 20), "fuse")
    assert [one for one in found if one.verdict != "right"] == []


def test_a_network_may_lose_all_its_channels_as_it_grows():
    model, inputs = networks.network(5425)
    model(*inputs)
