"""Code that asks the system for another number at each call, or finds one where it left it."""

import datetime
import functools
import os
import random
import secrets
import time
import types
import uuid
import weakref

import numpy
import pytest
import torch
from torch import nn

import nhwc

IMAGE = torch.ones(1, 3, 8, 8)

SYSTEM = random.SystemRandom()


class Counter:
    count = 0


ONE = Counter()


@functools.lru_cache
def counted():
    return []


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(x) * self.factor()


class ReadsTheClock(Asks):
    def factor(self):
        return time.perf_counter_ns() % 1_000_003


class ReadsTheDate(Asks):
    def factor(self):
        return datetime.datetime.now().microsecond


class Draws(Asks):
    def factor(self):
        return int.from_bytes(os.urandom(2), "little")


class DrawsBySystem(Asks):
    def factor(self):
        return SYSTEM.random()


class DrawsASecret(Asks):
    def factor(self):
        return secrets.randbelow(1_000_003)


class DrawsAName(Asks):
    def factor(self):
        return uuid.uuid4().int % 1_000_003


class DrawsByNumpy(Asks):
    def factor(self):
        return float(numpy.random.default_rng().random())


class SeedsItself(Asks):
    def factor(self):
        generator = torch.Generator()
        generator.seed()
        return torch.rand(1, generator=generator)


class CountsInACache(Asks):
    def factor(self):
        counted().append(1)
        return len(counted())


class CountsBehindAReference(Asks):
    def __init__(self):
        super().__init__()
        self.one = weakref.ref(ONE)

    def factor(self):
        self.one().count += 1
        return self.one().count


ASKING = [ReadsTheClock, ReadsTheDate, Draws, DrawsBySystem, DrawsASecret, DrawsAName]
ASKING += [DrawsByNumpy, SeedsItself, CountsInACache, CountsBehindAReference]


def around(part):
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), part).eval()


@pytest.mark.parametrize("kind", ASKING, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_a_number_that_each_call_has_anew_is_no_constant(kind):
    counted()
    fused = nhwc.fuse(around(kind()))
    assert [part.path for part in fused.report.opaque] == ["2"]
    assert fused.report.applied
    assert (counted(), ONE.count) == ([], 0)
    calls = [fused(IMAGE) for _ in range(3)]
    assert not calls[0].equal(calls[1]) or not calls[1].equal(calls[2])
    counted().clear()
    ONE.count = 0


class TellsHowLongItTook(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        begun = time.perf_counter()
        x = self.norm(self.conv(x)) + torch.arange(8.0).view(-1, 1, 1)
        if time.perf_counter() - begun > 3600:
            raise TimeoutError
        return x


@torch.no_grad()
def test_code_that_takes_its_time_is_a_graph():
    model = TellsHowLongItTook().eval()
    fused = nhwc.fuse(model)
    assert not fused.report.opaque
    torch.testing.assert_close(fused(IMAGE), model(IMAGE))


class Missing(types.ModuleType):
    """Stands for a package that is not there, as those of optional dependencies do."""

    def __getattr__(self, name):
        raise ImportError(f"install it for {name}")


OPTIONAL = types.ModuleType("optional")


class MayUseAPackage(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fast = nn.Conv2d(3, 8, 1), False

    def forward(self, x):
        return OPTIONAL.conv(self.conv, x) if self.fast else self.conv(x)


def test_nothing_is_asked_of_a_package_that_code_names(monkeypatch):
    monkeypatch.setitem(globals(), "OPTIONAL", Missing("optional"))
    assert not nhwc.fuse(MayUseAPackage().eval()).report.opaque
