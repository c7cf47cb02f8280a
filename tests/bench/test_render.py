"""Results as text, CSV, pictures and a page."""

import csv
import dataclasses
import io
import re
import sys
import xml.etree.ElementTree

import pytest

from nhwc import InputError, MissingPackage
from nhwc._bench import Benchmark, Case, Measurement, Row, compare
from nhwc.machine.others import Others
from nhwc.render import bench_words as words
from nhwc.render.bench_csv import FIELDS, bench_csv
from nhwc.render.bench_html import bench_html
from nhwc.render.bench_plot import bench_plot
from nhwc.render.bench_text import bench_text, changes_text

from ..browser import needs_browser, opened
from ..made_up import HERE, measured, one, row, suite


def test_one_case_as_text():
    lines = bench_text(one()).splitlines()
    assert lines[0] == "resnet50 4x3x224x224, 2 threads"
    fastest_first = [line.split("  ")[0] for line in lines[3:8]]
    assert fastest_first == [
        "nhwc optimize",
        "ONNX Runtime",
        "fuse channels last",
        "eager channels last",
        "eager NCHW",
    ]
    assert re.search(r"nhwc optimize +20\.\d +\d+\.\d +2\.\d\dx +2\.\d\d-2\.\d\d +faster", lines[3])
    bars = [line.count("█") for line in lines[3:8]]
    assert bars == sorted(bars, reverse=True)
    text = "\n".join(lines[8:])
    assert "nhwc optimize is fastest: 2.5" in text
    assert "the best of the others" in text
    assert "channels last: clean" in text
    assert "  OpenVINO: not installed: pip install 'nhwc[engines]'" in text
    assert lines[-1] == "Test CPU AVX2, 2 cores, torch 2.13.0, ONNX Runtime 1.31.1"


def fusion():
    """A model with batch norms, and one without, where only the layout gains."""
    speeds = {
        "eager": 1.0, "fused_nchw": 0.8, "fused_script": 0.76, "channels_last": 0.7, "fused": 0.56,
    }  # fmt: skip
    plain = {**speeds, "fused_nchw": 1.0, "fused_script": 1.0, "fused": 0.7}
    folded = {"resnet18": (speeds, 20), "vgg11": (plain, 0)}
    rows = [row(Case(name, ((10, 3, 224, 224),), 2), folded[name][0]) for name in folded]
    rows = [
        dataclasses.replace(
            made,
            measurements=tuple(
                dataclasses.replace(m, folded=folded[made.case.model][1], left=0)
                if m.variant in ("fused", "fused_nchw")
                else m
                for m in made.measurements
            ),
        )
        for made in rows
    ]
    return Benchmark(HERE, tuple(rows), title="fusion: a title")


def test_folding_is_told_apart_from_the_layout():
    result = fusion()
    text = " ".join(bench_text(dataclasses.replace(result, rows=result.rows[:1])).split())
    assert re.search(r"folding, NCHW: 1.2\dx as fast as eager NCHW .*; folded 20 batch norms", text)
    assert re.search(r"folding, channels last: 1.2\dx as fast as eager channels last", text)
    assert re.search(r"jit.script, NCHW: 1.05x as fast as fuse NCHW", text)
    both = bench_text(result)
    assert "Nothing was folded in vgg11: no batch norm." in both
    assert re.search(r"vgg11 +50\.0 +1\.43x +1\.00x +1\.00x +1\.00x", both)
    lines = list(csv.DictReader(io.StringIO(bench_csv(result))))
    (vgg,) = [x for x in lines if x["model"] == "vgg11" and x["variant"] == "fused"]
    assert float(vgg["speedup"]) == pytest.approx(1 / 0.7, rel=0.02)
    assert float(vgg["step_gain"]) == pytest.approx(1, rel=0.02)
    assert (vgg["folded"], vgg["left"]) == ("0", "0")
    assert any("Nothing was folded in vgg11" in line for line in words.answers(result))


def test_no_table_compares_two_layouts_where_folding_is_isolated():
    result = fusion()
    (resnet, _) = result.rows
    assert resnet.shown("fused", "eager") is None
    assert resnet.shown("fused_script", "eager") is not None
    assert resnet.shown("fused", "channels_last") is not None
    # Speeds of 1.79 are those of fused channels last against eager NCHW.
    single = dataclasses.replace(result, rows=(resnet,))
    pictures = [word for made in (result, single) for word in drawn(made)[1]]
    for text in (bench_text(result), bench_text(single), " ".join(pictures)):
        assert "1.2" in text
        assert not re.search(r"1\.(7[789]|8[01])x", text)
    assert "1.7" not in " ".join(words.answers(result))
    # Beside other engines, each is compared with the baseline, as always.
    everything = (*resnet.measurements, measured("optimized", 0.01))
    usual = dataclasses.replace(resnet, measurements=everything)
    assert usual.shown("fused", "eager") == usual.comparison("fused", "eager")


def test_many_cases_as_text():
    lines = bench_text(suite()).splitlines()
    assert lines[0] == "icelake: a title; 2 threads, float32"
    assert lines[3].startswith("alexnet, batch 1")
    assert any(line.startswith("geometric mean") and "2.50x" in line for line in lines)
    claims = next(i for i, line in enumerate(lines) if "published 1.26-1.76x" in line)
    assert lines[claims + 1].startswith("alexnet, batch 1")
    assert "reproduced" in lines[claims + 1]
    assert "  broken 1x3x224x224, 2 threads: ModelFailed: it is broken" in lines


@pytest.mark.parametrize("wide", [60, 80, 96, 200])
@pytest.mark.parametrize("result", [suite, one])
def test_tables_are_no_wider_than_the_terminal_and_lose_no_column(result, wide, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(wide))
    lines = bench_text(result()).splitlines()
    assert max(map(len, lines)) <= min(wide, 96)
    text = " ".join(lines)
    if result is suite:
        heads = (*suite().variants[1:], "eager ms", "published", "propagation", "best peer")
        assert all(head in text for head in (*heads, "ours/peer"))
    else:
        assert all(head in text for head in ("set-up s", "peak MB", "99 % sure", "error"))


@pytest.mark.parametrize(
    ("speeds", "noise", "answer"),
    [
        ({"eager": 1.0, "fused": 1.3}, 0.002, "Nothing is faster than eager NCHW here."),
        ({"eager": 1.0, "fused": 0.999}, 0.002, "Nothing is faster than eager NCHW here."),
        ({"eager": 1.0, "fused": 0.9}, 0.5, "too noisy to tell whether anything beats"),
        ({"eager": 1.0, "fused": 1.02}, 0.5, "too noisy to tell whether anything beats"),
        ({"eager": 1.0, "fused": 0.5}, 0.002, "fuse channels last is fastest: 2.0"),
    ],
)
def test_the_answer_claims_no_more_than_was_measured(speeds, noise, answer):
    case = Case("net", ((1, 3, 8, 8),), 1)
    made = Row(case, tuple(measured(v, s, noise=noise, seed=1) for v, s in speeds.items()))
    assert answer in bench_text(Benchmark(HERE, (made,)))


def test_of_one_variant_alone_it_is_not_said_that_nothing_is_faster():
    case = Case("net", ((1, 3, 8, 8),), 1)
    assert "faster" not in bench_text(Benchmark(HERE, (row(case, {"eager": 1.0}),)))


def test_a_disturbed_machine_is_named():
    case = Case("net", ((1, 3, 8, 8),), 1)
    calm, wild = measured("eager", 1.0), measured("fused", 0.5, noise=0.5)
    text = bench_text(Benchmark(HERE, (Row(case, (calm, wild)),)))
    assert (
        "Noisy: 1 of 2 measurements spread by more than 15%, fuse channels last on net by" in text
    )
    assert "Noisy" not in bench_text(one())


@pytest.mark.parametrize(("threads", "is_told"), [(1, False), (2, True)])
def test_other_programs_are_named_where_they_had_a_core_that_was_wanted(threads, is_told):
    calm, case = measured("eager", 1.0), Case("net", ((1, 3, 8, 8),), threads)
    rows = [Row(case, (calm,), others=Others(taken, 2)) for taken in (0.5, 0.75, 0.0)]
    text = " ".join(bench_text(Benchmark(HERE, tuple(rows))).split())
    said = "Meanwhile other programs had 0.8 of 2 cores. Stop other programs and measure again."
    assert (said in text) is is_told


def test_interrupted_and_empty_results_can_be_shown():
    failed = Row(Case("net", ((1, 3, 8, 8),), 1), (Measurement("eager", failure="no"),))
    for rows in ((), (failed,), (Row(failed.case, failure="no"),)):
        result = Benchmark(HERE, rows, interrupted=True)
        assert "interrupted" in bench_text(result)
        assert bench_csv(result).startswith("model,batch,")
        assert "<script" in bench_html(result)
        with pytest.raises(InputError, match="Add eager to the variants"):
            bench_plot(result)


def test_csv_has_a_line_per_case_and_variant():
    lines = list(csv.DictReader(io.StringIO(bench_csv(one()))))
    assert tuple(lines[0]) == FIELDS
    by_variant = {line["variant"]: line for line in lines}
    assert len(lines) == 6
    assert float(by_variant["eager"]["median_s"]) == pytest.approx(0.05, rel=0.01)
    assert float(by_variant["eager"]["per_second"]) == pytest.approx(80, rel=0.01)
    assert float(by_variant["optimized"]["speedup"]) == pytest.approx(2.5, rel=0.02)
    assert by_variant["openvino"]["failure"] == "not installed: pip install 'nhwc[engines]'"
    assert by_variant["openvino"]["median_s"] == ""
    broken = [line for line in csv.DictReader(io.StringIO(bench_csv(suite()))) if line["failure"]]
    assert [line["model"] for line in broken] == ["broken"]


def drawn(result):
    """The colours of the bars, and everything written, of a picture as SVG."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        svg = bench_plot(result, "svg").decode()
    return svg, re.findall(r">([^<>\n]+)</text>", svg)


def test_the_picture_names_what_it_shows():
    svg, words = drawn(one())
    assert {"nhwc optimize", "ONNX Runtime", "eager NCHW"} <= set(words)
    assert any(word.startswith("resnet50, batch 4, 2 threads") for word in words)
    assert any(word.startswith("Test CPU AVX2, 2 cores, torch 2.13.0") for word in words)
    assert "#0e8f84" in svg


def test_the_picture_of_a_suite_has_a_panel_per_batch_and_the_published_range():
    svg, words = drawn(suite())
    assert {"batch 1, 2 threads, float32", "batch 4, 2 threads, float32"} <= set(words)
    assert words.count("published for channels last: 1.26-1.76x") == 2
    assert words.count("alexnet") == 2
    assert "broken" not in words
    assert "#fde9c8" in svg


def test_a_name_with_an_end_of_line_stays_in_one():
    case = Case("of\nme.py:net", ((1, 3, 8, 8),), 1)
    assert bench_text(Benchmark(HERE, (row(case),))).startswith(r"of\nme.py:net ")


def test_bars_are_long_enough_to_see_beside_a_noisy_interval():
    made = one().rows[0]
    noisy = measured("compile", 0.04, noise=6.0)
    result = Benchmark(HERE, (Row(made.case, (*made.measured, noisy)),))
    assert made.comparison("optimized", "eager").ratio < 3
    assert result.rows[0].comparison("compile", "eager").interval[1] > 30
    shape = r'<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) [^"]*"[^>]*style="fill: #0e8f84"'
    svg, _ = drawn(result)
    left, right = map(float, re.search(shape, svg).groups())
    assert right - left > 50
    # No interval runs through the words at its end.
    ends = re.findall(r'L ([\d.]+) [\d.]+ \n"[^>]*stroke-width: 1.1', svg)
    said = re.findall(r' x="([\d.]+)"[^>]*>[\d.]+x   [^<]* ms<', svg)
    assert max(map(float, ends)) < max(map(float, said))


def test_pictures_are_the_same_for_the_same_result():
    assert bench_plot(one(), "svg") == bench_plot(one(), "svg")


@pytest.mark.parametrize("name", ["shufflenet_v2_x1_0", "a/folder/" * 20 + "net.py:shufflenet"])
def test_no_name_is_cut_off_at_the_edge_of_the_picture(name):
    image = pytest.importorskip("matplotlib.image")
    cases = Case(name, ((4, 3, 224, 224),), 2), Case("resnet18", ((4, 3, 288, 288),), 2)
    result = Benchmark(HERE, tuple(map(row, cases)))
    picture = image.imread(io.BytesIO(bench_plot(result, "png")))
    assert (picture[:, :10] == 1).all()
    assert not (picture[:, 10:60] == 1).all()


def test_the_picture_names_the_model_of_a_case_that_is_drawn_alone():
    failed = Row(Case("broken", ((1, 3, 8, 8),), 2), failure="ModelFailed: it is broken")
    _, written = drawn(Benchmark(HERE, (row(Case("net", ((1, 3, 8, 8),), 2)), failed)))
    assert "net, batch 1, 2 threads, float32" in written
    cases = [Case(name, ((n, 3, 8, 8),), 2) for name, n in (("a", 1), ("b", 1), ("c" * 60, 4))]
    _, written = drawn(Benchmark(HERE, tuple(map(row, cases))))
    assert f"...{'c' * 45}, batch 4, 2 threads, float32" in written
    assert "batch 1, 2 threads, float32" in written


def test_without_matplotlib_the_pip_line_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackage, match=r"pip install 'nhwc\[plot\]'"):
        bench_plot(one())


def test_changes_as_text():
    case = Case("net", ((1, 3, 8, 8),), 1)
    old = Benchmark(HERE, (row(case, {"eager": 1.0, "fused": 0.8}),))
    new = Benchmark(HERE, (row(case, {"eager": 1.001, "fused": 0.9}),))
    lines = changes_text(compare(old, new)).splitlines()
    assert lines[1].startswith("net, fused")
    assert lines[1].endswith("slower")
    assert lines[2].endswith("same")
    assert "1 of 2 slower" in lines


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ({"eager": 0.002, "fused": 0.002}, "nothing got slower"),
        ({"eager": 0.5, "fused": 0.002}, "nothing surely got slower, 1 of 2 too noisy to tell"),
    ],
)
def test_of_changes_that_are_too_noisy_to_tell_none_is_denied(noise, said):
    case = Case("net", ((1, 3, 8, 8),), 1)
    made = Row(case, tuple(measured(name, 1.0, noise=much) for name, much in noise.items()))
    assert said in changes_text(compare(*[Benchmark(HERE, (made,))] * 2)).splitlines()


def test_the_page_loads_nothing_from_outside():
    text = bench_html(suite())
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"']*""", text) == []
    assert re.findall(r"url\(|@import|fetch\(|XMLHttpRequest", text) == []


@pytest.mark.browser
@pytest.mark.parametrize("made", [one, suite])
def test_the_page_in_a_browser(made, tmp_path):
    if needs_browser[1].args[0]:
        pytest.skip("chromium and chromedriver are not installed")
    from selenium.webdriver.common.by import By

    page = tmp_path / "bench.html"
    page.write_text(bench_html(made()))
    with opened(page) as browser:

        def all_of(selector):
            return browser.find_elements(By.CSS_SELECTOR, selector)

        if made is one:
            assert all_of("h1")[0].text == "resnet50"
            assert all_of(".bar")[0].text.split("\n")[0] == "nhwc optimize"
            assert len(all_of("tbody tr")) == 5
            assert "nhwc[engines]" in all_of("#problems")[0].text
            return
        assert len(all_of(".row")) == 8
        assert len(all_of(".band")) == 8
        all_of("#search")[0].send_keys("alex")
        assert [row.text.split("\n")[0] for row in all_of(".row h3")] == [
            "alexnet, batch 1",
            "alexnet, batch 4",
        ]
        all_of(".row summary")[0].click()
        assert all_of("tbody")[0].is_displayed()
        assert not all_of("tbody")[1].is_displayed()


def test_the_answer_names_what_is_surely_faster_where_the_fastest_is_not():
    case = Case("net", ((1, 3, 8, 8),), 1)
    calm = [measured("eager", 1.0), measured("fused", 0.7)]
    text = bench_text(
        Benchmark(HERE, (Row(case, (*calm, measured("jit", 0.6, noise=0.9, seed=1))),))
    )
    said = " ".join(text.split())
    assert "fuse channels last is faster: 1.4" in said
    assert "The machine is too noisy to tell what is fastest." in said


def test_cases_are_told_apart_by_all_that_they_differ_in():
    plain = Case("net", ((1, 3, 8, 8),), 1)
    others = [
        plain,
        dataclasses.replace(plain, shapes=((1, 3, 9, 9),)),
        dataclasses.replace(plain, amp=True),
        dataclasses.replace(plain, train=True),
        dataclasses.replace(plain, seed=7),
        dataclasses.replace(plain, weights="net.pt"),
    ]
    names = [words.short(case, others) for case in others]
    assert len({*names}) == len(names)
    assert "3x9x9" in names[1]
    assert "float32" not in words.common(others)
    assert words.common([plain]) == "batch 1, 1 thread, float32"


def test_names_that_matplotlib_would_take_for_formulas_or_cannot_draw():
    rows = [
        row(Case(name, ((1, 3, 8, 8),), 1)) for name in ("a$\\x$b", "\u6a21\u578b", "bad\udcff")
    ]
    assert bench_plot(Benchmark(HERE, tuple(rows))).startswith(b"<?xml")


@pytest.mark.parametrize("models", [["net"], ["net", "other"]])
def test_a_picture_of_a_result_with_escape_sequences_is_one_that_can_be_read(models):
    evil = "a\x1b[31m\x00\ufffe\udcffz"
    case = Case("", ((1, 3, 8, 8),), 1, device=evil)
    rows = [row(dataclasses.replace(case, model=f"{name}{evil}")) for name in models]
    spoilt = tuple(
        dataclasses.replace(
            one, measurements=tuple(dataclasses.replace(m, version=evil) for m in one.measurements)
        )
        for one in rows
    )
    svg = bench_plot(Benchmark(HERE, spoilt, title=evil), "svg")
    assert xml.etree.ElementTree.fromstring(svg).tag.endswith("svg")
