"""What README and docs say comes from the committed results."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_readme_tables_are_what_the_results_say():
    done = subprocess.run([sys.executable, ROOT / "scripts/readme-tables", "--check"])
    assert done.returncode == 0, "README.md is out of date: run scripts/readme-tables"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])  # fmt: skip
def test_links_lead_somewhere(page):
    import re

    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
