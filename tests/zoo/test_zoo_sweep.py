"""A handful of models through the whole sweep, and its limits."""

import json

from benchmarks.lost_formats import left_of
from benchmarks.zoo_names import home, names
from benchmarks.zoo_sweep import main
from benchmarks.zoo_tables import html, markdown, told

from ..browser import needs_browser, opened

RIGHT = {
    "outcome": "right", "reason": "", "input": [[1, 3, 64, 64]], "ratio": 1.0, "why": "no gain",
    "lost_before": 3, "lost_after": "it takes no image", "left": ["not a convolution"],
    "left_count": 2, "opaque": ["head: it loops"], "chosen": "graph",
    "loaded": "not saved: the model cannot be saved: head: code. A saved file", "day": "2026-11-22",
}  # fmt: skip


def test_a_handful_is_right_and_a_second_run_does_nothing(tmp_path, capsys):
    output = tmp_path / "sweep.json"
    models = ["shufflenet_v2_x0_5", "squeezenet1_1", "timm:lcnet_035"]
    arguments = [*models, "--output", str(output), "--jobs", "2"]
    assert main(arguments) == 0
    rows = json.loads(output.read_text())
    assert {name: row["outcome"] for name, row in rows.items()} == dict.fromkeys(models, "right")
    shuffle = rows["shufflenet_v2_x0_5"]
    assert shuffle["lost_before"] > 0 == shuffle["lost_after"]
    assert shuffle["folded"] == 56
    assert rows["squeezenet1_1"]["input"] == [[1, 3, 64, 64]]
    assert output.with_suffix(".md").read_text().count("| right |") == 3
    page = output.with_suffix(".html").read_text()
    assert all(f'"model":"{name}"' in page for name in models)
    assert "http" not in page
    assert capsys.readouterr().out.endswith("3 models: 3 right\n")
    assert main([*arguments, "--seconds", "0.001"]) == 0, "what has a row is not run again"
    assert main([*arguments, "--since", "9999-12-31", "--seconds", "0.001"]) == 0
    again = json.loads(output.read_text()).values()
    assert {row["outcome"] for row in again} == {"over the limit"}, "an older row is run again"


def test_limits_and_failures_are_rows(tmp_path):
    output = tmp_path / "sweep.json"
    assert main(["alexnet", "--output", str(output), "--seconds", "0.01"]) == 0
    assert main(["no_such_model", "--output", str(output)]) == 0
    assert main(["vgg11", "--output", str(output), "--gigabytes", "1"]) == 0
    rows = json.loads(output.read_text())
    assert rows["alexnet"]["outcome"] == "over the limit"
    assert rows["vgg11"]["outcome"] == "over the limit"
    assert rows["vgg11"]["reason"].startswith("not tried: 0.5 GB of weights")
    assert rows["no_such_model"]["outcome"] == "refused"
    assert "no_such_model" in rows["no_such_model"]["reason"]


def test_a_row_says_what_is_not_as_one_would_wish():
    shown = told("some", RIGHT)
    assert shown["notes"] == (
        "no gain; it takes no image; 2 not folded: not a convolution; not traced: head: it loops; "
        "not saved: head: code"
    )
    assert (shown["input"], shown["lost"], shown["faster"]) == ("1x3x64x64", "3", "1.00")
    assert shown["remarks"] == ["not traced whole", "not saved", "without a plan"]
    twice = told("two", RIGHT | {"input": [[1, 3, 8, 8], [1, 3, 8, 8], [2]], "lost_after": 1})
    assert (twice["input"], twice["lost"]) == ("2 of 1x3x8x8, 2", "3 -> 1")
    assert "still lose the format" in twice["remarks"]
    assert "Of 1 that are right: 1 not traced whole," in markdown({"some": RIGHT})


@needs_browser[0]
@needs_browser[1]
def test_the_page_filters_by_outcome_and_by_remark(tmp_path):
    file = tmp_path / "zoo.html"
    wrong = {"outcome": "WRONG", "reason": "output 1e-2", "input": [[3, 8, 8]], "lost_before": 0}
    plain = {"outcome": "right", "reason": "", "lost_before": 13, "lost_after": 0, "ratio": 2.5}
    file.write_text(html({"bad": wrong, "some": RIGHT, "good": plain}))
    with opened(file) as driver:
        find = lambda css: [e.text for e in driver.find_elements("css selector", css)]
        press = lambda text: driver.find_element(
            "xpath", f"//button[contains(., '{text}')]"
        ).click()
        assert find("tbody td:first-child") == ["bad", "good", "some"]
        assert "13 \u2192 0" in find("td.number")
        assert find("#chips button") == ["2\nright", "1\nWRONG"]
        press("not saved")
        assert find("tbody td:first-child") == ["some"]
        press("not saved")
        press("WRONG")
        assert find("tbody td:first-child") == ["bad"]
        assert find("tbody td:last-child") == ["WRONG\noutput 1e-2"]
        press("WRONG")
        press("times as fast")
        press("times as fast")
        assert find("tbody td:first-child") == ["good", "some", "bad"]


def test_every_family_is_swept_early_and_small_models_first():
    found = names()
    assert len(found) == len({*found}) > 1000
    assert {"resnet50", "r3d_18", "raft_small", "fcn_resnet50", "timm:lcnet_050"} < {*found}
    assert not any(name.startswith("quantized") for name in found)
    torchvisions = sum(not name.startswith("timm:") for name in found)
    homes = [home(name) for name in found]
    early = homes[torchvisions : torchvisions + len({*homes}) - 1]
    assert len(early) == len({*early}) > 50
    assert found.index("squeezenet1_1") < found.index("vgg19") < torchvisions
    assert found.index("timm:resnet18") < found.index("timm:resnet50")


def test_what_loses_the_format_below_a_plan_is_asked_anew():
    row = {"input": [[1, 3, 32, 32]], "family": "classification"}
    assert left_of("shufflenet_v2_x0_5", row) == []
    clip = {"input": [[1, 3, 4, 16, 16]], "family": "video"}
    assert {call["operator"] for call in left_of("r3d_18", clip)} >= {"torch.nn.functional.conv3d"}
