"""Verdicts on times: no difference where there is none, and none overlooked."""

import numpy
import pytest

from nhwc.machine.timing import Comparison, Samples, interleave, verdict_of


def pairs(seed, *, turns=15, noise=0.01, outliers=0.1, factor=1.0):
    """Times of two variants on a machine that drifts, jitters, and is sometimes interrupted."""
    draw = numpy.random.default_rng(seed)
    drift = numpy.exp(numpy.cumsum(draw.normal(0, 0.01, turns)))

    def taken():
        jitter = numpy.exp(numpy.abs(draw.normal(0, noise, turns)))
        struck = 1 + (draw.random(turns) < outliers) * draw.random(turns) * 0.5
        return 0.05 * drift * jitter * struck

    before, after = taken(), taken() * factor
    return Comparison(Samples(tuple(before)), Samples(tuple(after)))


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03, 0.08])
def test_the_same_twice_is_no_difference(noise):
    verdicts = [pairs(seed, noise=noise).verdict for seed in range(200)]
    wrong = sum(verdict in ("faster", "slower") for verdict in verdicts)
    assert wrong <= 4, "at most one trial in fifty; one in twenty would be allowed"


@pytest.mark.parametrize(("noise", "share"), [(0.002, 0.95), (0.01, 0.9)])
def test_a_tenth_slower_is_found(noise, share):
    found = [pairs(seed, noise=noise, factor=1.1).verdict == "slower" for seed in range(100)]
    assert sum(found) >= share * 100


def test_much_noise_is_called_noise_and_not_a_difference():
    verdicts = [
        pairs(seed, turns=9, noise=0.3, outliers=0.5, factor=1.1).verdict for seed in range(50)
    ]
    assert verdicts.count("too noisy to tell") > 40


def test_a_drift_that_hits_both_does_not_widen_the_interval():
    slow = numpy.linspace(1.0, 3.0, 15)
    before, after = Samples(tuple(2 * slow)), Samples(tuple(slow))
    assert Comparison(before, after).interval == (2.0, 2.0)
    low, high = Comparison(before, after, paired=False).interval
    assert low < 1.6
    assert high > 2.4


def test_intervals_are_the_same_on_every_call_and_hold_the_ratio():
    comparison = pairs(7)
    assert comparison.interval == comparison.interval
    low, high = comparison.interval
    assert low <= comparison.ratio <= high


def test_samples_of_two_runs_may_differ_in_number():
    comparison = Comparison(Samples((1.0, 1.0)), Samples((2.0, 2.0, 2.0)), paired=False)
    assert comparison.verdict == "slower"
    with pytest.raises(ValueError, match="2 and 3 samples are no pairs"):
        _ = Comparison(Samples((1.0, 1.0)), Samples((2.0, 2.0, 2.0))).interval


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.98, 1.02, "same"),
        (1.001, 1.02, "same"),
        (1.001, 1.2, "faster"),
        (0.5, 0.999, "slower"),
        (0.96, 1.01, "too noisy to tell"),
    ],
)
def test_verdicts(low, high, verdict):
    assert verdict_of(low, high) == verdict


def test_turns_start_with_another_each_round():
    order = []
    interleave({name: lambda n=name: order.append(n) for name in "abc"}, rounds=3, warmup=0)
    assert "".join(order) == "abcbcacab"


def test_statistics_of_samples():
    samples = Samples((4.0, 1.0, 3.0, 2.0, 5.0))
    assert samples.median_s == 3.0
    assert samples.quartiles_s == (2.0, 4.0)
    assert samples.spread == pytest.approx(2 / 3)
    assert Samples((1.0,)).quartiles_s == (1.0, 1.0)
