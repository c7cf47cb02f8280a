import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import nhwc
from nhwc import _public
from nhwc.cli import VERBS, main
from nhwc.cli.common import parse_shape
from nhwc.cli.outputs import write_file
from nhwc.cli.progress import put, say
from nhwc.kernels.language.isa import ALL as ISAS

from ..made_up import one


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
        "def half():\n"
        "    return clean().half()\n"
        "def broken():\n"
        "    return nn.Conv2d(5, 8, 3)\n"
        "def nothing():\n"
        "    return 3\n"
        "class Prints(nn.Module):\n"
        "    def forward(self, x):\n"
        "        print('not our data')\n"
        "        return x + 1\n"
        "class Exits(nn.Module):\n"
        "    def forward(self, x):\n"
        "        raise SystemExit(3)\n"
        "def imports_its_neighbour():\n"
        "    import neighbour\n"
        "    return neighbour.net()\n"
        "class Interrupted(nn.Module):\n"
        "    def forward(self, x):\n"
        "        import signal\n"
        "        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
        "        raise KeyboardInterrupt\n"
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


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_name_that_the_locale_cannot_spell_is_escaped(model_file, encoding):
    file = model_file.with_name("nétz→.py")
    file.write_text(model_file.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "nhwc", *audit_line(file, "clean")],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    shown = "n\\xe9tz\\u2192.py" if encoding == "ascii" else "nétz\\u2192.py"
    assert shown in done.stdout.decode(encoding)


@pytest.mark.parametrize(("name", "write"), [("stdout", put), ("stderr", say)])
def test_what_we_draw_is_drawn_in_any_locale(name, write, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", newline="\n")
    monkeypatch.setattr(sys, name, stream)
    write("█░ 1.00x  ·⋯ →\n")
    assert stream.buffer.getvalue() == b"#- 1.00x  .~ \\u2192\n"


@pytest.mark.parametrize(
    ("format", "within"), [("html", 'content: "✕ "'), ("junit", "nétz→.py:lossy")]
)
def test_a_document_that_says_utf_8_is_utf_8_in_any_locale(model_file, format, within):
    file = model_file.with_name("nétz→.py")
    file.write_text(model_file.read_text())
    done = subprocess.run(
        [sys.executable, "-m", "nhwc", *audit_line(file, "lossy", "--format", format)],
        capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert done.returncode == 0
    assert within in done.stdout.decode("utf-8")


@pytest.mark.parametrize("line", ["audit", "optimize", "bench --variants channels_last"])
def test_a_half_model_is_given_half_inputs(line, model_file, capsys):
    verb, *rest = line.split()
    assert main([verb, f"{model_file}:half", "--input", "2x3x8x8", *rest, "-q"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_a_name_with_an_end_of_line_stays_in_one(model_file, capsys):
    file = model_file.with_name("of\nme.py")
    own = "class Own(nn.Module):\n    def forward(self, x):\n        return x.tril()\n"
    file.write_text(model_file.read_text() + own)
    assert main(audit_line(file, "Own")) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{file}:Own".replace("\n", r"\n"))
    assert out.count(r"of\nme.py:") == 2


def test_a_dash_is_standard_output(model_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(audit_line(model_file, "clean", "-o", "-")) == 0
    assert capsys.readouterr().out.startswith(f"{model_file}:clean")
    assert not Path("-").exists()


def test_json(model_file, capsys):
    assert main(audit_line(model_file, "lossy", "--format", "json", "--backward")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["findings"][0]["kind"] == "lost"
    assert any(call["backward"] for call in data["calls"])


@pytest.mark.parametrize("name", ["page.html", "PAGE.HTM"])
def test_the_format_follows_the_ending(name, model_file, tmp_path, capsys):
    page = tmp_path / name
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
        (["audit", "resnet18", "--input", "16"], "has 1 dimension;"),
        (
            ["audit", "r3d_18"],
            "default one, 1x3x224x224: give another with --input, 1x3x16x112x112",
        ),
        (["audit", "resnet18", "--input", "0x3x224x224"], "is empty: a dimension is 0"),
        (["audit", "resnet18", "--input", "big"], "'big' is no shape"),
        (["audit", "resnet18", "--device", "abacus"], ". Take another, as cpu."),
        (["audit", "resnet18", "--weights", "none.pt"], "no such weights file: none.pt"),
        (["audit", "resnet18", "--format", "xml"], "invalid choice: 'xml'"),
        (
            ["audit", "resnet18", "-o", "/no/such/folder/x.json"],
            "cannot write /no/such/folder/x.json",
        ),
        (["audit", "resnet18", "-o", "x.csv"], "-o x.csv asks for csv, which is not written here"),
        (["ops", "--rules", "-o", "x.pdf"], "-o x.pdf asks for pdf, which is not written here"),
        (["bench", "resnet18", "-o", "x.svg"], "There are: text, json, csv, html."),
        (["audit"], "the following arguments are required: MODEL"),
        (["polish"], "there is no verb 'polish'. There are: audit, optimize"),
        (["audi", "resnet18"], "there is no verb 'audi'; did you mean audit?"),
        (["-q", "optimise", "resnet18"], "there is no verb 'optimise'; did you mean optimize?"),
        (["--completion", "tcsh"], "invalid choice: 'tcsh'"),
        (["audit", "resnet18", "--seed", "-1"], "argument --seed: -1 is too small"),
        (["audit", "resnet18", "--seed", "x"], "argument --seed: 'x' is no whole number"),
        (["audit", "resnet18", "--seed", "9" * 25], "is too large"),
        (["audit", "resnet18", "--input", "1x3x99999999x99999999"], "GB of memory. Use a smaller"),
        (["audit", "resnet18", "--input", "1x3x8x8", "--input", "9" * 29], "GB of memory"),
        (["audit", "resnet18", "--input", "1x" * 99 + "1"], "is no shape"),
        (["optimize", "resnet18", "--also", "1x3x99999999x99999999"], "GB of memory"),
        (["ops", "relu", "--input", "2x3x8x8"], "--input goes with an operator of your own"),
        (["ops", "--rules", "relu"], "relu does not go with --rules. Leave one of them out"),
        (["ops", "--diff", "a.json", "b.json", "--only", "x"], "--only does not go with --diff"),
        (["ops", "relu", "--dtype", "strided"], "torch has no dtype 'strided'"),
        (["bench", "resnet18", "--engines"], "resnet18 does not go with --engines"),
        (["bench", "--compare", "a.json", "b.json", "--suite", "blog"], "--suite does not go with"),
        (["bench", "resnet18", "--fail-on", "slower"], "goes with --compare OLD NEW"),
        (["bench", "resnet18", "--variants", ","], "no variant is named. There are: eager"),
        (["bench", "resnet18", "--batch", "99999999999999"], "has a number above"),
        (["bench", "resnet18", "--batch", "1000000"], "GB of memory"),
        (["bench", "resnet18", "--threads", "1000000"], "has a number above 1024"),
        (["bench", "resnet18", "--seconds", "0"], "argument --seconds: 0.0 is too small"),
        (["bench", "resnet18", "--seconds", "nan"], "argument --seconds: 'nan' is no number"),
        (["bench", "resnet18", "--seconds", "inf"], "argument --seconds: inf is too large"),
        (["train", "--synthetic", "--channels-last", "maybe"], "'maybe' is neither true nor false"),
        (["train", "--synthetic", "-o", "-"], "cannot write -, which stands for standard output"),
        (["optimize", "resnet18", "-o", "-"], "cannot write -, which stands for standard output"),
        (["train", "--synthetic", "--workers", "99999"], "argument --workers: 99999 is too large"),
        (["train", "--synthetic", "--classes", "0"], "argument --classes: 0 is too small"),
        (["train", "--synthetic", "--classes", "9" * 12], "is too large"),
        (["train", "--synthetic", "-b", "0"], "is too small"),
        (["train", "--synthetic", "-b", "100000", "--size", "99999"], "GB of memory"),
        (["train", "--synthetic", "--max-batches", "9" * 18], "is too large"),
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


@pytest.mark.parametrize("verb", ["audit", "optimize"])
def test_what_a_model_prints_is_none_of_our_data(verb, model_file, capsys):
    line = [verb, *audit_line(model_file, "Prints", "--format", "json")[1:]]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == 1
    assert "not our data" in err


def test_a_builder_may_import_its_neighbours(model_file, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "from torch import nn\ndef net():\n    return nn.Conv2d(3, 4, 1)\n"
    model_file.with_name("neighbour.py").write_text(code)
    assert main(audit_line(model_file, "imports_its_neighbour")) == 0
    assert "1 operator" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x" * 5000, f"{'x' * 5000}.py:net"])
def test_names_longer_than_a_file_may_have(name, capsys):
    assert main(["audit", name]) == 2
    assert "is longer than a name of a file may be. Shorten it." in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["sarif", "html", "json", "xml"])
def test_names_of_files_that_are_no_text(ending, model_file, tmp_path):
    strange = model_file.rename(tmp_path / os.fsdecode(b"bad\xff.py"))
    path = tmp_path / f"out.{ending}"
    baseline = tmp_path / "known.json"
    known = ["--baseline", str(baseline), "--update-baseline"]
    assert main([*audit_line(strange, "lossy"), "-o", str(path), *known]) == 0
    assert "instance_norm" in path.read_text()
    assert "instance_norm" in baseline.read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "raised RuntimeError"),
        ("nothing", "int"),
        ("Exits", "the model's code ended the program (sys.exit(3)) when it was run"),
    ],
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


def test_debug_shows_the_traceback(capsys):
    assert main(["audit", "resnet18", "--input", "3x4", "--debug"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "InputError: input 3x4 has 2 dimensions" in err


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "error: out of memory: MemoryError. Use a smaller input, batch or model."),
        (
            RuntimeError("[alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 9 bytes\nat"),
            "error: out of memory: [alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 9",
        ),
        (
            RuntimeError("numel: integer multiplication overflow"),
            "error: out of memory: numel: integer multiplication overflow",
        ),
        (KeyError("x"), "error: KeyError: 'x'. This was not foreseen; --debug shows where"),
        (
            PermissionError(13, "Permission denied", "locked/x.json"),
            "error: locked/x.json may not be looked at here. Change its rights, or name another.",
        ),
    ],
)
def test_what_nobody_foresaw_is_no_verdict(error, says, monkeypatch, capsys):
    """Exit status 1 would tell a user's CI that the format is lost."""

    def fails(*args, **kwargs):
        raise error

    monkeypatch.setattr("nhwc.cli.audit.audit", fails)
    assert main(["audit", "squeezenet1_1", "--input", "1x3x32x32", "--fail-on", "lost"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(says)
    assert err.count("\n") == 1


def test_bare_nhwc_shows_the_help(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: nhwc")
    assert all(verb in out for verb in VERBS)
    assert err == ""


def test_the_version_names_torch_and_the_processor(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    here = nhwc.Environment.here()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"nhwc {nhwc.__version__}; {here}"
    found = {line.split()[0]: line.split(maxsplit=1)[1] for line in rest}
    assert list(found) == ["python", "kernels", "models", "engines", "cache"]
    assert found["kernels"].partition(",")[0] in [isa.name for isa in ISAS]
    assert f"numpy {numpy.__version__}" in found["python"]
    assert torch.__version__ in str(here)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_quiet_says_nothing_but_errors(place, model_file, tmp_path, capsys):
    page = tmp_path / "page.html"
    line = audit_line(model_file, "lossy", "-o", str(page))
    assert main(["-q", *line] if place == "before" else [*line, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert page.exists()
    assert main(["-q", "audit", "resnet5"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert main(["-q", *audit_line(model_file, "Prints")]) == 0
    assert capsys.readouterr().err == ""
    # What one command was told does not hold for the next.
    assert main(line) == 0
    assert capsys.readouterr().err == f"wrote {page}\n"


def test_the_module_and_help(tmp_path):
    help_text = subprocess.run(
        [sys.executable, "-m", "nhwc", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(verb in help_text for verb in VERBS)


@pytest.mark.parametrize("words", [["audit"], ["--help"], ["--completion", "fish"]])
def test_a_closed_pipe_is_quiet(words, model_file):
    words = audit_line(model_file, "lossy") if words == ["audit"] else words
    line = " ".join([sys.executable, "-m", "nhwc", *words])
    # The reader is gone before anything is written, however fast or slow the writer is.
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{line} | true"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr == ""


def test_a_verdict_is_told_though_the_reader_has_gone(model_file):
    words = [*audit_line(model_file, "lossy"), "--fail-on", "lost"]
    line = " ".join([sys.executable, "-m", "nhwc", *words])
    done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{line} | true"], check=False)
    assert done.returncode == 1


DEADLY = """
import os
import torch


def deadly(x):
    os.abort()


class Net(torch.nn.Module):
    def forward(self, x):
        return deadly(x)
"""


@pytest.mark.parametrize("words", [["ops", "{}:deadly"], ["audit", "{}:Net"]])
def test_of_code_that_kills_the_process_the_line_is_said(words, tmp_path):
    (tmp_path / "own.py").write_text(DEADLY)
    given = [word.format(tmp_path / "own.py") for word in words]
    done = subprocess.run([sys.executable, "-m", "nhwc", *given], capture_output=True, text=True)
    assert done.returncode == -signal.SIGABRT
    assert 'own.py", line 7 in deadly' in done.stderr


LATE = """
import signal, sys, os
class Late:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Late())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from nhwc.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("name", ["nhwc.cli", "nhwc.errors", "torch", "torch._C", "torch.fx"])
def test_ctrl_c_during_the_imports_is_one_line(name):
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(name=name), "audit", "resnet18"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_ctrl_c_is_as_it_was_once_the_work_begins(model_file, capsys):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(audit_line(model_file, "Interrupted")) == 130
        assert capsys.readouterr() == ("", "True\ninterrupted\n")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)  # a shell's background job ignores it


def completed(script, *words):
    """What bash offers for the last of `words`."""
    line = f"""{script}
COMP_WORDS=({" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; _nhwc
echo "${{COMPREPLY[*]}}" """
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_completion_offers_verbs_options_and_choices(capsys):
    assert main(["--completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "nhwc", "") == list(VERBS)
    assert completed(script, "nhwc", "o") == ["optimize", "ops"]
    assert completed(script, "nhwc", "--v") == ["--version"]
    assert completed(script, "nhwc", "audit", "--fail") == ["--fail-on"]
    assert completed(script, "nhwc", "-q", "audit", "--fail-on", "") == ["lost", "copies", "slower"]
    assert completed(script, "nhwc", "audit", "--format", "=", "te") == ["text"]
    assert completed(script, "nhwc", "audit", "--fail-on", "=") == ["lost", "copies", "slower"]
    # With another COMP_WORDBREAKS than bash's own the word stays whole.
    assert completed(script, "nhwc", "audit", "--format=te") == ["--format=text"]
    assert "--format=sarif" in completed(script, "nhwc", "audit", "--format=")
    assert completed(script, "nhwc", "audit", "--input=1x") == []
    assert "--channels-last" in completed(script, "nhwc", "train", "data", "--c")
    assert completed(script, "nhwc", "bench", "--variants", "channels_last") == ["channels_last"]
    assert completed(script, "nhwc", "bench", "--variants", "eager,opt") == ["eager,optimized"]
    assert completed(script, "nhwc", "bench", "--variants", "=", "eager,al") == ["eager,all"]
    assert "--variants=jit,eager" in completed(script, "nhwc", "bench", "--variants=jit,")
    # A model or a file: the shell's own completion of paths takes over.
    assert completed(script, "nhwc", "audit", "res") == []

    assert main(["--completion", "zsh"]) == 0
    assert capsys.readouterr().out.endswith(script)
    assert main(["--completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("complete -c nhwc ") for line in lines)
    assert any("-l fail-on -x -a 'lost copies slower'" in line for line in lines)
    assert any("-l variants -x -a '(__fish_append , eager " in line for line in lines)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_completion_offers_the_same_in_zsh(capsys):
    main(["--completion", "bash"])
    # What bashcompinit does around the function; its compgen leaves it to zsh to choose by letters.
    script = f"""emulate sh; setopt kshglob noshglob braceexpand
complete() {{ :; }}
compgen() {{ echo "$2"; }}
{capsys.readouterr().out}
COMP_WORDS=(nhwc -q audit --fail-on ""); COMP_CWORD=4; _nhwc; echo "${{COMPREPLY[@]}}"
COMP_WORDS=(nhwc ""); COMP_CWORD=1; _nhwc; echo "${{COMPREPLY[@]}}" """
    done = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["lost copies slower", " ".join(VERBS)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_read_their_scripts(shell, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    main(["--completion", shell])
    script = capsys.readouterr().out
    subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_every_verb_answers_help(capsys):
    for verb in VERBS:
        with pytest.raises(SystemExit) as stop:
            main([verb, "--help"])
        assert stop.value.code == 0
    assert capsys.readouterr().out.count("usage: nhwc") == len(VERBS)


def test_the_command_line_answers_without_torch():
    code = "import sys, nhwc.__main__, nhwc.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_no_names_of_modules():
    """Importing `nhwc.strict` from a module of that name would hide the function."""
    rooms = {path.stem for path in Path(nhwc.__file__).parent.iterdir()}
    assert rooms & set(nhwc.__all__) == set()
    names = {name for name in vars(_public) if not name.startswith(("_", "@"))}
    assert set(nhwc.__all__) == names
    assert names <= set(dir(nhwc))
    with pytest.raises(AttributeError, match="module 'nhwc' has no attribute 'nothing'"):
        _ = nhwc.nothing


def test_an_audit_imports_what_the_model_needs(model_file):
    """torchvision imports torch's compiler, and that sympy: more than half of the whole command."""
    heavy = {"numba", "torchvision", "timm", "matplotlib", "onnxruntime", "openvino", "PIL"}
    heavy |= {"torch._dynamo", "sympy"}
    code = (
        "import sys, nhwc.cli; "
        f"nhwc.cli.main({audit_line(model_file, 'lossy')!r}); "
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_parse_shape_takes_commas_too():
    assert parse_shape("1,3,8,8") == (1, 3, 8, 8)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "result.json"
    write_file(target, b"old")
    with pytest.raises(TypeError):
        write_file(target, "text is no bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    assert [p.name for p in Path(tmp_path).iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    "words",
    [
        ["audit", "{net}:clean", "-o", "{net}"],
        ["audit", "{net}:clean", "-o", "{link}"],
        ["audit", "resnet18", "-o", "{net}"],
        ["optimize", "{net}:clean", "-o", "{net}"],
        ["optimize", "{net}:clean", "--report", "{net}"],
        ["optimize", "{saved}", "-o", "{saved}"],
        ["bench", "{net}:clean", "-o", "{net}"],
        ["bench", "{other}", "-o", "{other}", "--format", "text"],
        ["bench", "--compare", "{other}", "{other}", "-o", "{other}"],
        ["ops", "{net}:clean", "-o", "{net}"],
        ["ops", "--diff", "{other}", "{other}", "-o", "{other}"],
        ["audit", "resnet18", "--weights", "{other}", "-o", "{other}"],
        ["train", "--synthetic", "--weights", "{picture}", "--plot", "{picture}"],
        ["demo", "-o", "{net}"],
    ],
    ids=" ".join,
)
def test_what_a_command_reads_is_not_overwritten(words, model_file, tmp_path, capsys):
    other, link, picture = (tmp_path / name for name in ("other.json", "link.html", "weights.svg"))
    other.write_text("{}")
    picture.write_text("")
    link.symlink_to(model_file)
    before = model_file.read_text()
    saved = shutil.copy(other, tmp_path / "saved.nhwc")
    places = {"net": model_file, "other": other, "link": link, "picture": picture, "saved": saved}
    assert main([word.format(**places) for word in words]) == 2
    err = capsys.readouterr().err
    assert "is what the command reads" in err or "is a Python file" in err
    assert err.count("\n") == 1
    assert (model_file.read_text(), other.read_text()) == (before, "{}")


@pytest.mark.parametrize("words", [["optimize", "-o"], ["optimize", "--report"], ["audit", "-o"]])
def test_weights_of_another_model_are_not_overwritten(words, model_file, tmp_path, capsys):
    weights = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(3)}, weights)
    before = weights.read_bytes()
    verb, option = words
    line = [verb, f"{model_file}:clean", "--input", "1x3x8x8", option, str(weights)]
    assert main(line) == 2
    assert "is a file that torch.save wrote" in capsys.readouterr().err
    assert weights.read_bytes() == before

    # A model that nhwc saved may have such a name, and is replaced.
    nhwc.save(torch.nn.Conv2d(3, 8, 3).eval(), weights)
    assert main(line) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["audit", "resnet18", "-o", "{none}/x.json"], "none is no folder. Make it first."),
        (["audit", "resnet18", "-o", "{folder}"], "it is a folder. Name a file in it."),
        (["optimize", "resnet18", "-o", "{none}/x.nhwc"], "none is no folder. Make it first."),
        (["optimize", "resnet18", "--report", "{none}/x.html"], "none is no folder."),
        (["optimize", "resnet18", "-o", "{folder}/x", "--report", "{folder}/x"], "two outputs"),
        (["bench", "resnet18", "-o", "{none}/x.json"], "none is no folder. Make it first."),
        (["bench", "resnet18", "--plot", "{none}/x.svg"], "none is no folder. Make it first."),
        (["bench", "resnet18", "--plot", "x.pdf"], "x.pdf has no known ending"),
        (["ops", "-o", "{none}/x.json"], "none is no folder. Make it first."),
        (["ops", "--rules", "-o", "{none}/x.json"], "none is no folder. Make it first."),
        (["train", "--synthetic", "-o", "{file}/run"], "file is no folder. Name another."),
        (["train", "--synthetic", "--plot", "{none}/x.svg"], "none is no folder. Make it first."),
        (["demo", "-o", "{none}/x.html"], "none is no folder. Make it first."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_outputs_are_looked_at_before_the_work(words, says, tmp_path, monkeypatch, capsys):
    def works(*args, **kwargs):
        raise AssertionError("the work has begun")

    for verb, doing in (
        *(("audit", "build"), ("optimize", "build"), ("bench", "measure")),
        *(("ops", "ops"), ("ops", "check_rules"), ("train", "load_model"), ("demo", "load_model")),
    ):
        monkeypatch.setattr(f"nhwc.cli.{verb}.{doing}", works)
    (tmp_path / "file").touch()
    places = {"none": tmp_path / "none", "folder": tmp_path, "file": tmp_path / "file"}
    assert main([word.format(**places) for word in words]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", [["bench", "resnet18"], ["train", "--synthetic"]])
def test_a_picture_wants_matplotlib_before_the_work(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*verb, "--plot", str(tmp_path / "x.svg")]) == 2
    said = "error: matplotlib is not installed: pip install 'nhwc[plot]'.\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("model", "absent", "says"),
    [
        ("timm:resnet18", ["timm"], "timm is not installed"),
        ("resnet18", ["torchvision", "timm"], "torchvision is not installed"),
    ],
)
def test_a_missing_extra_is_named_once_before_the_work(model, absent, says, monkeypatch, capsys):
    for package in absent:
        monkeypatch.setitem(sys.modules, package, None)
    assert main(["bench", model]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "pip install 'nhwc[zoo]'" in err
    assert err.count("\n") == 1


def test_engines_that_are_not_installed_are_named_before_the_work(monkeypatch, capsys):
    for package in ("onnxruntime", "openvino"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("nhwc.cli.bench.measure", lambda *args, **kwargs: one())
    assert main(["bench", "resnet18"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("not installed: ONNX Runtime (pip install onnxruntime")
    assert line.endswith("OpenVINO (pip install openvino)")


@pytest.fixture
def full(tmp_path):
    """A result file that cannot be written to."""
    device, path = Path("/dev/full"), tmp_path / "x.json"
    if not device.exists():
        pytest.skip("this system has no device that is always full")
    path.symlink_to(device)
    return str(path)


def test_what_cannot_be_written_is_printed(model_file, full, capsys):
    assert main(audit_line(model_file, "lossy", "-o", full)) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["findings"][0]["kind"] == "lost"
    assert err == f"error: cannot write {full}: No space left on device\n"


def test_a_full_disk_ends_no_measurement(full, monkeypatch, capsys):
    def measured(*args, checkpoint, **kwargs):
        checkpoint(one())
        return one()

    monkeypatch.setattr("nhwc.cli.bench.measure", measured)
    assert main(["bench", "resnet18", "-o", full]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"]
    assert "No space left" in err


def test_what_is_no_plain_file_is_written_to(tmp_path, monkeypatch):
    """`-o /dev/null` must not put a file in the place of the device."""
    target, link = tmp_path / "result.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_file(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, b"said")
    assert os.read(reader, 9) == b"said"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("buffering", [1, -1])
def test_output_that_is_full_is_one_line(monkeypatch, capsys, buffering):
    """A full stdout is an error; a full stderr only takes the words away."""
    table = "docs/operators-torch-2.13-cpu.json"
    with open("/dev/full", "w", buffering) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["ops", "--diff", table, table]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: cannot write to standard output: No space left on device.")
    assert said.count("\n") == 1
    with open("/dev/full", "w", buffering) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["ops", "--diff", table, "none.json"]) == 2


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no terminals")
def test_a_terminal_that_was_closed_ends_no_work():
    """Its lines cannot be written any more, and the model is still to be trained."""
    terminal, end = os.openpty()
    code = "import sys; from nhwc.cli.progress import put; sys.stdin.read(); put('a'); put('b')"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=end, stderr=subprocess.PIPE
    ) as process:
        os.close(end)
        os.close(terminal)
        assert process.communicate() == (None, b"")
    assert process.returncode == 0


@pytest.mark.parametrize(("term", "escapes"), [("xterm", True), ("dumb", False)])
def test_a_dumb_terminal_is_sent_no_escapes(model_file, monkeypatch, capsys, term, escapes):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", term)
    assert main(["optimize", f"{model_file}:clean", "--input", "1x3x8x8"]) == 0
    out, err = capsys.readouterr()
    assert ("\x1b" in out, "\x1b" in err) == (escapes, escapes)


def test_an_impatient_ctrl_c_brings_no_traceback():
    """The first one has been heard; the second comes while the interpreter exits."""
    code = (
        "import atexit, signal, sys, nhwc.cli, nhwc.__main__;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "atexit.register(signal.raise_signal, signal.SIGINT);"
        "nhwc.cli.main = lambda: 130;"
        "sys.exit(nhwc.__main__.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_streams_that_were_closed_lead_nowhere():
    """Else the next file to be opened would be number 1, and get what is printed."""
    code = (
        "import sys, os, nhwc.__main__ as start;"
        "start._open_closed_streams();"
        "print('out'); print('err', file=sys.stderr);"
        "assert os.open(os.devnull, os.O_WRONLY) > 2"
    )
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" <&- >&- 2>&-'])
    assert done.returncode == 0
