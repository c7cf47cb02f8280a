"""docs/claims.md: every row has a command that exists, and the page has every row."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from benchmarks import claims_evidence
from benchmarks.claims import PAGE, page
from benchmarks.claims_checks import CHECKS
from benchmarks.claims_evidence import GPU, LATER, OUTCOMES, SHOWN, Evidence, Found
from benchmarks.claims_rows import CLAIMS

import nhwc
from nhwc.cli import make_parser
from nhwc.errors import InputError
from nhwc.zoo import load_model

ROOT = Path(__file__).parents[2]
OPERATORS = {
    operator["name"].rpartition(".")[2]
    for operator in json.loads(claims_evidence.OPERATORS.read_text())["operators"]
}


def exists(command: str) -> None:
    """Fail unless the command parses, and what it names is there."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        words = ["nhwc", *words[words.index("nhwc") + 1 :]]
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None
        if "--show" in words:
            assert words[words.index("--show") + 1] in [check.__name__ for check in CHECKS]
        return
    assert words[0] == "nhwc"
    verb = words[1]
    assert callable(getattr(nhwc, verb))
    args = make_parser([verb])[0].parse_args(words[1:])
    if verb == "ops":
        assert set(args.names) <= OPERATORS
    if verb == "audit":
        load_model(args.model)


@pytest.mark.parametrize("command", sorted({claim.command for claim in CLAIMS}))
def test_each_command_exists(command):
    exists(command)


@pytest.mark.parametrize(
    "command",
    [
        "nhwc bench --suite nonsense",
        "nhwc ops no_such_operator",
        "nhwc polish resnet18",
        "python -m benchmarks.nonsense",
        "python -m benchmarks.claims --show nonsense",
    ],
)
def test_a_command_that_does_not_exist_is_found(command, capsys):
    with pytest.raises((AssertionError, AttributeError, InputError)):
        exists(command)


def test_the_page_has_every_claim_and_an_outcome_of_each():
    text = PAGE.read_text()
    rows = [line.split(" | ") for line in re.findall(r"^\| \d+ \|.*", text, re.MULTILINE)]
    shown = [(row[1], row[2].strip("`")) for row in rows]
    assert shown == [(claim.says, claim.command) for claim in CLAIMS], (
        "docs/claims.md is not of these claims: run `python -m benchmarks.claims`"
    )
    assert {row[3] for row in rows} <= set(OUTCOMES)
    assert all(row[4].strip(" |") for row in rows)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_each_program_sees_what_is_claimed(check):
    assert check()


def test_recorded_results_come_in_where_they_are(tmp_path, monkeypatch):
    recorded = (ROOT / "benchmarks" / "results" / "icelake.json").read_bytes()
    monkeypatch.setattr(claims_evidence, "RESULTS", tmp_path)
    looks = [claims_evidence.suite("blog"), claims_evidence.gpu("volta", 1.08, 1.35)]
    looks += [claims_evidence.gpu_tests]
    assert [look(Evidence()).outcome for look in looks] == [LATER, GPU, GPU]
    (tmp_path / "blog.json").write_bytes(recorded)
    waiting = claims_evidence.gpu("train", on_cpu="blog")(Evidence())
    assert waiting.outcome == GPU
    assert waiting.words.startswith("on a CPU: 1.")
    (tmp_path / "gpu").mkdir()
    rows = [{"how": "eager", "seconds": {"nhwc": [1.0, 1.0], "nchw": [1.2, 1.3]}}, {"failure": "x"}]
    (tmp_path / "gpu" / "volta.json").write_text(json.dumps({"rows": rows}))
    rows = [{"test": "a.py::b", "outcome": "passed"}, {"exit_status": 0}]
    (tmp_path / "gpu" / "tests.json").write_text(json.dumps({"rows": rows}))
    found = [look(Evidence()) for look in looks]
    assert [seen.outcome for seen in found] == [SHOWN, SHOWN, SHOWN]
    assert found[1].words.startswith("1.25-1.25x")


def test_the_page_counts_and_keeps_its_cells():
    text = page([(CLAIMS[0], Found(SHOWN, "a | b")), (CLAIMS[-1], Found(LATER, "nothing"))])
    assert "2 claims: 1 shown, 1 not recorded yet." in text
    assert "| shown | a / b |" in text
