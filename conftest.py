"""Tests and doctests remember their measurements in a folder of their own."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    before = os.environ.get("NHWC_CACHE")
    os.environ["NHWC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["NHWC_CACHE"]
    else:
        os.environ["NHWC_CACHE"] = before
