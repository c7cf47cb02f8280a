"""Kernels under test are compiled into a folder of the test run, for each instruction set here."""

import pytest
import torch

from nhwc.kernels.language import isa as isas


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp().parent / "nhwc-kernels"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, kernel_cache):
    monkeypatch.setenv("NHWC_CACHE", str(kernel_cache))


def usable() -> list[str]:
    features = isas.host_features()
    return [i.name for i in isas.ALL if all(features.get(need) for need in i.needs)]


@pytest.fixture(params=usable())
def isa(request, monkeypatch):
    """Each instruction set that this machine can run, one after the other."""
    monkeypatch.setenv("NHWC_ISA", request.param)
    return isas.host()


@pytest.fixture
def threads():
    """Sets torch's thread count, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
