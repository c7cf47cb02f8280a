"""`optimize` against torch.compile with freezing and torch.jit.optimize_for_inference.

    python benchmarks/compile_peers.py [MODEL ...] [--turns 5] [--output FILE.json]

Each engine has a process of its own, and they take turns: one works while the others wait on a
pipe, drops the first call of its turn, and sends back the times of the rest. Every engine gets the
same random input and the same weights, and its output is held against the first's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from nhwc import Environment, optimize
from nhwc.zoo import load_model, randomize_batchnorm_

MODELS = ("resnet18", "resnet50", "mobilenet_v2", "vgg16", "densenet121")


def eager(model: torch.nn.Module, x: torch.Tensor) -> Any:
    return model


def nhwc_optimize(model: torch.nn.Module, x: torch.Tensor) -> Any:
    return optimize(model, x)


def compile_freezing(model: torch.nn.Module, x: torch.Tensor) -> Any:
    import torch._inductor.config

    torch._inductor.config.freezing = True
    compiled = torch.compile(model.to(memory_format=torch.channels_last))
    compiled(x)
    return compiled


def jit_inference(model: torch.nn.Module, x: torch.Tensor) -> Any:
    return torch.jit.optimize_for_inference(torch.jit.freeze(torch.jit.trace(model, x)))


ENGINES = {f.__name__: f for f in (eager, nhwc_optimize, compile_freezing, jit_inference)}


def serve(engine: str, model_name: str, pipe: Connection, calls: int) -> None:
    """Set up one engine, then answer each message with the times of a few calls."""
    torch.set_grad_enabled(False)
    model = randomize_batchnorm_(load_model(model_name))
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    try:
        run = ENGINES[engine](model, x)
        output = run(x)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}"[:300])
        return
    pipe.send((time.perf_counter() - start, output.numpy()))
    while pipe.recv():
        run(x)
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            run(x)
            times.append(time.perf_counter() - begin)
        pipe.send(times)


def compare(model: str, turns: int, calls: int) -> dict[str, Any]:
    """Medians over the turns, set-up times and errors of all engines on one model."""
    context = multiprocessing.get_context("spawn")
    rows: dict[str, Any] = {}
    pipes: dict[str, Connection] = {}
    first = None
    for engine in ENGINES:
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(engine, model, theirs, calls), daemon=True).start()
        answer = ours.recv()
        if isinstance(answer, str):
            rows[engine] = {"failed": answer}
            continue
        setup, output = answer
        first = output if first is None else first
        error = float(abs(output - first).max() / abs(first).max())
        rows[engine] = {"setup_s": setup, "difference": error, "seconds": []}
        pipes[engine] = ours
    for _ in range(turns):
        for engine, pipe in pipes.items():
            pipe.send(True)
            rows[engine]["seconds"] += pipe.recv()
    for engine, pipe in pipes.items():
        pipe.send(False)
        rows[engine]["median_s"] = statistics.median(rows[engine]["seconds"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5)
    default = Path(__file__).parent / "results/compile_peers.json"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    known = json.loads(args.output.read_text())["models"] if args.output.exists() else {}
    for model in args.models:
        known[model] = rows = compare(model, args.turns, args.calls)
        for engine, row in rows.items():
            shown = row.get("failed") or f"{row['median_s'] * 1e3:8.2f} ms"
            print(f"{model:16}{engine:18}{shown}  set up {row.get('setup_s', 0):.1f} s", flush=True)
        data = {"environment": Environment.here().to_dict(), "models": known}
        args.output.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
