import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nhwc.cli import VERBS, main
from nhwc.cli.common import parse_shape, write_file
from nhwc.errors import InputError


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "def lossy():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3))\n"
        "def clean():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())\n"
        "def broken():\n"
        "    return nn.Conv2d(5, 8, 3)\n"
        "def nothing():\n"
        "    return 3\n"
    )
    return path


def audit_line(path, name, *rest):
    return ["audit", f"{path}:{name}", "--input", "2x3x8x8", *rest]


def test_text_goes_to_stdout_and_nothing_else(model_file, capfd):
    assert main(audit_line(model_file, "lossy")) == 0
    out, err = capfd.readouterr()
    assert "LOST        torch.nn.functional.instance_norm" in out
    assert "nets.py:" not in err
    assert "\033" not in out


def test_json(model_file, capsys):
    assert main(audit_line(model_file, "lossy", "--format", "json", "--backward")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["findings"][0]["kind"] == "lost"
    assert any(call["backward"] for call in data["calls"])


def test_the_format_follows_the_ending(model_file, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(audit_line(model_file, "lossy", "-o", str(page))) == 0
    assert page.read_text().startswith("<!doctype html>")
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"wrote {page}\n")


@pytest.mark.parametrize(
    ("name", "what", "status"),
    [("lossy", "lost", 1), ("clean", "lost", 0), ("lossy", "copies", 1), ("clean", "copies", 0)],
)
def test_fail_on(model_file, capsys, name, what, status):
    assert main(audit_line(model_file, name, "--fail-on", what)) == status


def test_fail_on_slower_compares(model_file, capsys):
    assert main(audit_line(model_file, "clean", "--fail-on", "slower")) in (0, 1)
    assert "channels last against contiguous" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["audit", "resnet5"],
            "no model named 'resnet5': torchvision has no 'resnet5'; did you mean",
        ),
        (["audit", "timm:nothing_like_it"], "timm has no"),
        (["audit", "no/such/file.py:net"], "no such file: no/such/file.py"),
        (["audit", "no.such.module:net"], "cannot import 'no.such.module'"),
        (["audit", "torch.nn:Nothing"], "has no callable 'Nothing'"),
        (["audit", "resnet18", "--input", "3x224x224"], "has 3 dimensions; a vision model needs 4"),
        (["audit", "resnet18", "--input", "0x3x224x224"], "is empty: a dimension is 0"),
        (["audit", "resnet18", "--input", "big"], "'big' is no shape"),
        (["audit", "resnet18", "--device", "abacus"], "device 'abacus' is not usable here"),
        (["audit", "resnet18", "--weights", "none.pt"], "no such weights file: none.pt"),
        (["audit", "resnet18", "--format", "xml"], "invalid choice: 'xml'"),
        (
            ["audit", "resnet18", "-o", "/no/such/folder/x.json"],
            "cannot write /no/such/folder/x.json",
        ),
        (["audit"], "the following arguments are required: MODEL"),
        ([], "the following arguments are required: VERB"),
        (["polish"], "invalid choice: 'polish'"),
    ],
)
def test_bad_input_gets_one_line_and_exit_2(line, message, capsys):
    line = line + (["--input", "1x3x32x32"] if "/no/such/folder/x.json" in line else [])
    assert main(line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("name", "message"), [("broken", "raised RuntimeError"), ("nothing", "int")]
)
def test_a_model_that_fails(model_file, capsys, name, message):
    assert main(audit_line(model_file, name)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_weights_that_are_pickled_code_are_refused(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (os.system, ("true",))

    torch.save({"x": Evil()}, tmp_path / "evil.pt")
    assert main(["audit", "squeezenet1_1", "--weights", str(tmp_path / "evil.pt")]) == 2
    assert "is no file of plain tensors" in capsys.readouterr().err


def test_an_unknown_option_names_the_help_of_its_verb(capsys):
    assert main(["train", "--input-size"]) == 2
    message = "error: unrecognized arguments: --input-size. See nhwc train --help.\n"
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback():
    with pytest.raises(InputError):
        main(["audit", "resnet18", "--input", "3x4", "--debug"])


def test_the_module_and_help(tmp_path):
    help_text = subprocess.run(
        [sys.executable, "-m", "nhwc", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(verb in help_text for verb in VERBS)


def test_a_closed_pipe_is_quiet(model_file):
    line = " ".join([sys.executable, "-m", "nhwc", *audit_line(model_file, "lossy")])
    done = subprocess.run(
        ["bash", "-c", f"{line} | head -1"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_every_verb_answers_help(capsys):
    for verb in VERBS:
        with pytest.raises(SystemExit) as stop:
            main([verb, "--help"])
        assert stop.value.code == 0
    assert capsys.readouterr().out.count("usage: nhwc") == len(VERBS)


def test_optional_packages_stay_unimported():
    code = (
        "import sys, nhwc, nhwc.cli; "
        "heavy = {'numba', 'torchvision', 'timm', 'matplotlib', 'onnxruntime', 'openvino', 'PIL'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_parse_shape_takes_commas_too():
    assert parse_shape("1,3,8,8") == (1, 3, 8, 8)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "result.json"
    write_file(target, b"old")
    with pytest.raises(TypeError):
        write_file(target, "text is no bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    assert [p.name for p in Path(tmp_path).iterdir()] == ["result.json"]
