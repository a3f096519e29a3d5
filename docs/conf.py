"""Sphinx's settings of the site: README and docs as they lie, with a table of contents.

`scripts/docs` builds it. The source folder is the checkout, so that links between pages, kernels
and result files are the same on the site and in the repository.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hybrid_gemm import __version__ as release

project = "hybrid-gemm"
author = "the hybrid-gemm authors"
copyright = f"2026, {author}"
version = release

extensions = ["myst_nb"]
root_doc = "README"
include_patterns = ["README.md", "C*.md", "SECURITY.md", "docs/**"]
exclude_patterns = ["docs/results", "site", ".venv"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the notebook is kept as it ran
html_theme = "furo"
html_title = f"hybrid-gemm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
suppress_warnings = ["myst.header"]  # a notebook's cell may begin at any level
PAGES = {
    "Start": ["getting-started", "choosing", "arrays", "tour", "troubleshooting"],
    "Guides": ["performance", "tensor-cores", "fp64x", "calls", "gpus", "mpi", "cluster",
               "reliability"],
    "Reference": ["cli", "json", "api", "kernels", "glossary"],
    "Experiments": ["experiments", "why-columns-were-slow", "sources", "notes/README",
                    "notes/fp32-kernels", "notes/choosing", "notes/tensor-cores",
                    "notes/several-gpus", "notes/files", "notes/verification", "notes/campaigns",
                    "notes/first-hour"],
    "The project": ["design", "../CONTRIBUTING", "../CHANGELOG", "../SECURITY"],
}  # fmt: skip


def add_contents(app, name: str, source: list[str]) -> None:
    """Puts the table of contents under README, whose readers in the repository need none."""
    if name == root_doc:
        for caption, pages in PAGES.items():
            names = "\n".join(str(Path("/docs", page)).replace("/docs/..", "") for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n"


def add_index(app, failure: Exception | None) -> None:
    """A web server's first page is index.html."""
    if failure is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app) -> None:
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
