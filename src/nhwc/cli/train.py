"""`nhwc train`: the same command in one process and under torchrun."""

from __future__ import annotations

import argparse
import json
import os
import re
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._train import (
    Data,
    MetricsLog,
    Point,
    Recipe,
    Training,
    evaluate,
    image_folders,
    load_checkpoint,
    process_group,
    remarks,
    synthetic,
    train,
)
from .._train.checkpoint import evaluation_weights
from .._train.distributed import rank_and_world
from .._train.recipe import OPTIMIZERS, PRECISIONS
from ..errors import InputError
from ..formats import convert_
from ..machine.environment import available_cores, usable_device
from ..models.kinds import check_initialized
from ..render.train_text import log_line
from ..shown import misfit
from ..zoo import load_model, load_model_for
from .common import check_alone, check_fits
from .interrupt import Interrupt
from .outputs import check_folder, check_outputs, check_plot, write_file
from .progress import note, put
from .screen import OnceEach, Screen, headline
from .values import MANY, MOST, SEEDS, whole

RATES = {"sgd": 0.1, "adamw": 1e-3}
MOMENTUM = 0.9
LEVELS = ("O0", "O1", "O2")
"""The levels of apex that have a meaning here; its O3 computes in half precision alone."""

SWITCH = {"true": True, "false": False}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", metavar="DATA", nargs="?", help="a folder with train/ and val/, a folder per class")
    add("--synthetic", action="store_true", help="random images instead of DATA")
    add(
        "-a", "--arch", metavar="MODEL", default="resnet50", help="default resnet50; timm:NAME, ..."
    )
    add(
        "-b",
        "--batch-size",
        metavar="N",
        type=whole(1, MANY),
        default=64,
        help="of all processes together (64)",
    )
    add(
        "--workers",
        metavar="N",
        type=whole(0, MOST),
        help="loading images, per process (4 at most)",
    )
    add("--epochs", metavar="N", type=whole(1, MANY), help="default 10; 1 with --synthetic")
    add("--max-batches", metavar="N", type=whole(1, MANY), help="of each epoch, for trials")
    add("--size", metavar="S", default="224", help="image size (224); DxHxW with --synthetic")
    add(
        "--classes",
        metavar="N",
        type=whole(1, 10_000_000),
        help="outputs of the model; those of DATA otherwise",
    )
    speed = parser.add_argument_group("speed")
    add = speed.add_argument
    add(
        "--channels-last",
        metavar="true|false",
        nargs="?",
        const="true",
        help="weights and images in channels last",
    )
    add("--amp", action="store_true", help="mixed precision: float16 on CUDA, bfloat16 on a CPU")
    add("--opt-level", choices=LEVELS, help="of apex: O1 and O2 are --amp here, O0 is float32")
    add("--amp-dtype", choices=PRECISIONS, help="default as --amp says")
    add("--compile", action="store_true", help="torch.compile the model")
    add("--device", help="default cuda where there is one, else cpu")
    method = parser.add_argument_group("method")
    add = method.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="sgd", help="default sgd")
    add("--lr", type=float, help="highest learning rate: 0.1 for sgd, 0.001 for adamw")
    add("--momentum", type=float, help="of sgd (0.9)")
    add("--weight-decay", type=float, default=1e-4, help="default 1e-4")
    add("--warmup-epochs", metavar="N", type=float, default=0.0, help="of a rising rate (0)")
    add("--label-smoothing", metavar="X", type=float, default=0.0, help="default 0")
    add(
        "--accumulate",
        metavar="N",
        type=whole(1, MANY),
        default=1,
        help="batches to an update (1)",
    )
    add("--clip", metavar="NORM", type=float, help="the gradients' norm at most")
    add("--ema", metavar="DECAY", type=float, help="evaluate a running average of the weights")
    words = "of weights, order, augmentation (0)"
    add("--seed", metavar="N", type=whole(0, SEEDS >> 1), default=0, help=words)
    files = parser.add_argument_group("files")
    add = files.add_argument
    words = "for checkpoint.pt and metrics.csv (train-MODEL; with --synthetic none)"
    add("-o", "--output", metavar="DIR", type=Path, help=words)
    add(
        "--checkpoint-every",
        metavar="N",
        type=whole(1, MANY),
        help="batches; after each epoch in any case",
    )
    add("--resume", metavar="FILE", type=Path, help="go on from a checkpoint")
    add("--weights", metavar="FILE", type=Path, help="start from a state dict")
    add("--evaluate", action="store_true", help="no training: accuracy of --resume or --weights")
    add("--skip-corrupt", action="store_true", help="pass over images that cannot be read")
    add("--plot", metavar="FILE", type=Path, help="draw the run, .svg or .png")
    add("--format", choices=("text", "json"), default="text", help="what goes to stdout (text)")


def run(args: argparse.Namespace) -> int:
    habits = _read_habits(args)
    _check_pairs(args)
    check_plot(args.plot)
    check_outputs(args.plot, reads=(args.arch, args.weights, args.resume))
    if not args.evaluate:
        check_folder(_folder(args))
    recipe = _recipe(args)
    resume = args.resume if args.evaluate else _resume(args, _checkpoint(args))
    state = load_checkpoint(resume) if resume else None
    device = usable_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    recipe.autocast_dtype(device)
    if device.type == "cuda":
        # All batches are of one shape, so the search for the fastest kernels pays.
        torch.backends.cudnn.benchmark = True
    with process_group(device) as device, closing(_data(args)) as data:
        # The labels of random images are as many as --classes says, whatever the model takes.
        asked = args.classes is not None and not args.synthetic
        load = load_model if asked else load_model_for
        classes = args.classes or len(data.classes)
        model = load(args.arch, weights=args.weights, seed=args.seed, classes=classes)
        check_initialized(model)
        if rank_and_world()[0] == 0:
            note(headline(args.arch, model, recipe, args.batch_size, device))
            if habits:
                note(f"note: {habits}")
            for line in remarks(model, recipe, device):
                note(f"note: {line}")
        if args.evaluate:
            return _evaluate(args, model, data, recipe, device, state=state)
        return _train(args, model, data, recipe, device, resume=resume, state=state)


def _read_habits(args: argparse.Namespace) -> str:
    """Understand the published commands, those of apex's main_amp.py; say what they mean here."""
    word = args.channels_last
    if word is not None and word.lower() not in SWITCH:
        # The option takes what follows it, which may well be the folder.
        if args.data is not None or args.synthetic:
            raise InputError(f"--channels-last {word!r} is neither true nor false.")
        args.data, word = word, "true"
    args.channels_last = word is not None and SWITCH[word.lower()]
    level = args.opt_level
    if level is None:
        return ""
    if level == "O0" and args.amp:
        raise InputError("--opt-level O0 is float32, and --amp is not. Leave one of them out.")
    args.amp = level != "O0"
    means = "float32" if level == "O0" else "--amp: float32 weights, torch.amp per operator"
    return f"--opt-level {level} of apex means {means}"


def _check_pairs(args: argparse.Namespace) -> None:
    """Refuse options of which one would go unheard."""
    if args.amp_dtype and not args.amp:
        raise InputError(f"--amp-dtype {args.amp_dtype} is the type of --amp. Add --amp.")
    if args.momentum is not None and args.optimizer != "sgd":
        raise InputError(f"--momentum is of sgd; {args.optimizer} has none. Leave it out.")
    if args.resume and args.weights:
        raise InputError(
            "--resume has weights of its own, which would replace those of --weights. Leave one of "
            "them out."
        )
    if args.evaluate:
        check_alone(args, "--evaluate", "plot")
        if not (args.resume or args.weights):
            raise InputError("--evaluate needs weights: give --resume or --weights.")
    elif args.checkpoint_every and _folder(args) is None:
        raise InputError("--checkpoint-every needs a folder beside --synthetic. Add -o DIR.")


def _recipe(args: argparse.Namespace) -> Recipe:
    return Recipe(
        epochs=args.epochs if args.epochs is not None else 1 if args.synthetic else 10,
        optimizer=args.optimizer,
        lr=RATES[args.optimizer] if args.lr is None else args.lr,
        momentum=MOMENTUM if args.momentum is None else args.momentum,
        weight_decay=args.weight_decay,
        warmup_epochs=args.warmup_epochs,
        label_smoothing=args.label_smoothing,
        accumulate=args.accumulate,
        clip=args.clip,
        ema=args.ema,
        amp=args.amp,
        amp_dtype=args.amp_dtype,
        channels_last=args.channels_last,
        compile=args.compile,
        seed=args.seed,
    )


def _data(args: argparse.Namespace) -> Data:
    if args.synthetic == bool(args.data):
        raise InputError("give either DATA, a folder with train/ and val/, or --synthetic.")
    size = _size(args.size)
    check_fits((args.batch_size, 3, *(size if len(size) == 3 else size * 2)), "a batch of")
    workers = min(4, available_cores()) if args.workers is None else args.workers
    if args.synthetic:
        return synthetic(
            args.batch_size,
            (*(size if len(size) == 3 else size * 2), 3),
            classes=args.classes or 1000,
            batches=args.max_batches or 100,
            workers=workers,
            seed=args.seed,
        )
    if len(size) == 3:
        raise InputError(f"size {args.size} is of a volume; DATA holds images. Use --size 224.")
    return image_folders(
        args.data,
        args.batch_size,
        size=size[0],
        workers=workers,
        seed=args.seed,
        max_batches=args.max_batches,
        skip_corrupt=args.skip_corrupt,
        on_skip=OnceEach(),
    )


def _size(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*x[1-9]\d*)?", text):
        raise InputError(f"size {text!r} is no size. Use 224, or 16x112x112 for volumes.")
    return tuple(int(part) for part in text.split("x"))


def _train(
    args: argparse.Namespace,
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    device: torch.device,
    *,
    resume: Path | None,
    state: dict[str, Any] | None,
) -> int:
    folder, checkpoint = _folder(args), _checkpoint(args)
    show = rank_and_world()[0] == 0
    earlier: list[Point] = []
    if state:
        earlier = [Point(**point) for point in state["points"]]
        if state["epoch"] >= recipe.epochs:
            if show:
                done = f"{resume} has {state['epoch']} epochs, and {recipe.epochs} are asked for"
                note(f"{done}: there is nothing to train. Raise --epochs to go on.")
            return 0
    screen = Screen(recipe.epochs, len(data.train), text=args.format == "text")
    go = partial(
        train,
        device=device,
        checkpoint=checkpoint,
        checkpoint_every=args.checkpoint_every,
        resume=resume,
    )
    with Interrupt() as interrupt, ExitStack() as files:
        log = files.enter_context(MetricsLog(folder, earlier)) if folder and show else None

        def on_point(point: Point) -> None:
            screen.show(point)
            if log is not None:
                log.add(point)

        if show:
            go = partial(go, on_point=on_point, on_batch=screen.tick)
        run = go(model, data, recipe, stop=interrupt)
    if show:
        screen.clear()
        _finish(args, run, checkpoint)
    return interrupt.status if run.stopped_at else 0


def _finish(args: argparse.Namespace, run: Training, checkpoint: Path | None) -> None:
    if args.format == "json":
        put(json.dumps(run.to_dict()))
    if args.plot and run.points:
        from ..render.train_plot import training_plot

        write_file(args.plot, training_plot(run, args.plot.suffix[1:]))
        note(f"wrote {args.plot}")
    if run.stopped_at:
        epoch, batch = run.stopped_at
        saved = f"; go on with --resume {checkpoint}" if checkpoint else "; nothing was saved"
        note(f"stopped in epoch {epoch} after batch {batch}{saved}")
    elif checkpoint:
        note(f"wrote {checkpoint} and {checkpoint.with_name('metrics.csv')}")


def _evaluate(
    args: argparse.Namespace,
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    device: torch.device,
    *,
    state: dict[str, Any] | None,
) -> int:
    if data.val is None:
        where = "--synthetic has no images of that kind" if args.synthetic else "DATA has no val/"
        raise InputError(f"there is nothing to evaluate on: {where}.")
    if state:
        try:
            model.load_state_dict(evaluation_weights(state))
        except (RuntimeError, TypeError, AttributeError) as error:
            raise InputError(
                f"{args.resume} does not fit {args.arch}: {misfit(error)} "
                "Give the -a that it is of."
            ) from error
    if recipe.channels_last:
        convert_(model)
    point = evaluate(model.to(device), data.val, recipe, device=device)
    if rank_and_world()[0] == 0:
        put(log_line(point) if args.format == "text" else json.dumps(point.to_dict()))
    return 0


def _folder(args: argparse.Namespace) -> Path | None:
    if args.output or args.synthetic:
        return args.output and Path(args.output)
    if args.resume:
        return Path(args.resume).parent
    return Path("train-" + re.sub(r"[^\w.]+", "-", args.arch).strip("-"))


def _checkpoint(args: argparse.Namespace) -> Path | None:
    folder = _folder(args)
    return folder / "checkpoint.pt" if folder else None


def _resume(args: argparse.Namespace, checkpoint: Path | None) -> Path | None:
    """The checkpoint to go on from: the named one, or this run's own after torchrun's restart."""
    named = args.resume and Path(args.resume)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if checkpoint is None or not checkpoint.exists():
        return named
    if restarted:
        return checkpoint
    if named is None or named.resolve() != checkpoint.resolve():
        raise InputError(
            f"{checkpoint} exists, from an earlier run. Go on from it with --resume {checkpoint}, "
            "or write elsewhere with -o."
        )
    return named
