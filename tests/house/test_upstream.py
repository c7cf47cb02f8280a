"""Pages of bugs of torch: each program runs, and says of this torch what the table says."""

import contextlib
import faulthandler
import io
import multiprocessing
import sys

import pytest
import torch
from benchmarks import upstream

ALONE = {"fork-hang", "strided-1x1-overrun"}
"""Shown by waiting, or by what else lies in memory: the script runs each in a fresh process."""


def _run(path):
    """Run a program in a fork of this process, which has torch already and may die."""
    context = multiprocessing.get_context("fork")
    hear, tell = context.Pipe(duplex=False)

    def work():
        faulthandler.disable()  # A crash is what some pages show.
        torch.set_num_threads(1)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(upstream.program(path), str(path), "exec"), {"__name__": "page"})
        tell.send(output.getvalue())

    child = context.Process(target=work)
    child.start()
    child.join()
    return upstream.said(hear.recv() if hear.poll() else "", child.exitcode)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.filterwarnings("ignore")  # torch warns of resizing and of its own modules
@pytest.mark.parametrize(
    "path",
    [path for path in upstream.pages() if path.stem not in ALONE],
    ids=lambda path: path.stem,
)
def test_a_page_says_what_this_torch_does(path):
    word = _run(path).partition(":")[0]
    assert word in ("right", "wrong")
    known = upstream.recorded().get(torch.__version__.partition("+")[0], {})
    assert known.get(path.stem, word) == word
