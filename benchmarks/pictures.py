"""The pictures in the README, taken from real runs: `python benchmarks/pictures.py`.

Needs Debian's chromium. Writes docs/audit.png.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import torch

import nhwc
from nhwc.render.audit_html import audit_html

DOCS = Path(__file__).parents[1] / "docs"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)


def picture(page: str, target: Path, size: str) -> None:
    """Take a screenshot of a page, given as its HTML."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page)
        subprocess.run(
            [
                "chromium",
                *FLAGS,
                f"--user-data-dir={folder}/profile",
                f"--window-size={size}",
                f"--screenshot={target}",
                f"{file.as_uri()}#light",
            ],
            check=True,
            capture_output=True,
        )
    print(f"wrote {target}")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    model = nhwc.load_model("shufflenet_v2_x1_0")
    report = nhwc.audit(model, torch.rand(2, 3, 224, 224), name="shufflenet_v2_x1_0")
    picture(audit_html(report), DOCS / "audit.png", "1360,1020")


if __name__ == "__main__":
    main()
