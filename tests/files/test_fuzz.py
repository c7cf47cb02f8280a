"""A few hundred cases of the fuzzer: the rest is run by hand."""

import json
import random
import subprocess
import sys

import pytest
from benchmarks.fuzz.changes import mutate
from benchmarks.fuzz.figures import run


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the worker's memory is bounded as Linux does")
def test_files_changed_by_structure_are_refused_or_right():
    figures = run(0, cases=250)
    assert figures.failures == []
    assert figures.cases == 250
    assert figures.counts["file_case", "refused"] > 50
    assert figures.counts["file_case", "loaded"] > 5


def test_a_mutation_changes_one_place():
    tree = {"a": [1, {"b": "text"}], "c": None}
    made = set()
    for seed in range(300):
        one = json.loads(json.dumps(tree))
        mutate(one, tree, random.Random(seed))
        made.add(json.dumps(one))
    assert len(made) > 100


def test_what_planted_code_would_do_is_seen(tmp_path):
    code = f"""
import sys
from pathlib import Path
from benchmarks.fuzz.cases import Watch
from benchmarks.fuzz.changes import TEXTS
watch = Watch(Path({str(tmp_path)!r}))
import os
for act in (lambda: eval(TEXTS[0]), lambda: open("/nhwc-harm", "w"), lambda: os.system("")):
    try:
        act()
    except Exception:
        pass
print(len(watch.seen))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"
