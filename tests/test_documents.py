"""What README and docs say comes from the committed results."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_gemm import __version__

ROOT = Path(__file__).resolve().parent.parent


def test_readme_tables_are_what_the_results_say():
    done = subprocess.run([sys.executable, ROOT / "scripts/readme-tables", "--check"])
    assert done.returncode == 0, "a page is out of date: run scripts/readme-tables"


PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
VARIABLE = r"[A-Z][A-Z0-9]*_[A-Z0-9_]+"
NO_VARIABLES = {"COMM_WORLD"}  # an attribute of MPI's module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_troubleshooting_names_every_environment_variable_that_the_code_reads():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    found = set()
    for module in (ROOT / "hybrid_gemm").rglob("*.py"):
        text = module.read_text()
        if "environ" in text:
            strings = (x.value for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Constant))
            found |= {x for x in strings if re.fullmatch(VARIABLE, str(x))}
    assert found >= {"HYBRID_GEMM_CACHE", "HYBRID_GEMM_KERNELS", "SLURM_NTASKS"}
    assert not [name for name in sorted(found - NO_VARIABLES) if f"`{name}`" not in page]


def test_the_citation_has_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
