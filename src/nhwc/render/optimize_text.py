"""The report of `optimize` for the terminal."""

from __future__ import annotations

from collections import Counter, defaultdict

from .._optimize.report import LayerReport, OptimizeReport, PlanReport
from ..graph.report import PassReport
from ..models.trees import some
from .text import milliseconds, paint, plural, wrap

_STAGES = {"graph": "after the passes", "plan": "with chosen kernels"}

_WORTH_TELLING = 0.01
"""A share of a call from which on an operator of torch's is named."""

_MOST_FALLBACKS = 8


def optimize_text(report: OptimizeReport, name: str, *, color: bool = False) -> str:
    """Render the verdict, the passes, the layers by kernel, the errors and the times."""
    head = wrap(f"{name}  {', '.join(report.inputs)}  {report.environment}", "", "  ")
    lines = [
        head.replace(name, paint(name, "bold", color), 1),
        _verdict(report, color),
        "",
        "passes",
        *(line for one in report.passes if one.sites for line in pass_lines(one)),
        wrap(
            f"nothing to do: {', '.join(one.name for one in report.passes if not one.sites)}", "  "
        ),
    ]
    for part in report.opaque:
        lines.append(wrap(f"{part.path or 'the model'} ({part.kind}) stays: {part.reason}", "  "))
    for plan in report.plans:
        if plan.planned or not plan.part:
            lines += ["", *_plan(plan)]
    lines += _unplanned(report)
    lines += ["", *_verification(report), "", *_times(report, color)]
    return "\n".join(lines) + "\n"


def _verdict(report: OptimizeReport, color: bool) -> str:
    if report.chosen == "input":
        text = wrap(f"unchanged: {report.reason}", "", "  ")
        return text.replace("unchanged", paint("unchanged", "yellow", color), 1)
    comparison = report.comparison
    low, high = comparison.interval
    good = comparison.verdict == "faster"
    head = f"{comparison.ratio:.2f}x"
    text = f"{head} as fast ({low:.2f} to {high:.2f}): {comparison.verdict}"
    text += ", on a busy machine" * report.busy
    text = wrap(f"{text}; {report.reason}" if report.reason else text, "", "  ")
    return text.replace(head, paint(head, "green" if good else "yellow", color), 1)


def pass_lines(report: PassReport) -> list[str]:
    """What one pass changed, and what it left alone for which reason."""
    applied, skipped = len(report.applied), report.skipped
    lines = [f"  {report.name:<28}{plural(applied, 'change') if applied else '-'}"]
    if skipped:
        lines[0] += f", {len(skipped)} left alone"
    lines = [wrap(f"{lines[0]} in {milliseconds(report.seconds)}", "", "      ")]
    # Places that share a reason share a line, which names the first of them.
    reasons: dict[str, list[str]] = defaultdict(list)
    for site in skipped:
        reasons[site.reason].append(site.where)
    for reason, places in reasons.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        lines.append(wrap(f"{places[0]}{more}: {reason}", "      "))
    return lines


def _unplanned(report: OptimizeReport) -> list[str]:
    """List the graphs inside opaque parts that have no plan, a line for each reason."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for plan in report.plans:
        if plan.part and not plan.planned:
            reasons[plan.reason].append(" ".join([plan.part, *plan.inputs]))
    if not reasons:
        return []
    lines = ["", "no plan"]
    for reason, parts in reasons.items():
        lines.append(wrap(f"{some(parts)}: {reason}", "  "))
    return lines


def _plan(plan: PlanReport) -> list[str]:
    shapes = ", ".join(map(_brief, plan.inputs))
    if plan.part:
        shapes = f"{plan.part}, {shapes}"
    if not plan.planned:
        return [wrap(f"plan for {shapes}: none, {plan.reason}", "")]
    source = f"{plan.measured} measured" if plan.measured else "all remembered"
    if plan.renewed:
        source = f"{source}, {plan.renewed} measured again"
    lines = [
        wrap(
            f"plan for {shapes}: {plural(len(plan.layers), 'layer')}, "
            f"{plural(plan.conversions, 'conversion')} between layouts, {source}",
            "",
            "  ",
        )
    ]
    if plan.sureness:
        lines.append(wrap(plan.sureness, "  "))
    if plan.opened:
        lines.append(wrap(_for_these_sizes(plan), "  "))
    groups: dict[str, list[LayerReport]] = defaultdict(list)
    for layer in plan.layers:
        groups[f"{layer.chosen.kernel}, {layer.chosen.layout}"].append(layer)
    wide = max(map(len, groups))
    for kernel, layers in sorted(groups.items(), key=lambda item: -_seconds(item[1])):
        kinds = Counter(layer.what.split(" ")[0].split("(")[0] for layer in layers)
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
        line = f"{kernel:<{wide}}{milliseconds(_seconds(layers)):>9}  {shown}"
        lines.append(wrap(line, "  ", 8 * " "))
    lines += _fallbacks(plan)
    lines.append("  slowest layers:")
    for layer in sorted(plan.layers, key=lambda layer: -layer.chosen.seconds)[:5]:
        line = f"{milliseconds(layer.chosen.seconds):>8}  {layer.name}: {_layer(layer)}"
        lines.append(wrap(line, "    ", 8 * " "))
    return lines


def _fallbacks(plan: PlanReport) -> list[str]:
    """List what torch computes, the most costly first; what takes next to nothing is counted."""
    shown = [one for one in plan.fallbacks if one.share >= _WORTH_TELLING][:_MOST_FALLBACKS]
    if not shown:
        return []
    lines = ["  left to torch, the most costly first:"]
    for one in shown:
        cost = f"{milliseconds(one.seconds):>8} {one.share:>4.0%}"
        lines.append(
            wrap(
                f"{cost}  {one.operator} ({some(list(one.places))}): {one.reason}", "    ", 8 * " "
            )
        )
    rest = plan.fallbacks[len(shown) :]
    if rest:
        took = milliseconds(sum(one.seconds for one in rest))
        lines.append(f"    {took:>8}       {plural(len(rest), 'other operator')}")
    return lines


def _brief(text: str) -> str:
    """An input in words, but no long list of its numbers."""
    return text if len(text) <= 72 else f"{text[:72]}..."


def _for_these_sizes(plan: PlanReport) -> str:
    opened = some([one.path for one in plan.opened])
    done = [f"{one.name} {len(one.applied)}" for one in plan.passes if one.applied]
    unset = f". It does not set {some(list(plan.unset))}, which no call reads" if plan.unset else ""
    shapes = "shapes and numbers" if plan.counts else "shapes"
    others = "Others run" if plan.counts else "Other shapes run without a plan,"
    return (
        f"for these {shapes} alone, with sizes known: {opened} can be opened"
        f"{', ' * bool(done)}{', '.join(done)}{unset}. {others} as the graph above"
    )


def _layer(layer: LayerReport) -> str:
    gain = f", {layer.gain:.1f}x of torch's own" if layer.gain else ""
    waits = ", open" if layer.sureness == "open" else ""
    return f"{layer.chosen.kernel} {layer.chosen.layout}{gain}{waits}"


def _seconds(layers: list[LayerReport]) -> float:
    return sum(layer.chosen.seconds for layer in layers)


def _verification(report: OptimizeReport) -> list[str]:
    checks, worst = report.verification.checks, report.verification.worst
    if worst is None:
        return ["verified: the model returns no tensors"]
    wide = sum(check.in_float64 for check in checks)
    against = "float64" if wide else "the original (no float64 run to go by)"
    others = f", {len(checks) - wide} of them against the original alone"
    found = (
        f"error {worst.error:.1e}, eager's own {worst.eager_error:.1e}"
        if worst.in_float64
        else f"difference {worst.error:.1e}"
    )
    lines = [
        wrap(
            f"verified against {against} in {plural(len(checks), 'comparison')}"
            f"{others if 0 < wide < len(checks) else ''}: {found}, allowed {worst.allowed:.1e}",
            "",
            "  ",
        )
    ]
    if report.verification.constant:
        lines.append(
            wrap(
                "the model answers the same to every input, as one does whose last weights are "
                "zeros, so this shows little: load its weights first",
                "  ",
            )
        )
    if report.verification.decided:
        lines.append(
            wrap(
                "with what the original picked: where numbers nearly tie, it may pick otherwise",
                "  ",
            )
        )
    if report.verification.remembered:
        lines.append(
            wrap(
                "by an earlier run with these weights, inputs and kernels; now once more against "
                "the original",
                "  ",
            )
        )
    return lines


def _times(report: OptimizeReport, color: bool) -> list[str]:
    """List the stages, each beside the input in its own turns: another moment's say nothing."""
    how = "remembered" if report.remembered else rounds(report)
    how = f"{how}; set up in {report.setup_s:.1f} s"
    lines = [wrap(f"times in turns with the model as it was given ({how})", "", "  ")]
    for stage, one in report.compared.items():
        low, high = one.after.quartiles_s
        mark = "<- returned"
        line = wrap(
            f"{_STAGES[stage]:<22}{milliseconds(one.after.median_s):>9}"
            f"  ({milliseconds(low)} to {milliseconds(high)})"
            f"  {one.ratio:.2f}x of {milliseconds(one.before.median_s)}"
            f"{f' {mark}' if stage == report.chosen else ''}",
            "  ",
            26 * " ",
        )
        lines.append(line.replace(mark, paint(mark, "green", color)))
    if report.doubt:
        lines.append(wrap(report.doubt, "  "))
    return lines


def rounds(report: OptimizeReport) -> str:
    """In how many turns the stages were timed, which may differ."""
    *fewer, most = sorted({len(one.after.seconds) for one in report.compared.values()})
    return " and ".join([*map(str, fewer), plural(most, "round")])
