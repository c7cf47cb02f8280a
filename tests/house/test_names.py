"""One word means one thing: no two rooms, nor two floors of the kernels, name a class alike."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import nhwc

ROOT = Path(nhwc.__file__).parent


def classes(root):
    """The rooms below `root` that define each public class; private ones stay in their file."""
    found = defaultdict(set)
    for file in root.rglob("*.py"):
        room = file.relative_to(root).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(room)
    return found


def shared(root):
    return {name: sorted(rooms) for name, rooms in classes(root).items() if len(rooms) > 1}


@pytest.mark.parametrize("root", [ROOT, ROOT / "kernels"], ids=lambda root: root.name)
def test_no_class_name_is_defined_in_two_rooms(root):
    assert classes(root)
    assert shared(root) == {}


def test_a_second_class_of_one_name_is_found(tmp_path):
    for room, name in (("plan", "Step"), ("kernels", "Step"), ("graph", "_Step"), ("files", "A")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "file.py").write_text(f"class {name}: pass\n")
    assert shared(tmp_path) == {"Step": ["kernels", "plan"]}
