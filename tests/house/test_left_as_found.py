"""What Python and torch have once for the whole process is as it was found after every verb."""

import gc
import importlib
import os
import random
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import nhwc
from nhwc._ops import check_operator, check_rules
from nhwc._ops.rules import SECTIONS
from nhwc.training import synthetic

importlib.import_module("sympy")  # Torch imports it late, and it filters a warning of its own.

X = torch.rand(2, 3, 12, 12)


def net():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout()),
        *(nn.InstanceNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )


def noisy(x):
    return (x + torch.rand_like(x)).contiguous()


def saved(model, folder):
    path = folder / "net.nhwc"
    nhwc.save(nhwc.optimize(model.eval(), X), path)
    return nhwc.load(path)


def strictly(model, folder):
    with nhwc.strict(model.eval()), pytest.raises(nhwc.FormatLost):
        nhwc.convert_(model)(nhwc.to_format(X, nhwc.Format.CHANNELS_LAST))


def benched(model, folder):
    path = folder / "net.py"
    path.write_text("from torch import nn\n\ndef build():\n    return nn.Conv2d(3, 4, 3)\n")
    name = f"{path}:build"
    return nhwc.bench(name, variants="eager", shape=(1, 3, 8, 8), seconds=0.1)


def compiled(model, folder):
    with torch.no_grad():
        return torch.compile(model.eval(), backend="nhwc")(X)


VERBS = {
    "audit": lambda model, folder: nhwc.audit(model, X, backward=True, compare=True, reorders=True),
    "strict": strictly,
    "fuse": lambda model, folder: nhwc.fuse(model.eval()),
    "optimize": lambda model, folder: nhwc.optimize(model.eval(), X)(X[:1]),
    "save and load": saved,
    "bench": benched,
    "an own operator": lambda model, folder: check_operator(noisy, X),
    "rules": lambda model, folder: check_rules(sections=SECTIONS[:1]),
    "train": lambda model, folder: nhwc.train(
        model, synthetic(4, (12, 12, 3), classes=4, batches=2)
    ),
    "load_model": lambda model, folder: nhwc.load_model("squeezenet1_1", seed=3),
    "torch.compile": compiled,
}


def found():
    """What a verb might change and forget."""
    torch_rng, (_, words, place, *_) = torch.get_rng_state(), np.random.get_state()
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    return {
        "random numbers": (torch_rng.tolist(), random.getstate(), words.tolist(), place),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "precision": (torch.get_float32_matmul_precision(), cudnn.allow_tf32, mkldnn.enabled),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "warnings": list(warnings.filters),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "interpreter": (list(sys.path), sys.getrecursionlimit(), sys.excepthook, sys.stdout),
    }


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_leaves_the_process_as_it_was_found(verb, tmp_path, monkeypatch):
    model, seeds = net(), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = found()
    VERBS[verb](model, tmp_path)
    after = found()
    changed = [name for name in before if before[name] != after[name]]
    assert changed == []
    # Torch keeps a seed for GPUs that it has not begun with, and the last one counts.
    assert seeds == []
