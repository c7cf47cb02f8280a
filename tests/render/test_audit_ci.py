"""What CI servers read: annotations of GitHub, SARIF by its schema, JUnit's XML."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import nhwc
from nhwc import audit
from nhwc._audit.baseline import Baseline, known_by
from nhwc._audit.findings import KINDS
from nhwc._audit.line_hashes import line_hashes
from nhwc._audit.review import review
from nhwc.cli import main
from nhwc.machine.timing import Comparison, Samples
from nhwc.render.audit_github import MOST, audit_github, command
from nhwc.render.audit_junit import audit_junit
from nhwc.render.audit_sarif import audit_sarif

SCHEMA = Path(__file__).with_name("sarif-2.1.0.json")
NET = """import torch
from torch import nn

from nhwc.zoo import load_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        x = nn.functional.instance_norm(self.first(x))
        return self.last(x)  # 100 %


def shuffle():
    return load_model("shufflenet_v2_x0_5")
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    folder = tmp_path / "a, folder"
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    monkeypatch.chdir(folder)
    return tmp_path


def output(capsys, format, *rest, model="net.py:Net", size=9):
    line = ["audit", model, "--input", f"1x3x{size}x{size}", "--format", format, *rest]
    status = main(line)
    return status, capsys.readouterr().out


def read(line):
    """A workflow command as GitHub's runner reads it: its name, its properties, its message."""
    name, given, message = re.fullmatch(r"::(\w+) (.*?)::(.*)", line).groups()
    properties = dict(part.split("=", 1) for part in given.split(","))
    return name, {key: unescaped(value, ":,") for key, value in properties.items()}, message


def unescaped(text, more=""):
    for character in f"\r\n{more}%":
        text = text.replace(f"%{ord(character):02X}", character)
    return text


def test_annotations_stand_on_the_lines_of_the_repository(repository, capsys):
    status, out = output(capsys, "github", "--fail-on", "lost")
    annotation, last = out.splitlines()
    name, where, message = read(annotation)
    assert (status, name) == (1, "error")
    title = "torch.nn.functional.instance_norm loses channels last"
    line = NET.splitlines()[12]
    assert where == {
        "file": "a, folder/net.py", "line": "13", "title": title,
        "col": str(line.index("x") + 1), "endColumn": str(len(line) + 1),
    }  # fmt: skip
    assert "%25 of a run. `instance_norm` copies to contiguous" in message
    assert last.endswith("1x3x9x9: 3 operators, 1 finding")

    status, out = output(capsys, "github")
    assert (status, read(out.splitlines()[0])[0]) == (0, "warning")


def test_a_loss_inside_a_package_is_shown_where_the_model_is_defined(repository, capsys):
    _, out = output(capsys, "github", model="net.py:shuffle", size=64)
    (warning, where, message), (notice, other, _) = map(read, out.splitlines()[:2])
    assert (warning, notice) == ("warning", "notice")
    assert where["line"] == other["line"] == str(NET.splitlines().index("def shuffle():") + 1)
    assert "The call: out = torch.cat(" in message
    assert "(torchvision/models/shufflenetv2.py:" in message


def many(count, **changes):
    """A review of an audit with `count` losses in as many lines, the first of them known."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3))
    report = audit(net, torch.rand(1, 3, 9, 9), name="</a>::\x1b[2Jnet")
    (one,) = report.findings
    evil = 'x = "]]>\x00\ufffe" % y\u202e,:\n::error::'
    sites = [
        replace(one.site, file=str(Path("net.py").resolve()), line=line + 1, source=f"{line}{evil}")
        for line in range(count)
    ]
    findings = tuple(replace(one, site=site) for site in sites)
    report = replace(report, findings=findings, **changes)
    root = Path().resolve()
    gone = replace(one, operator="torch.gone")
    known = Baseline(tuple(known_by(f, report.model, root) for f in (*findings[:1], gone)))
    return review(report, root, fail_on=["lost", "slower"], baseline=known, baseline_name="known")


def test_github_gets_no_more_annotations_than_it_shows(repository):
    lines = audit_github(many(MOST + 3)).splitlines()
    assert [line for line in lines if line.startswith("::")] == lines[:MOST]
    assert all(read(line)[0] == "error" for line in lines[:MOST])
    assert [line.partition(",")[0] for line in lines[MOST : MOST + 2]] == ["error", "error"]
    assert lines[-2].startswith("stale in known: lost torch.gone")
    assert lines[-1].endswith(f"{MOST + 2} new findings, 1 known, 1 stale")


def test_what_others_wrote_cannot_begin_a_command():
    text = "100 %\r\n::error::a,b:c"
    line = command("warning", text, {"title": text})
    assert len(line.splitlines()) == 1
    name, where, message = read(line)
    assert (name, where["title"], unescaped(message)) == ("warning", text, text)


def test_slower_is_an_error_of_its_own(repository):
    slow = Comparison(Samples((1.0, 1.1, 1.0)), Samples((3.0, 3.1, 3.0)))
    found = many(0, comparison=slow)
    assert found.failed
    assert read(audit_github(found).splitlines()[0])[0] == "error"
    assert ElementTree.fromstring(audit_junit(found).encode()).find(".//failure") is not None


def test_junit_fails_for_losses_and_skips_what_is_known(repository, capsys):
    suite = ElementTree.fromstring(audit_junit(many(3)).encode())[0]
    counts = {key: suite.get(key) for key in ("tests", "failures", "skipped", "errors")}
    assert counts == {"tests": "5", "failures": "2", "skipped": "1", "errors": "0"}
    failed = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    assert [case.get("line") for case in failed] == ["2", "3"]
    assert "GroupNorm" in failed[0].find("failure").text

    status, out = output(capsys, "junit")
    assert status == 0
    cases = ElementTree.fromstring(out.encode()).findall(".//testcase")
    assert [len(case) for case in cases] == [1, 0, 0]


def checked(text):
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    log = json.loads(text)
    validator(json.loads(SCHEMA.read_text())).validate(log)
    return log["runs"][0]


def test_sarif_is_valid_and_has_what_code_scanning_wants(repository, capsys):
    path = repository / "a, folder" / "audit.sarif"
    assert main(["audit", "net.py:Net", "--input", "1x3x9x9", "-o", str(path)]) == 0
    run = checked(path.read_text())
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == list(KINDS)
    assert all(rule["help"]["text"] and rule["help"]["markdown"] for rule in rules)
    assert run["tool"]["driver"]["version"] == nhwc.__version__
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("lost", "warning")
    assert rules[result["ruleIndex"]]["id"] == "lost"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "a%2C%20folder/net.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"]["startLine"] == place["region"]["endLine"] == 13
    assert place["region"]["snippet"]["text"] == NET.splitlines()[12].strip()
    assert result["partialFingerprints"]["primaryLocationLineHash"] == line_hashes(NET)[12]


def test_sarif_of_package_code_names_the_package_and_shows_the_model(repository, capsys):
    _, out = output(capsys, "sarif", model="net.py:shuffle", size=64)
    first, second = checked(out)["results"]
    places = [one["locations"][0]["physicalLocation"] for one in (first, second)]
    assert [one["artifactLocation"]["uri"] for one in places] == ["a%2C%20folder/net.py"] * 2
    called = first["relatedLocations"][0]["physicalLocation"]["artifactLocation"]
    assert called == {"uri": "torchvision/models/shufflenetv2.py", "uriBaseId": "PACKAGES"}
    # They stand in one line, and code scanning must not take them for one.
    hashes = {one["partialFingerprints"]["primaryLocationLineHash"] for one in (first, second)}
    assert len(hashes) == 2

    _, out = output(capsys, "sarif", model="shufflenet_v2_x0_5", size=64)
    place = checked(out)["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == called


def test_sarif_marks_what_the_baseline_knows(repository):
    run = checked(audit_sarif(many(2), "1.0"))
    assert [one["baselineState"] for one in run["results"]] == ["unchanged", "new"]
    assert [one["level"] for one in run["results"]] == ["note", "error"]


def test_sarif_names_a_place_also_where_no_line_is_known(repository):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3))
    report = audit(net, torch.rand(1, 3, 9, 9), name="a:b/c")
    findings = [replace(one, site=replace(one.site, file="", line=0)) for one in report.findings]
    found = review(replace(report, findings=tuple(findings)), repository)
    place = checked(audit_sarif(found, "1.0"))["results"][0]["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "a%3Ab%2Fc"}, "region": {"startLine": 1}}
    assert "::warning title=torch.nn.functional.instance_norm" in audit_github(found)


@pytest.mark.parametrize(
    ("text", "hashes"),
    [
        ("", ["c129715d7a2bc9a3"]),
        (
            " hello; \t\nworld!!!\r\n\n\r  \t\tGreetings\r End\r\n",
            [
                "e9496ae3ebfced30", "fb7c023a8b9ccb3f", "ce8ba1a563dcdaca", "e20e36e16fcb0cc8",
                "b3edc88f2938467e", "c8e28b0b4002a3a0", "c129715d7a2bc9a3",
            ],
        ),
    ],
    ids=["empty", "line ends"],
)  # fmt: skip
def test_line_hashes_are_those_of_code_scanning(text, hashes):
    """The numbers are those that GitHub's upload action computes for these texts."""
    assert line_hashes(text) == [f"{value}:1" for value in hashes]
    many = line_hashes("Lorem ipsum dolor sit amet.\n" * 10)
    assert many[:3] == [f"a7f2ff13bc495cf2:{number}" for number in (1, 2, 3)]
    assert many[-2:] == ["cc97dc7b1d7d8f7b:1", "c129715d7a2bc9a3:1"]


def test_a_model_has_one_category_from_every_folder_and_by_its_whole_path(
    repository, monkeypatch, capsys
):
    def names(model):
        log = json.loads(output(capsys, "sarif", model=model)[1])
        suite = ElementTree.fromstring(output(capsys, "junit", model=model)[1])[0]
        return log["runs"][0]["automationDetails"]["id"], suite.get("name")

    known = "nhwc audit a, folder/net.py:Net/", "nhwc audit a, folder/net.py:Net"
    assert names("net.py:Net") == names(f"{repository}/a, folder/net.py:Net") == known
    monkeypatch.chdir(repository)
    assert names("./a, folder/net.py:Net") == known
