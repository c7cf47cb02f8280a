"""Tests and doctests remember their measurements in a folder of their own."""

import os

import pytest

PROCESSOR = (
    "test_cases_seeing.py",
    "test_half.py",
    "test_operators.py",
    "test_optimize.py",
    "test_plan_native.py",
    "test_rules.py",
    "test_strict.py",
    "test_training_step.py",
)
"""Files of tests whose truths and kernels are the processor's; other tests are marked singly."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "tests" and item.path.name in PROCESSOR:
            item.add_marker("processor")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    before = os.environ.get("NHWC_CACHE")
    os.environ["NHWC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["NHWC_CACHE"]
    else:
        os.environ["NHWC_CACHE"] = before
