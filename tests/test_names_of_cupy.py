"""Every name of CuPy's that the package writes is one that CuPy has.

Most lines that call CuPy run on a GPU alone, so where there is none a wrong name would be found by
nobody. CuPy imports without a GPU.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import hybrid_gemm

ROOT = Path(hybrid_gemm.__file__).parent
MODULES = {"cp": "cupy", "cupy": "cupy", "cupyx": "cupyx"}


def chain(node: ast.expr) -> list[str]:
    """`cp.b.c` as its names, also where a device has the module, as in `self.cp.b.c`; none for
    anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
        if isinstance(node, ast.Attribute) and node.attr == "cp":
            return ["cp", *names]
    return [node.id, *names] if isinstance(node, ast.Name) and node.id in MODULES else []


def written(text: str) -> Iterator[tuple[int, list[str]]]:
    """The chains of names that begin with one of CuPy's modules, and their lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and (names := chain(node)):
            yield node.lineno, names


def missing(modules: dict[str, ModuleType], names: list[str]) -> bool:
    """Whether CuPy lacks one of these names. Nothing is asked of what is no module or class, nor of
    a module that wants a library which is not here, such as cuBLAS.
    """
    found = modules[names[0]]
    for name in names[1:]:
        if not isinstance(found, ModuleType | type):
            return False
        try:
            found = getattr(found, name)
        except ImportError:
            return False
        except AttributeError:
            return True
    return False


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    return {ours: pytest.importorskip(theirs) for ours, theirs in MODULES.items()}


def test_every_name_is_one_of_cupys(modules: dict[str, ModuleType]) -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: {'.'.join(names)}"
            for line, names in written(path.read_text())
            if missing(modules, names)
        ]
    assert not wrong, wrong


@pytest.mark.parametrize("cp", ["cp", "self.cp", "device.unwrapped.cp"])
def test_a_wrong_name_is_found(cp: str, modules: dict[str, ModuleType]) -> None:
    text = f"def f(x):\n    return {cp}.cuda.Stream.fromexternal_stream(x.data)\n"
    assert [names for _, names in written(text) if missing(modules, names)]
    assert not missing(modules, ["cp", "cuda", "Stream", "null"])
