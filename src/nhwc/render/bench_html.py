"""A benchmark as one self-contained page: the answer, the bars, every number."""

from __future__ import annotations

from typing import Any

from .._bench import Benchmark, Measurement, Row
from .._bench.engines import find_engine
from . import bench_words as words
from .page import page
from .text import size


def bench_html(result: Benchmark) -> str:
    """Render the page, as one file that loads no other."""
    title = result.title or ", ".join(dict.fromkeys(row.case.model for row in result.rows))
    cases = [row.case for row in result.rows]
    data = {
        "title": title,
        "setting": words.common(cases) if cases else "",
        "answer": words.answers(result),
        "baseline": words.label(result.baseline),
        "environment": words.environment(result),
        "problems": words.failures(result),
        "rows": [_row(row, result) for row in result.rows if not row.failure],
    }
    return page("bench", f"nhwc bench: {title}", data)


def _row(row: Row, result: Benchmark) -> dict[str, Any]:
    own, peer = row.best(ours=True), row.best(ours=False)
    claim = row.published
    return {
        "name": words.short(row.case, [other.case for other in result.rows]),
        "case": str(row.case),
        "propagation": row.propagation,
        "published": claim and {"low": claim.low, "high": claim.high, "text": str(claim)},
        "floor": words.floor(row),
        "source": claim.where if claim else "",
        "judgement": row.judgement,
        "own": own.variant if own else None,
        "peer": peer.variant if peer else None,
        "variants": [
            _variant(row, m, result.baseline)
            for m in sorted(row.measured, key=lambda m: m.median_s)
        ],
    }


def _variant(row: Row, m: Measurement, baseline: str) -> dict[str, Any]:
    found = row.shown(m.variant, baseline)
    quartiles = " - ".join(words.bare_ms(second) for second in m.samples.quartiles_s)
    return {
        "variant": m.variant,
        "label": words.label(m.variant),
        "version": m.version,
        "kind": words.kind(find_engine(m.variant)),
        "ratio": found.ratio if found else None,
        "interval": list(found.interval) if found else None,
        "verdict": found.verdict if found and m.variant != baseline else "",
        "ms": words.bare_ms(m.median_s),
        "quartiles": quartiles,
        "rate": f"{row.case.batch / m.median_s:.1f}",
        "setup": f"{m.setup_s:.1f}",
        "peak": "" if m.peak_bytes is None else size(m.peak_bytes),
        "error": f"{m.error:.0e}",
    }
