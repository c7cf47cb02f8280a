"""Write docs/notebook.ipynb, with what its cells show: python -m benchmarks.notebook

Wants nbclient and ipykernel.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "docs" / "notebook.ipynb"

CELLS = (
    (
        "markdown",
        "# nhwc in a notebook\n"
        "\n"
        "Results show themselves: the page that the command line writes, in a frame of its own, "
        "light or dark as the notebook is. On GitHub, and in a notebook that is not trusted yet, "
        "they are text.",
    ),
    (
        "code",
        "import torch\n"
        "from torch import nn\n"
        "\n"
        "import nhwc\n"
        "from nhwc.notebook import Bar\n"
        "\n"
        "\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.stem = nn.Conv2d(3, 16, 3, padding=1)\n"
        "        self.norm = nn.InstanceNorm2d(16)\n"
        "        self.branch = nn.Sequential("
        "nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())\n"
        "        self.head = nn.Conv2d(32, 10, 1)\n"
        "\n"
        "    def forward(self, x):\n"
        "        x = self.norm(self.stem(x))\n"
        "        x = torch.cat((x, self.branch(x)), dim=1)\n"
        "        return self.head(x).mean((2, 3))\n"
        "\n"
        "\n"
        "net = Net().eval()\n"
        "x = torch.rand(1, 3, 64, 64)",
    ),
    (
        "markdown",
        "## Where is channels last lost, what does it cost, what do I change?\n"
        "\n"
        "Click on an operator, or on a finding.",
    ),
    ("code", "nhwc.audit(net, x)"),
    (
        "markdown",
        "## The same answers, as fast as this machine can\n"
        "\n"
        "`Bar` shows how far a verb is; it goes when the work is done.",
    ),
    (
        "code",
        "with Bar() as bar:\n    fast = nhwc.optimize(net, x, progress=bar)\n\nfast.report",
    ),
    (
        "markdown",
        "## Side by side\n\nEach variant runs in a process of its own, and they take turns.",
    ),
    (
        "code",
        "with Bar() as bar:\n"
        "    times = nhwc.bench(\n"
        '        "squeezenet1_1",\n'
        "        shape=(1, 3, 64, 64),\n"
        '        variants=("eager", "channels_last", "fused"),\n'
        "        seconds=0.5,\n"
        "        progress=bar,\n"
        "    )\n"
        "\n"
        "times",
    ),
    ("markdown", "## Which operators of my torch keep it?"),
    (
        "code",
        "with Bar() as bar:\n"
        '    table = nhwc.ops("instance_norm", "group_norm", '
        'dtypes=("float32",), timed=False, progress=bar)\n'
        "\n"
        "table",
    ),
)
"""The kind and the source of each cell."""


def notebook() -> dict[str, Any]:
    """The notebook as it is before it is run."""
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"language_info": {"name": "python"}},
        "cells": [_cell(number, kind, source) for number, (kind, source) in enumerate(CELLS)],
    }


def _cell(number: int, kind: str, source: str) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"id": f"cell-{number}", "cell_type": kind, "metadata": {}, "source": source, **code}


def main() -> None:
    """Run the cells in a kernel, and write the notebook with their outputs."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.from_dict(notebook())
    NotebookClient(book, timeout=600, kernel_name="python3", record_timing=False).execute()
    nbformat.validate(book)
    book.metadata.pop("kernelspec", None)
    book.metadata.language_info = {"name": "python"}
    for cell in book.cells:
        # A bar that has gone leaves an empty output.
        cell["outputs"] = [one for one in cell.get("outputs", ()) if one.get("data") != {}]
        if cell.cell_type != "code":
            del cell["outputs"]
    text = nbformat.writes(book) + "\n"
    # The kernel keeps cells under names of files that lie nowhere, with a number of its process.
    PATH.write_text(re.sub(r"[^\s\"';&]*ipykernel_\d+/\d+\.py", "cell.py", text))
    print(f"wrote {PATH}, {PATH.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
