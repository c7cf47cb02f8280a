"""A baseline knows a finding again wherever its line has moved to, and nothing else."""

import json
from pathlib import Path

import pytest

from nhwc import InputError, NhwcError
from nhwc._audit.baseline import Baseline, Known, load_baseline
from nhwc._audit.locations import named_from, path_from, repository_root
from nhwc.cli import main

NET = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.middle = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.first(x)
        {body}
        return self.last(x)


def net():
    return Net()
"""
NORM = "x = nn.functional.instance_norm(x)"
AGAIN = f"{NORM}\n        x = self.middle(x)\n        "


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository, with a function that writes its model, one that audits, and its baseline."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(body, above=""):
    Path("models/net.py").write_text(above + NET.format(body=body))


def audited(*rest, model="models/net.py:net"):
    return main(["audit", model, "--input", "2x3x9x9", "--baseline", "known.json", *rest])


LOST = ("--fail-on", "lost")


def test_old_findings_pass_and_new_ones_fail(repository, capsys):
    write(NORM)
    assert audited("--update-baseline", *LOST) == 0
    assert audited(*LOST) == 0
    assert "baseline known.json: 0 new findings, 1 known, 0 stale" in capsys.readouterr().out

    # Edits above the line, and blanks before it, leave it what it is.
    write(f"if True:\n            {NORM}", above="# a line\n\n\n")
    assert audited(*LOST) == 0

    write(f"{AGAIN}x = torch.{NORM[4:]}")
    capsys.readouterr()
    assert audited(*LOST) == 1
    out = capsys.readouterr().out
    assert "baseline known.json: 1 new finding, 1 known, 0 stale" in out
    assert "new    torch.nn.functional.instance_norm loses channels last  models/net.py:15" in out


def test_a_model_is_the_same_from_every_folder_and_by_its_whole_path(
    repository, monkeypatch, capsys
):
    write(NORM)
    assert audited("--update-baseline", *LOST) == 0
    before = Path("known.json").read_text()
    assert audited(*LOST, model="./models/net.py:net") == 0
    assert audited(*LOST, model=f"{repository}/models/net.py:net") == 0
    monkeypatch.chdir("models")
    given = "--input", "2x3x9x9", "--baseline", "../known.json"
    assert main(["audit", "net.py:net", *given, *LOST]) == 0
    assert main(["audit", "../models/net.py:net", *given, "--update-baseline"]) == 0
    assert Path("../known.json").read_text() == before
    capsys.readouterr()


def test_modules_that_no_line_calls_are_known_by_their_name_on_every_machine(repository, capsys):
    """The script that pip installed is no line of the user's: it lies elsewhere on each machine."""
    code = (
        "from torch import nn\n\n\ndef net():\n"
        "    parts = [[nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3)] for _ in range({n})]\n"
        "    norms = [nn.Sequential(*part) for part in parts]\n"
        "    return nn.Sequential(*norms, nn.Conv2d(3, 3, 1))\n"
    )
    run = "code = audited('--format', 'github', *words)"

    def installed(script, *words):
        names = {"audited": audited, "words": words}
        exec(compile(run, script, "exec"), names)
        return names["code"]

    Path("models/net.py").write_text(code.format(n=1))
    assert installed("/one/bin/nhwc", "--update-baseline") == 0
    (known,) = json.loads(Path("known.json").read_text())["findings"]
    assert (known["file"], known["code"]) == ("", "0.1")
    assert installed("/other/bin/nhwc", *LOST) == 0

    Path("models/net.py").write_text(code.format(n=2))
    capsys.readouterr()
    assert installed("/other/bin/nhwc", *LOST) == 1
    said = capsys.readouterr().out
    assert said.startswith("::error file=models/net.py,line=4,")
    assert "in 1.1." in said
    assert "/bin/nhwc" not in said


def test_the_same_code_in_two_lines_counts_twice(repository, capsys):
    write(NORM)
    assert audited("--update-baseline") == 0
    write(f"{AGAIN}{NORM}")
    capsys.readouterr()
    assert audited(*LOST) == 1
    assert "1 new finding, 1 known, 0 stale" in capsys.readouterr().out
    assert audited("--update-baseline") == 0
    assert audited(*LOST) == 0


def test_what_vanished_is_stale_and_fails_nothing(repository, capsys):
    write(NORM)
    assert audited("--update-baseline") == 0
    write("x = x.relu()")
    capsys.readouterr()
    assert audited(*LOST) == 0
    out = capsys.readouterr().out
    assert "baseline known.json: 0 new findings, 0 known, 1 stale" in out
    assert f"stale  lost torch.nn.functional.instance_norm  models/net.py  {NORM}" in out
    assert "--update-baseline" in out
    assert audited("--update-baseline") == 0
    assert load_baseline(Path("known.json")) == Baseline()


def test_one_file_serves_several_models(repository, capsys):
    write(NORM)
    other = Path("models/other.py")
    other.write_text(NET.format(body=NORM))
    assert audited("--update-baseline") == 0
    assert audited(*LOST, model="models/other.py:net") == 1
    assert "1 new finding, 0 known, 0 stale" in capsys.readouterr().out
    assert audited("--update-baseline", model="models/other.py:net") == 0
    assert {entry.model for entry in load_baseline(Path("known.json")).known} == {
        "models/net.py:net",
        "models/other.py:net",
    }
    assert audited(*LOST) == 0


def test_json_tells_new_from_known(repository, capsys):
    write(NORM)
    assert audited("--update-baseline", "-q", "--format", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["baseline"] == {"file": "known.json", "new": [], "stale": []}
    assert data["findings"][0]["kind"] == "lost"


def test_a_baseline_that_cannot_be_used_is_told_before_the_work(repository, monkeypatch, capsys):
    write(NORM)
    monkeypatch.setattr("nhwc.cli.audit.build", lambda args: pytest.fail("the work has begun"))

    def refused(*rest, model="models/net.py:net"):
        assert audited(*rest, model=model) == 2
        return capsys.readouterr().err

    assert "no such baseline of nhwc audit: known.json. Write it with" in refused()
    Path("known.json").write_text("{}")
    assert "is no baseline of nhwc audit" in refused()
    assert "is what the command reads" in refused("-o", "known.json")
    assert "two outputs" in refused("-o", "known.json", "--update-baseline")
    assert main(["audit", "resnet18", "--update-baseline"]) == 2
    assert "--update-baseline needs the file" in capsys.readouterr().err


ENTRY = vars(Known("net", "lost", "torch.cat", "net.py", "cat"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff", "is no JSON"),
        ({"kind": "bench"}, "is no baseline"),
        ({"schema": 9}, "has schema 9; this nhwc reads 1"),
        ({"findings": 3}, "is damaged"),
        ({"findings": [3]}, "is damaged"),
        ({"findings": [{"model": "net"}]}, "is damaged"),
        ({"findings": [ENTRY | {"file": 3}]}, "file is 3, not str"),
    ],
)
def test_a_damaged_file_is_refused(data, says, tmp_path):
    path = tmp_path / "known.json"
    whole = {"schema": 1, "kind": "nhwc audit baseline", "findings": []}
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(whole | data).encode())
    with pytest.raises(NhwcError, match=says):
        load_baseline(path)
    with pytest.raises(InputError, match="cannot read"):
        load_baseline(tmp_path)


def test_the_file_reads_well_and_back(tmp_path):
    known = tuple(Known("net", "lost", f"torch.{name}", "é.py", '"x"') for name in ("cat", "add"))
    text = Baseline(known).to_json()
    assert [line for line in text.splitlines() if '"torch.add"' in line]
    assert len(text.splitlines()) == 4
    path = tmp_path / "known.json"
    path.write_text(text, encoding="utf-8")
    assert load_baseline(path) == Baseline(tuple(sorted(known)))


def test_paths_begin_where_the_repository_does(tmp_path):
    (tmp_path / ".git").write_text("gitdir: elsewhere")  # A worktree has a file there.
    inner = tmp_path / "models"
    inner.mkdir()
    assert repository_root(inner) == tmp_path
    assert path_from(tmp_path, str(inner / "net.py")) == "models/net.py"
    assert named_from(tmp_path, str(inner / "net.py:build")) == "models/net.py:build"
    assert named_from(tmp_path, "timm:resnet18") == "timm:resnet18"
    packaged = tmp_path / ".venv" / "lib" / "site-packages" / "timm" / "net.py"
    assert path_from(tmp_path, str(packaged)) == "timm/net.py"
