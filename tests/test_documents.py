"""What README and docs say comes from the committed results."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.devices import needs

from hybrid_gemm import __version__, catalog
from hybrid_gemm.cli import cli

ROOT = Path(__file__).resolve().parent.parent


def test_readme_tables_are_what_the_results_say():
    done = subprocess.run([sys.executable, ROOT / "scripts/readme-tables", "--check"])
    assert done.returncode == 0, "a page is out of date: run scripts/readme-tables"


def test_pictures_are_of_the_result_files():
    done = subprocess.run([sys.executable, ROOT / "scripts/pictures", "--check"])
    assert done.returncode == 0, "a picture is out of date: run scripts/pictures"


def words(text: str) -> int:
    """How many words a text has beside code, comments and where its links lead."""
    seen = re.sub(r"(?s)```.*?```|<!--.*?-->|\]\([^)]*\)", " ", text)
    return sum(any(map(str.isalnum, word)) for word in seen.split())


def test_the_first_page_and_the_changes_are_short():
    readme = (ROOT / "README.md").read_text().partition("\n## Read on")[0]
    assert words(readme) <= 400
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = re.split(r"^## ", changes, flags=re.MULTILINE)[1]
    assert re.match(rf"{re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)\n", released)
    assert len(released.splitlines()) <= 80 and words(changes) <= 1500


PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
VARIABLE = r"[A-Z][A-Z0-9]*_[A-Z0-9_]+"
NO_VARIABLES = {"COMM_WORLD", "CUBLAS_STATUS_ALLOC_FAILED", "HYBRID_GEMM_", "ST_NOEXEC"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def shell_lines(page: Path) -> list[str]:
    """The commands of a page's shell blocks, or of a notebook's shell cells."""
    if page.suffix == ".ipynb":
        cells = ["".join(cell["source"]) for cell in json.loads(page.read_text())["cells"]]
        blocks = [cell for cell in cells if cell.startswith("%%bash")]
    else:
        blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.S)
    return "\n".join(blocks).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs/tour.ipynb"], ids=lambda page: page.name)
def test_commands_have_options_that_exist(page):
    for line in shell_lines(page):
        words = shlex.split(line.split(">")[0], comments=True)
        if "hybrid-gemm" in words and not {"NAME", "--help"} & {*words}:
            name, *arguments = words[words.index("hybrid-gemm") + 1 :]
            assert name in cli.commands, line
            cli.commands[name].make_context(name, arguments)  # raises for what it does not take


@needs("emulator")
def test_the_notebook_ran_and_its_python_still_does():
    cells = json.loads((ROOT / "docs/tour.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [x for x in outputs if x["output_type"] == "error"]
    assert sum("image/png" in x.get("data", {}) for x in outputs) == 4
    sources = ["".join(cell["source"]) for cell in code]
    python = [x for x in sources if "Image(" not in x and not x.startswith("%%bash")]
    program = "\n".join(python).replace("from IPython.display import Image\n", "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 5 and "WRONG" not in done.stdout


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


def test_the_page_on_kernels_names_every_role_and_shared_file():
    page = (ROOT / "docs/kernels.md").read_text()
    found = {kernel.role for kernel in catalog.kernels().values()}
    found |= {file.name for file in (ROOT / "kernels").glob("*.cuh")}
    assert "residues" in found and "mma.cuh" in found
    assert not [name for name in sorted(found) if f"`{name}`" not in page]


def test_the_page_on_kernels_explains_the_ladder_from_the_first_rung_to_the_last():
    section = (ROOT / "docs/kernels.md").read_text().split("\n## The ladder, rung by rung\n")[1]
    explained = re.findall(r"^\| \[`(\w+)`\]", section.split("\n## ")[0], flags=re.MULTILINE)
    last = catalog.get("double_buffered").rung
    ladder = [kernel for kernel in catalog.kernels().values() if kernel.rung <= last]
    rungs = [k.name for k in sorted(ladder, key=lambda kernel: kernel.rung)]
    assert len(rungs) == 9 and explained[: len(rungs)] == rungs
