"""Who may import whom: the floors of the package, of its graphs and kernels, the lowest first."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import nhwc

from .house import House

ROOT = Path(nhwc.__file__).parent

PACKAGE = House(
    ROOT,
    "nhwc",
    (
        ("displayed", "errors", "operators", "shown", "version"),
        ("machine",),
        ("models",),
        ("formats",),
        ("pictures",),
        ("kernels",),
        ("verify",),
        ("graph",),
        ("passes", "plan"),
        ("optimized",),
        ("files", "watch"),
        ("zoo",),
        ("_audit", "_bench", "_fuse", "_ops", "_optimize", "_train"),
        ("_compile",),
        ("render",),
        ("_public",),
        ("__init__",),
        ("cli", "notebook", "testing", "trainers", "training"),
        ("__main__", "pytest_plugin"),
    ),
    # An engine of ours is timed as users call it.
    visitors=frozenset({"_bench"}),
)

KERNELS = House(
    ROOT / "kernels",
    "nhwc.kernels",
    (
        ("language",),
        ("tape",),
        ("product",),
        ("layers",),
        ("convolutions",),
        ("operators", "programs"),
        ("__init__",),
    ),
)

GRAPHS = House(
    ROOT / "graph",
    "nhwc.graph",
    (
        ("plain", "report"),
        ("modules",),
        ("code",),
        ("nodes",),
        ("effects",),
        ("tracing",),
        ("__init__",),
    ),
)

HOUSES = pytest.mark.parametrize(
    "house", [PACKAGE, KERNELS, GRAPHS], ids=lambda house: house.package
)


@HOUSES
def test_every_room_has_one_floor(house):
    assert sorted(room for floor in house.floors for room in floor) == sorted(house.rooms())


@HOUSES
def test_rooms_import_only_what_stands_below(house):
    assert house.upward() == []


@HOUSES
def test_no_files_import_one_another_in_a_circle(house):
    assert house.circle() == []


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    copy = tmp_path_factory.mktemp("planted") / "nhwc"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__", "templates"))
    return copy


@pytest.fixture
def plant(copied):
    """Adds a line to a file of a copy of the package, and takes it out again."""
    before = {}

    def add(file, line):
        before[copied / file] = (copied / file).read_text()
        (copied / file).write_text(before[copied / file] + f"\n\n{line}\n")
        return copied

    yield add
    for file, text in before.items():
        file.write_text(text)


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("kernels/layers/linear.py", "from ...plan import specs", "nhwc.plan.specs"),
        ("_ops/table.py", "from ..cli import main", "nhwc.cli"),
        ("_audit/strict.py", "from .._optimize import optimize", "nhwc._optimize"),
        ("plan/specs.py", "def f():\n    import nhwc.render.text", "nhwc.render.text"),
        ("machine/timing.py", "from ..models import trees", "nhwc.models.trees"),
        ("verify/luck.py", "import nhwc", "nhwc"),
        ("_bench/paired.py", "import nhwc", "nhwc"),
    ],
)
def test_a_planted_import_is_found(plant, file, line, wrong):
    house = replace(PACKAGE, root=plant(file, line))
    module = "nhwc." + file.removesuffix(".py").replace("/", ".")
    assert house.upward() == [f"{module} imports {wrong}, which stands no lower"]


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("language/loops.py", "from ..tape import steps", "nhwc.kernels.tape.steps"),
        ("tape/steps.py", "import nhwc.kernels.product.rows", "nhwc.kernels.product.rows"),
        ("programs/bound.py", "from ..operators.conv2d import conv2d", "operators.conv2d"),
        ("layers/linear.py", "def f():\n    from .. import available", "nhwc.kernels"),
    ],
)
def test_a_planted_import_among_kernels_is_found(plant, file, line, wrong):
    (found,) = replace(KERNELS, root=plant(f"kernels/{file}", line) / "kernels").upward()
    assert wrong in found


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("nodes/edit.py", "from ..tracing import traced", "nhwc.graph.tracing.traced"),
        ("code/asks.py", "from ..nodes.shapes import is_size", "nhwc.graph.nodes.shapes"),
        ("effects/kept.py", "def f():\n    from .. import capture", "nhwc.graph"),
    ],
)
def test_a_planted_import_among_graphs_is_found(plant, file, line, wrong):
    (found,) = replace(GRAPHS, root=plant(f"graph/{file}", line) / "graph").upward()
    assert wrong in found


def test_a_planted_circle_is_found(plant):
    copy = plant("kernels/tape/arena.py", "def f():\n    from .steps import View")
    assert replace(KERNELS, root=copy / "kernels").circle() == []
    plant("kernels/tape/steps.py", "if TYPE_CHECKING:\n    from .arena import Lifetime")
    names = {name.rpartition(".")[2] for name in replace(KERNELS, root=copy / "kernels").circle()}
    assert names == {"arena", "steps"}


def test_a_room_without_a_floor_is_found(plant, copied):
    (copied / "attic.py").write_text("")
    try:
        assert "attic" in replace(PACKAGE, root=copied).rooms()
    finally:
        (copied / "attic.py").unlink()


def test_modules_for_users_need_no_import_of_their_own():
    code = "import nhwc; nhwc.training.Recipe; nhwc.testing.assert_keeps_format; nhwc.trainers"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_is_sorted_and_complete():
    assert nhwc.__all__ == sorted(nhwc.__all__)
    assert all(hasattr(nhwc, name) for name in nhwc.__all__)
