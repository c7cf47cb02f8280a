"""Tests and doctests remember their measurements in a folder of their own, and see one terminal."""

import sys

import pytest
import torch

collect_ignore_glob = ["src/nhwc/trainers/*"]
"""They import packages that few have; tests/trainers runs their examples where it finds those."""

PROCESSOR = (
    "audit/test_cases_seeing.py",
    "audit/test_strict.py",
    "ops/test_operators.py",
    "ops/test_rules.py",
    "optimize/test_half.py",
    "optimize/test_not_finite.py",
    "optimize/test_optimize.py",
    "plan/test_native.py",
    "train/test_step.py",
)
"""Files of tests whose truths and kernels are the processor's; other tests are marked singly."""


def pytest_addoption(parser):
    parser.addoption("--renew", action="store_true", help="write the files of tests/render/golden")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.as_posix().endswith(tuple(f"/tests/{name}" for name in PROCESSOR)):
            item.add_marker("processor")


@pytest.fixture(autouse=True)
def _one_seed():
    """Draw the same numbers in a test whichever tests its worker ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_compiled_code():
    """Compile anew: torch runs a function in eager that eight other tests compiled."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session", autouse=True)
def _one_width():
    """Break the lines of reports alike in every terminal, and in the workers of a parallel run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_bytecode():
    """Read each file that a test writes: bytecode of a second ago passes for that of a new one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Remember nothing from other runs: torch's compiler keeps code by graph, not by processor."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NHWC_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp("cache")))
        yield
