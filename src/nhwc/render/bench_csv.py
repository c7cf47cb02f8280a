"""A benchmark as comma-separated values: one line per case and variant."""

from __future__ import annotations

import csv
import io
import math

from .._bench import Benchmark, Measurement, Row
from .._bench.engines import find_engine

FIELDS = (
    *("model", "batch", "input", "threads", "train", "amp", "device", "variant", "version"),
    *("median_s", "lower_quartile_s", "upper_quartile_s", "per_second"),
    *("speedup", "speedup_low", "speedup_high", "verdict"),
    *(
        "step",
        "step_gain",
        "folded",
        "left",
        "setup_s",
        "peak_bytes",
        "error",
        "flop",
        "share_of_peak",
        "handover_s",
        "propagation",
        "published",
        "judgement",
        "failure",
    ),
)


def bench_csv(result: Benchmark) -> str:
    """Render a line per case and variant, failed ones included; unmeasured numbers are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n", restval="")
    writer.writeheader()
    for row in result.rows:
        if row.failure:
            writer.writerow({**_case(row), "failure": row.failure})
        for measurement in row.measurements:
            writer.writerow({**_case(row), **_measured(row, measurement, result.baseline)})
    return text.getvalue()


def _case(row: Row) -> dict[str, object]:
    case = row.case
    return {
        "model": case.model,
        "batch": case.batch,
        "input": " ".join("x".join(map(str, shape)) for shape in case.shapes),
        "threads": case.threads,
        "train": int(case.train),
        "amp": int(case.amp),
        "device": case.device,
        "propagation": row.propagation,
        "published": str(row.published or ""),
        "judgement": row.judgement,
    }


def _measured(row: Row, measurement: Measurement, baseline: str) -> dict[str, object]:
    if measurement.failure:
        return {"variant": measurement.variant, "failure": measurement.failure}
    low, high = measurement.samples.quartiles_s
    values: dict[str, object] = {
        "variant": measurement.variant,
        "version": measurement.version,
        "median_s": measurement.median_s,
        "lower_quartile_s": low,
        "upper_quartile_s": high,
        "per_second": row.case.batch / measurement.median_s,
        "setup_s": measurement.setup_s,
        "peak_bytes": "" if measurement.peak_bytes is None else measurement.peak_bytes,
        "error": "" if math.isnan(measurement.error) else measurement.error,
    }
    share = row.share_of_peak(measurement.variant)
    if row.floor is not None and share is not None:
        values |= {"flop": row.floor.flop, "share_of_peak": share}
        if row.floor.handover_s is not None:
            values["handover_s"] = row.floor.handover_s
    gain = row.gain(measurement.variant)
    if gain is not None:
        values |= {"step": find_engine(measurement.variant).step, "step_gain": gain.ratio}
    if measurement.folded is not None:
        values |= {"folded": measurement.folded, "left": measurement.left}
    found = row.comparison(measurement.variant, baseline)
    if found is not None:
        values |= {"speedup": found.ratio, "verdict": found.verdict}
        values["speedup_low"], values["speedup_high"] = found.interval
    return values
