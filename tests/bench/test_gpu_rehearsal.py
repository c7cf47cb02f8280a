"""The run that needs a GPU, rehearsed on the CPU: each of its steps, and one that is cut."""

import pytest
from benchmarks import gpu, gpu_tables
from benchmarks.gpu_rows import WHOLE, Rows
from benchmarks.gpu_steps import STEPS, TINY


@pytest.mark.slow
def test_every_step_leaves_a_file_that_the_page_shows(tmp_path, capsys):
    assert gpu.main(["-o", str(tmp_path), "--rehearse"]) == 0
    found = {step.name: Rows.read(tmp_path / f"{step.name}.json") for step in STEPS}
    assert {rows.ended for rows in found.values()} == {WHOLE}, capsys.readouterr().out
    assert not [row for rows in found.values() for row in rows.rows if "failure" in row]
    assert [row["outcome"] for row in found["tests"].rows[:-1]] == ["skipped"]
    timed = {
        name: [(row["how"], sorted(row["seconds"])) for row in found[name].rows]
        for name in ("volta", "train", "mobilenet", "optimize")
    }
    layouts = ["nchw", "nhwc"]
    assert timed["volta"] == timed["mobilenet"] == [("eager", layouts), ("compile", layouts)]
    assert timed["train"] == [("eager", layouts)]
    ways = ["compile", "eager", "optimize"]
    assert timed["optimize"] == [("default", ways), ("max-autotune", ways)]
    assert found["operators"].rows == [
        {"operator": "nn.functional.grid_sample", "outcome": "loses"}
    ]
    text = gpu_tables.section(tmp_path)
    assert text.count("### ") == len(STEPS)
    assert text.count(f"| {TINY} |") == 7
    assert "Cut short" not in text


def test_a_step_that_is_cut_says_so_and_the_next_one_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "WHOLE_S", 0.0)
    assert gpu.main(["-o", str(tmp_path), "--rehearse", "--only", "volta", "train"]) == 0
    text = gpu_tables.section(tmp_path)
    assert text.count("Cut short: it took longer than 0 s.") == 2


def test_rows_stay_when_a_step_ends_early(tmp_path):
    rows = Rows(tmp_path / "volta.json", "volta", environment={"device": "GPU", "torch": "2"})
    rows.add(model="a", how="eager", batch=2, seconds={"nchw": [2.0, 2.0], "nhwc": [1.0, 1.0]})
    rows.add(model="b", how="eager", batch=2, failure="OutOfMemoryError: no")
    again = Rows.read(rows.path)
    again.end("it took longer than 1 s", 1.0)
    text = gpu_tables.section(tmp_path)
    assert "GPU, torch 2. Cut short: it took longer than 1 s." in text
    assert "| a | 2 | eager | 2000.00 | 1000.00 | 2.00 (2.00-2.00) | 1.08-1.35 |" in text
    assert "| b | 2 | eager | OutOfMemoryError: no |" in text
    assert gpu_tables.section(tmp_path / "none") == "Nothing has been recorded yet."
