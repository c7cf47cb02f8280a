"""Choices under planted noise: what one moment got wrong is put right, and then left alone."""

import json
import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import nhwc.plan
from nhwc._optimize.contest import take_turns
from nhwc._optimize.task import OptimizeTask
from nhwc.formats import Format
from nhwc.machine.environment import Environment
from nhwc.plan import make_plan
from nhwc.plan.evidence import Evidence, RivalTime, evened, evidence_of
from nhwc.plan.implementation import Implementation, Timed
from nhwc.plan.ledger import Ledger
from nhwc.plan.measuring import Leisure, conversion_seconds
from nhwc.plan.recording import Seen

LAST, PLAIN = Format.CHANNELS_LAST, Format.CONTIGUOUS
IMAGE = torch.randn(1, 4, 8, 8)


class Clock:
    """A made-up clock: made-up kernels move it on by their time, times whatever disturbs them."""

    def __init__(self, **milliseconds):
        self.times = {name: one / 1e3 for name, one in milliseconds.items()}
        self.now, self.calls, self.disturb = 0.0, [], lambda name: 1.0

    def timer(self, function):
        start = self.now
        function()
        return self.now - start

    def kernels(self, *given):
        """A kernel of each name, all of which compute the convolution as torch does."""
        return tuple(Implementation(name, PLAIN, PLAIN, self._made(name)) for name in self.times)

    def _made(self, name):
        def prepare(weight, bias):
            def run(x):
                self.calls.append(name)
                self.now += self.times[name] * self.disturb(name)
                return F.conv2d(x, weight, bias, padding=1)

            return run

        return prepare


@pytest.fixture
def clock(monkeypatch):
    """Make `Clock(...)` the clock, and its kernels all that there are."""

    def make(**milliseconds):
        made = Clock(**milliseconds)
        monkeypatch.setattr("nhwc.machine.timing._seconds", made.timer)
        monkeypatch.setattr("nhwc.plan.scene.kernels_of_others", made.kernels)
        # What is done between calls takes real time, which a busy machine makes long.
        monkeypatch.setattr("nhwc.plan.trials._seconds_of", lambda between: 0.0)
        monkeypatch.setattr("nhwc.kernels.available", lambda: False)
        return made

    return make


def planned(path, leisure_s=math.inf, kinds=1):
    """What was chosen for each layer by a run that reads and writes the file at `path`."""
    ledger = Ledger(path)
    net = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, bias=i > 0) for i in range(kinds)))
    plan = make_plan(fx.symbolic_trace(net), (IMAGE,), ledger, leisure=Leisure(leisure_s))
    ledger.save()
    return plan


def names(plan):
    return [identifier.name for _, identifier in plan.kernels]


def sureness(plan):
    return [evidence.sureness for evidence in plan.evidence.values()]


def test_a_kernel_disturbed_once_is_chosen_in_the_end_and_nothing_is_measured_then(clock, tmp_path):
    clock = clock(right=1.0, wrong=2.0, hopeless=20.0)
    clock.disturb = lambda name: 3.0 if name == "right" else 1.0
    first = planned(tmp_path / "plans.json")
    assert (names(first), sureness(first)) == (["wrong"], ["open"])
    clock.disturb = lambda name: 1.0
    plans = []
    while not plans or plans[-1].renewed:
        clock.calls.clear()
        plans.append(planned(tmp_path / "plans.json"))
        assert names(plans[-1]) == ["right"]
        assert "hopeless" not in clock.calls
    # Two sittings of three say so, and then another plan measures nothing.
    assert len(plans) == 3
    assert sureness(plans[-1]) == ["settled"]
    assert {"right", "wrong"}.isdisjoint(clock.calls[1:])
    [evidence] = plans[-1].evidence.values()
    text = next(name for name in evidence.rivals if name.startswith("right"))
    assert evidence.seconds[text] == pytest.approx(1e-3)
    assert evidence.turns[text] >= 12


@pytest.mark.parametrize(("late", "waits_ms"), [(3, 0.1), (3, 20.0), (12, 0.15)])
def test_short_calls_that_waited_for_a_core_are_repeated(late, waits_ms, clock, tmp_path):
    """They took many times as long as a rival that needs but one core."""
    clock = clock(right=0.02, wrong=0.03)
    early = lambda name: name == "right" and clock.calls.count("right") <= late
    clock.disturb = lambda name: waits_ms / 0.02 if early(name) else 1.0
    assert names(planned(tmp_path / "plans.json", leisure_s=0.0)) == ["right"]


@pytest.mark.parametrize("seed", range(3))
def test_a_machine_that_is_never_calm_is_asked_so_often_and_no_more(seed, clock, tmp_path):
    clock, random_ = clock(right=1.0, wrong=1.5), random.Random(seed)
    clock.disturb = lambda name: random_.choice([1.0, 1.0, 2.0, 4.0])
    plans = [planned(tmp_path / "plans.json") for _ in range(8)]
    assert [plan.renewed for plan in plans[-2:]] == [0, 0]
    assert names(plans[-1]) == ["right"]


def test_fresh_plans_agree_where_kernels_cannot_be_told_apart(clock, tmp_path):
    clock, random_ = clock(one=1.01, other=1.0, slow=1.5), random.Random(0)
    clock.disturb = lambda name: 1 + 0.01 * random_.random()
    plans = [planned(tmp_path / f"{number}.json") for number in range(6)]
    assert {*map(tuple, map(names, plans))} == {("one",)}
    for _ in range(2):
        last = planned(tmp_path / "0.json")
    assert (names(last), sureness(last)) == (["one"], ["even"])
    assert planned(tmp_path / "0.json").renewed == 0
    # The report has each kernel's own time.
    assert last.choice[last.layers[0].node].seconds == pytest.approx(1.01e-3, rel=0.01)


def test_a_plan_measures_a_little_again_and_without_leisure_nothing(clock, tmp_path):
    clock(a=1.0, b=2.0)
    planned(tmp_path / "plans.json", kinds=2)
    assert planned(tmp_path / "plans.json", leisure_s=0.0, kinds=2).renewed == 0
    # What is left runs out in the first sitting, after which another run goes on.
    runs = [planned(tmp_path / "plans.json", leisure_s=1e-9, kinds=2) for _ in range(3)]
    assert [run.renewed for run in runs] == [1, 1, 0]
    assert sureness(runs[-1]) == ["settled", "settled"]


def test_what_was_measured_a_moment_ago_is_not_measured_again(clock, tmp_path):
    clock(a=1.0, b=2.0)
    ledger = Ledger(tmp_path / "plans.json")
    graph = fx.symbolic_trace(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)))
    plans = [make_plan(graph, (IMAGE,), ledger, leisure=Leisure(math.inf)) for _ in range(2)]
    assert [plan.renewed for plan in plans] == [0, 0]


def test_a_conversion_that_was_disturbed_is_timed_again(monkeypatch, tmp_path):
    seen = Seen((1, 4, 8, 8), torch.float32, "cpu", PLAIN)
    taken = iter([5.0, 1.0, 1.0])
    sitting = lambda *given: {"": RivalTime(*[next(taken)] * 2, 5)}
    monkeypatch.setattr("nhwc.plan.measuring.fastest", sitting)
    found = []
    for leisure in (0.0, 1.0, 0.0, 1.0):
        ledger = Ledger(tmp_path / "plans.json")
        found.append(conversion_seconds(seen, ledger, Leisure(leisure)))
        ledger.save()
    assert found == [5.0, 1.0, 1.0, 1.0]


def calm(*seconds):
    """A sitting that nothing disturbed."""
    return {str(number): RivalTime(float(one), float(one), 5) for number, one in enumerate(seconds)}


def restless(*seconds):
    return {str(number): RivalTime(float(one), 2.0 * one, 5) for number, one in enumerate(seconds)}


@pytest.mark.parametrize(
    ("sittings", "leader", "sureness", "waiting"),
    [
        ([calm(1, 2)], "0", "open", "01"),
        ([calm(1, 2, 9)], "0", "open", "01"),  # nothing makes 9 of 1
        ([calm(1, 9)], "0", "settled", ""),
        ([restless(1, 9)], "0", "open", "01"),
        ([calm(1, 2), calm(1, 2)], "0", "settled", ""),
        ([calm(1, 2), restless(1, 2)], "0", "open", "01"),
        ([calm(1, 2), calm(3, 2)], "0", "open", "01"),
        ([calm(1, 2), calm(3, 2), calm(1, 2)], "0", "settled", ""),
        ([calm(3, 2), calm(1, 2), calm(3, 2)], "0", "open", "01"),
        ([calm(1, 2), calm(2, 2)] * 2, "0", "open", "01"),  # two of four are less than two of three
        ([calm(1, 1.02)] * 2, "0", "open", "01"),
        ([calm(1, 1.02)] * 3, "0", "even", ""),
        ([restless(1, 2)] * 6, "0", "settled", ""),
        ([calm(0, 2)], "0", "settled", ""),
        ([calm(1)], "0", "settled", ""),
    ],
)
def test_when_evidence_is_settled(sittings, leader, sureness, waiting):
    evidence = Evidence(tuple(sittings))
    assert (evidence.leader, evidence.sureness) == (leader, sureness)
    assert "".join(evidence.open) == waiting
    assert evidence_of(json.loads(json.dumps(evidence.to_entry()))) == evidence


@pytest.mark.parametrize(
    "entry",
    [None, [], {}, 3, {"a": []}, {"a": 1}, {"a": [None]}, {"a": [[1.0, 1.0]]},
     {"a": [[1.0, 1.0, 2.5]]}, {"a": [["1", 1.0, 2]]}, {"a": [[-1.0, 1.0, 2]]},
     {"a": [[1.0, 1.0, 2]], "b": []}, {"a": [[1.0, 1.0, 2]] * 99},
     [{"kernel": "torch", "reads": None, "writes": None, "s": 0.5}]],
)  # fmt: skip
def test_what_is_no_evidence_is_none(entry):
    assert evidence_of(entry) is None


def test_times_of_an_older_nhwc_are_left_alone(tmp_path):
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"schema": 1, "entries": {"call of a program": 0.5}}))
    assert Ledger(path).get("call of a program") is None


def test_the_order_of_kernels_that_are_even_is_fixed():
    kernels = [
        Implementation("onednn", LAST, LAST),
        Implementation("nhwc winograd", LAST, LAST, emit=print, exact=False),
        Implementation("nhwc direct", LAST, LAST, emit=print),
        Implementation("torch", PLAIN, PLAIN),
    ]
    seconds = (1.0, 1.01, 1.02, 1.2)
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        timed = tuple(Timed(kernels[i], seconds[i]) for i in order)
        found = [(one.implementation.name, one.seconds) for one in evened({0: timed})[0]]
        assert found == [("nhwc direct", 1.0), ("nhwc winograd", 1.0), ("onednn", 1.0),
                         ("torch", 1.2)]  # fmt: skip


@pytest.mark.parametrize(
    ("sittings", "sums", "taken"),
    [
        ([calm(1.0, 0.98)], (1.0, 1.0), 0),  # the same
        ([calm(1.0, 0.8)], (1.0, 1.02), 1),
        ([restless(1.0, 0.8)], (1.0, 1.02), 0),
        ([calm(1.0, 0.8)], (1.0, 1.25), 0),  # one moment against all layers' own times
        ([calm(1.0, 0.8), calm(1.0, 0.8)], (1.0, 1.25), 1),
        ([calm(3.0, 2.0), calm(1.0, 2.0)], (1.0, 1.25), 0),
    ],
)
def test_a_whole_is_not_believed_against_its_layers_at_once(sittings, sums, taken):
    kernel = Implementation("a", LAST, LAST)
    choices = [{0: Timed(kernel, seconds)} for seconds in sums]
    assert nhwc.plan._best(Evidence(tuple(sittings)), choices) == taken


@pytest.mark.parametrize(
    ("sitting", "taken"),
    [(calm(1.0, 1.02), 1), (calm(1.02, 1.0), 1), (calm(1.0, 1.2), 0), (restless(1.0, 1.02), 0)],
)
def test_of_wholes_that_are_even_the_one_with_most_kernels_of_ours_is_taken(sitting, taken):
    theirs, ours = Implementation("a", LAST, LAST), Implementation("b", LAST, LAST, emit=print)
    choices = [{0: Timed(theirs, 1.0)}, {0: Timed(ours, 1.5)}]
    assert nhwc.plan._best(Evidence((sitting,)), choices) == taken


@pytest.mark.parametrize(("seconds", "first"), [(1.01, 1), (1.0, 1), (1.1, 0)])
def test_of_sums_that_are_even_the_one_with_most_kernels_of_ours_comes_first(seconds, first):
    """Where the machine is restless, the first is taken."""
    theirs, ours = Implementation("a", LAST, LAST), Implementation("b", LAST, LAST, emit=print)
    choices = [{0: Timed(theirs, 1.0)}, {0: Timed(ours, seconds)}, {0: Timed(theirs, 1.0)}]
    others = [one for one in choices if one is not choices[first]]
    assert nhwc.plan._ranked(choices) == [choices[first], *others]


@pytest.mark.parametrize(
    ("first", "sums", "taken"),
    [
        (calm(1.0, 0.8), (1.0, 1.25), 1),  # held again at once, which agrees
        (calm(1.0, 0.8), (1.0, 1.02), 1),
        (restless(1.0, 0.8), (1.0, 1.25), 0),
        (calm(1.0, 0.98), (1.0, 1.25), 0),
    ],
)
def test_a_whole_that_says_the_contrary_of_its_layers_is_timed_again_at_once(first, sums, taken):
    kernel, held = Implementation("a", LAST, LAST), []
    choices = [{0: Timed(kernel, seconds)} for seconds in sums]
    hold = lambda: held.append(1) or calm(1.0, 0.8)
    found = nhwc.plan._confirmed(Evidence((first,)), choices, hold)
    assert (len(held), len(found.sittings)) == ((1, 2) if taken and sums[1] > 1.1 else (0, 1))
    assert nhwc.plan._best(found, choices) == taken


@pytest.mark.parametrize(("layers_s", "again"), [(1e-3, True), (0.0, False), (0.1, False)])
def test_a_plan_much_slower_than_its_layers_is_timed_again(layers_s, again, tmp_path):
    ledger = Ledger(tmp_path / "plans.json")
    ledger.put("plan x", [[0.1] * 5, [0.1] * 5])
    net = nn.Conv2d(4, 4, 3).eval()
    here = Environment.here()
    task = OptimizeTask(net, ((IMAGE,),), (), False, lambda text: None, here, ledger, Leisure())
    turns = take_turns(task, {"plan": net}, "plan x", layers_s)
    assert turns.remembered is not again
    seconds = turns.compared["plan"].after.seconds
    assert seconds[:5] == (0.1,) * 5
    assert (len(seconds) > 5) is again


def test_a_graph_that_seems_faster_than_the_plan_is_timed_beside_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path))
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    nhwc.optimize(net, IMAGE)
    ledger = Ledger.of(Environment.here())
    entries = json.loads(ledger.path.read_text())["entries"]
    [key] = [key for key in entries if key.startswith("graph ")]
    ledger.put(key, [[3.0] * 5, [1e-6] * 5])  # in a moment that was kind to it
    ledger.save()
    report = nhwc.optimize(net, IMAGE).report
    assert report.inputs_times["graph"] == report.inputs_times["plan"]
    assert report.ratios["graph"] < 1e5
