"""The numbers of a benchmark in words, the same in every format."""

from __future__ import annotations

import math
from collections.abc import Callable

from .._bench import Benchmark, Case, Changes, Measurement, Row
from .._bench.engines import ENGINES, Engine, find_engine
from ..machine.timing import Comparison
from ..shown import printable, shown
from .text import milliseconds, plural


def times(ratio: float) -> str:
    """Format a ratio as a factor.

    >>> times(1.618)
    '1.62x'
    """
    return "" if math.isnan(ratio) else f"{ratio:.2f}x"


def interval(comparison: Comparison) -> str:
    low, high = comparison.interval
    return f"{low:.2f}-{high:.2f}"


def bare_ms(seconds: float) -> str:
    """Format milliseconds for a column that names its unit.

    >>> bare_ms(0.0123456)
    '12.3'
    """
    return milliseconds(seconds).removesuffix(" ms")


def label(variant: str) -> str:
    return find_engine(variant).label


def peers(result: Benchmark) -> dict[str, str]:
    """The versions of the engines that are not torch's, by their names."""
    return {label(m.variant): m.version for row in result.rows for m in row.measured if m.version}


def environment(result: Benchmark) -> str:
    """Machine and versions, in one line. Thread counts stand with the cases."""
    here = result.environment
    machine = here.device if here.device != "cpu" else f"{here.processor} {here.instruction_set}"
    parts = [f"{machine}, {here.cores} cores", _apart(result), f"torch {here.torch}"]
    parts += [f"{name} {version}" for name, version in peers(result).items()]
    return ", ".join(filter(None, parts))


def _apart(result: Benchmark) -> str:
    """How long it took from core to core while this was measured; a host may move them meanwhile.

    >>> from nhwc.machine.environment import Environment
    >>> _apart(Benchmark(Environment.here(), ()))
    ''
    """
    floors = [row.floor for row in result.rows if row.floor]
    found = sorted({round(1e9 * one.handover_s) for one in floors if one.handover_s})
    ends = dict.fromkeys((*found[:1], *found[-1:]))
    return f"{' to '.join(map(str, ends))} ns apart" if found else ""


def compared(result: Benchmark) -> list[str]:
    """The variants that a table compares with the baseline."""
    others = [variant for variant in result.variants if variant != result.baseline]
    if not any(row.isolates for row in result.rows):
        return others
    return [v for v in others if any(row.shown(v, result.baseline) for row in result.rows)]


def steps(result: Benchmark) -> list[str]:
    """The variants that go one step beyond another one that was measured beside them."""
    return [variant for variant in result.variants if any(row.gain(variant) for row in result.rows)]


def step(variant: str) -> str:
    return find_engine(variant).step


def step_lines(row: Row) -> list[str]:
    """Say what each single step gains, apart from what the steps before it did."""
    lines = []
    for m in row.measured:
        found = row.gain(m.variant)
        if found:
            said = (
                f"{step(m.variant)}: {times(found.ratio)} as fast as "
                f"{label(find_engine(m.variant).beyond)} ({interval(found)}: {found.verdict})"
            )
            lines.append("; ".join(part for part in (said, folding(m)) if part))
    return lines


def share_of_peak(row: Row) -> str:
    """The share of the machine's arithmetic that the fastest variant of ours reaches, or nothing.

    >>> share_of_peak(Row(Case("net", ((1, 3, 8, 8),), 1)))
    ''
    """
    own = row.best(ours=True)
    share = row.share_of_peak(own.variant) if own else None
    return "" if share is None else f"{share:.0%}"


def floor(row: Row) -> str:
    """Say what the arithmetic of a call would take alone, and how near to that it comes."""
    share = share_of_peak(row)
    if row.floor is None or not row.floor.flop or not share:
        return ""
    return (
        f"floor: {row.floor.flop / 1e9:.3g} GFLOP take {milliseconds(row.floor.seconds)} at the "
        f"{row.floor.peak_flops / 1e9:.0f} GFLOP/s that this machine reaches; ours reaches {share}"
    )


def folding(measurement: Measurement) -> str:
    """Say how many batch norms an engine folded; nothing of an engine that folds none.

    >>> folding(Measurement("fused", folded=20, left=0))
    'folded 20 batch norms'
    >>> folding(Measurement("fused", folded=0, left=0))
    'folded nothing, since the model has no batch norm'
    """
    if measurement.folded is None or measurement.left is None:
        return ""
    if not measurement.folded + measurement.left:
        return "folded nothing, since the model has no batch norm"
    left = f", left {measurement.left}" * bool(measurement.left)
    return f"folded {plural(measurement.folded, 'batch norm')}{left}"


def folded_nothing(result: Benchmark) -> str:
    """Name the models in which there was nothing to fold; an empty string if there is none."""
    idle = [
        row.case.model
        for row in result.rows
        if any(m.folded == 0 and m.left == 0 for m in row.measured)
    ]
    names = ", ".join(dict.fromkeys(idle))
    return f"Nothing was folded in {names}: no batch norm." if names else ""


def common(cases: list[Case]) -> str:
    """Describe the settings that all cases share."""
    first = cases[0]
    words = []
    if len({case.batch for case in cases}) == 1:
        words.append(f"batch {first.batch}")
    if len({case.threads for case in cases}) == 1:
        words.append(plural(first.threads, "thread"))
    if all(case.train for case in cases):
        words.append("training step")
    if len({case.amp for case in cases}) == 1:
        words.append(_precision(first))
    if len({case.device for case in cases}) == 1 and first.device != "cpu":
        words.append(first.device)
    return ", ".join(words)


def short(case: Case, cases: list[Case]) -> str:
    """Name a case by what tells it from the others: its model, batch or threads, say."""
    told = [one for one in _TOLD if len({one(other) for other in cases}) > 1]
    return printable(", ".join(one(case) for one in told) or case.model, keep="")


def _precision(case: Case) -> str:
    return "mixed precision" if case.amp else "float32"


_TOLD: tuple[Callable[[Case], str], ...] = (
    lambda case: case.model,
    lambda case: f"batch {case.batch}",
    lambda case: " and ".join("x".join(map(str, shape[1:])) for shape in case.shapes),
    lambda case: plural(case.threads, "thread"),
    lambda case: "training step" if case.train else "inference",
    _precision,
    lambda case: case.device,
    lambda case: f"weights {case.weights or 'drawn'}",
    lambda case: f"seed {case.seed}",
)
"""What cases may differ in, in words."""


def answer(row: Row, baseline: str) -> str:
    """Say in a sentence or two which variant is fastest, by how much, and how sure that is."""
    if row.isolates:
        # The steps stand alone below: the fastest variant owes its speed to several.
        return ""
    best = min(row.measured, key=lambda m: m.median_s, default=None)
    found = row.comparison(best.variant, baseline) if best else None
    if best is None or found is None or len(row.measured) == 1:
        return ""
    if found.verdict != "faster":
        return _surely_faster(row, baseline)
    text = (
        f"{label(best.variant)} is fastest: {times(found.ratio)} as fast as {label(baseline)} "
        f"(99 % sure of {interval(found)})."
    )
    own, peer = row.best(ours=True), row.best(ours=False)
    against = row.comparison(own.variant, peer.variant) if own and peer else None
    if own and peer and against and peer.variant != baseline:
        text += (
            f" {label(own.variant)} is {times(against.ratio)} as fast as {label(peer.variant)}, "
            f"the best of the others ({interval(against)}: {against.verdict})."
        )
    return text


def _surely_faster(row: Row, baseline: str) -> str:
    """What is faster than the baseline beyond doubt, where the fastest is not."""
    verdicts = set()
    for m in sorted(row.measured, key=lambda m: m.median_s):
        found = row.comparison(m.variant, baseline)
        if found and m.variant != baseline:
            verdicts.add(found.verdict)
        if found and found.verdict == "faster":
            return (
                f"{label(m.variant)} is faster: {times(found.ratio)} as fast as {label(baseline)} "
                f"(99 % sure of {interval(found)}). The machine is too noisy to tell what is "
                "fastest."
            )
    if verdicts <= {"same", "slower"}:
        return f"Nothing is faster than {label(baseline)} here."
    return f"The machine is too noisy to tell whether anything beats {label(baseline)}."


def answers(result: Benchmark) -> list[str]:
    """The answer for one case; the geometric means for many."""
    if len(result.rows) == 1:
        lines = [answer(result.rows[0], result.baseline), *step_lines(result.rows[0])]
    else:
        means = {v: result.geometric_mean(v) for v in compared(result)}
        best_first = sorted((mean, label(v)) for v, mean in means.items() if not math.isnan(mean))
        named = ", ".join(f"{name} {times(mean)}" for mean, name in reversed(best_first))
        lines = [f"As fast as {label(result.baseline)}, geometric mean: {named}."] * bool(named)
        alone = [
            f"{step(variant)} {times(result.geometric_mean(variant, find_engine(variant).beyond))}"
            for variant in steps(result)
        ]
        lines += [f"Alone, geometric mean: {', '.join(alone)}."] * bool(alone)
        lines.append(folded_nothing(result))
    if result.interrupted:
        lines.append("Interrupted: this is what was measured until then.")
    lines.append(noise(result))
    return [line for line in lines if line]


NOISY = 0.15
"""Turns that spread further than this, between their quartiles, were disturbed."""


def noise(result: Benchmark) -> str:
    """Warn if other programs disturbed the measurements; return an empty string if none did."""
    spread = [(m.per_turn.spread, m, row) for row in result.rows for m in row.measured]
    wild = [(share, m, row) for share, m, row in spread if share > NOISY]
    lines = []
    if wild:
        share, m, row = max(wild, key=lambda found: found[0])
        lines.append(
            f"Noisy: {len(wild)} of {len(spread)} measurements spread by more than {NOISY:.0%}, "
            f"{label(m.variant)} on {row.case.model} by {_share(share)}."
        )
    known = [(row.others, row.case.threads) for row in result.rows if row.others]
    crowds = [others for others, threads in known if others.in_the_way_of(threads)]
    if crowds:
        most = max(crowds, key=lambda others: others.taken)
        lines.append(f"Meanwhile {most}.")
    return " ".join([*lines, "Stop other programs and measure again."]) if lines else ""


def _share(share: float) -> str:
    """
    >>> _share(0.32), _share(247.81)
    ('32%', '248 times its median')
    """
    return f"{share:.0%}" if share < 1 else f"{share:.3g} times its median"


def kind(engine: Engine) -> str:
    """The kind of an engine, which decides its colour: `ours`, `fuse`, `torch` or `peer`."""
    if engine.ours:
        return "ours" if engine.name == "optimized" else "fuse"
    return "torch" if engine.name in ("eager", "channels_last") else "peer"


def failures(result: Benchmark) -> list[tuple[str, str]]:
    """List what failed, with the reason: first whole cases, then engines, each reason once."""
    found = [(str(row.case), shown(row.failure)) for row in result.rows if row.failure]
    for engine in ENGINES:
        reasons: dict[str, list[str]] = {}
        for row in result.rows:
            for m in row.measurements:
                if m.variant == engine.name and m.failure:
                    reasons.setdefault(m.failure, []).append(str(row.case))
        for reason, cases in reasons.items():
            where = "" if len(cases) == len(result.rows) else f" on {', '.join(cases)}"
            found.append((engine.label + where, shown(reason)))
    return found


def failed(changes: Changes) -> list[str]:
    """What was measured before and failed now, each with its reason."""
    return [f"{one.case}, {one.variant}: {shown(one.failure)}" for one in changes.failed]


def slower(changes: Changes) -> str:
    """How many got slower, and, where none surely did, of how many nothing is known."""
    count, of = len(changes.slower), len(changes.changes)
    if count:
        return f"{count} of {of} slower"
    unsure = sum(change.verdict not in ("same", "faster") for change in changes.changes)
    if unsure:
        return f"nothing surely got slower, {unsure} of {of} too noisy to tell"
    return "nothing got slower"


def where_measured(changes: Changes) -> str:
    if changes.same_machine:
        return f"{changes.before} / {changes.after}"
    return f"NOT THE SAME MACHINE: {changes.before} / {changes.after}"
