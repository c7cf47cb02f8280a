"""Which page stands where on the site. A page of docs without a place here ends the build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@dataclass(frozen=True)
class Section:
    """A heading of the navigation and the names of its pages, in order."""

    title: str
    pages: tuple[str, ...]


GENERATED = frozenset({"limits", "contributing", "api"})
"""Pages that the build writes: parts of the README, of CONTRIBUTING.md, and from docstrings."""

SECTIONS = (
    Section("Start", ("channels-last", "reading-an-audit", "questions", "limits")),
    Section("Five verbs", ("audit", "optimize", "bench", "ops", "train")),
    Section("Where you work", ("torch-compile", "ci", "notebook", "recipes")),
    Section(
        "Measured",
        (
            "performance",
            "memory",
            "operators",
            "operators-wiki-2022",
            "lost-formats",
            "claims",
            "conformance",
            "fuzz",
            "versions",
            "operators-changes",
        ),
    ),
    Section("Reference", ("api", "file-format", "writing-operators")),
    Section("Inside", ("architecture", "capture", "kernels", "contributing", "releasing")),
)
"""All pages but `index`, which comes before them."""


def written(docs: Path = DOCS) -> dict[str, Path]:
    """The pages that are files of `docs`, by their names."""
    return {file.stem: file for pattern in ("*.md", "*.ipynb") for file in docs.glob(pattern)}


def faults(docs: Path = DOCS) -> list[str]:
    """What is wrong with the places of pages: none, two, or a place that no page takes."""
    placed = [page for section in SECTIONS for page in section.pages]
    there = set(written(docs)) - {"index"} | GENERATED
    return [
        *(
            f"docs/{page} has no place: give it one in website/navigation.py"
            for page in sorted(there - set(placed))
        ),
        *(
            f"website/navigation.py names {page}, and docs has no such page"
            for page in sorted(set(placed) - there)
        ),
        *(
            f"website/navigation.py names {page} twice"
            for page in sorted({page for page in placed if placed.count(page) > 1})
        ),
    ]
