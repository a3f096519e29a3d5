"""The rooms (folders) of the package: imports point down, and none go round in a circle.

Imports inside functions and under TYPE_CHECKING count too. docs/design.md draws them. In them,
functions are short and take few parameters, or say why not.
"""

import ast
import functools
import itertools
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hybrid_gemm

PACKAGE = Path(hybrid_gemm.__file__).parent
SCRIPTS = PACKAGE.parent / "scripts"
# A room imports rooms of lower floors, and of its own floor as long as there is no circle.
FLOORS = (
    {"errors"},
    {"option_checks"},
    {"host", "catalog", "options", "problem"},
    {"arrays", "planning"},
    {"kernel_choice"},
    {"devices"},
    {"execution", "verify"},
    {"programs"},
    {"runner"},
    {"ranks"},
    {"api", "plans"},
    {"torch"},
    {"reporting"},
    {"bench", "experiments"},
    {"cli"},
    {"__init__", "__main__"},  # the package's faces
    {"scripts"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> dict[str, Path]:
    """The file of every module, by its name within the package: `devices.cuda.device`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


def scripts() -> dict[str, Path]:
    """The Python files of scripts/, where this is a checkout."""
    files = [p for p in SCRIPTS.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    python = [p for p in files if p.suffix == ".py" or b"python3" in p.read_bytes()[:30]]
    return {f"scripts.{path.stem}": path for path in python}


def imported(tree: ast.AST, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The package's modules that a file imports, anywhere in it.

    `from ..a import b` is the module a.b where that is one, and otherwise a, of which b is a part.
    """
    inside = path.is_relative_to(PACKAGE)
    folder = path.relative_to(PACKAGE).parent.parts if inside else ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "hybrid_gemm":
                    yield alias.name.partition(".")[2] or "__init__"
        elif isinstance(node, ast.ImportFrom):
            named = node.module.split(".") if node.module else []
            if node.level and not inside:  # the scripts' own
                continue
            if node.level:
                base = [*folder[: len(folder) - node.level + 1], *named]
            elif named[0] == "hybrid_gemm":
                base = named[1:]
            else:
                continue
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                if whole in known:
                    yield whole
                elif alias.name != "__version__":  # a fact that stands in __init__.py
                    yield ".".join(base) or "__init__"


@functools.cache
def arrows() -> dict[str, set[str]]:
    """What each module of the package, and each script, imports from the package."""
    known = modules()
    return {
        name: set(imported(ast.parse(path.read_text()), path, known)) - {name}
        for name, path in (known | scripts()).items()
    }


def room(module: str) -> str:
    return module.partition(".")[0]


def between_rooms() -> set[tuple[str, str]]:
    """The arrows from a module of one room to a module of another."""
    return {
        (module, other)
        for module, others in arrows().items()
        for other in others
        if room(module) != room(other)
    }


def circle(graph: Mapping[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_every_module_has_a_floor():
    assert {room(module) for module in modules()} <= FLOOR.keys()


def test_at_most_ten_modules_stand_at_the_root():
    root = [path.name for path in PACKAGE.glob("*.py")]
    assert len(root) <= 10, root


def test_imports_point_down():
    up = [
        f"{module} imports {other}"
        for module, other in sorted(between_rooms())
        if FLOOR[room(module)] < FLOOR[room(other)]
    ]
    assert not up, "\n".join(up)


def test_rooms_make_no_circle():
    graph: dict[str, set[str]] = {}
    for module, other in between_rooms():
        graph.setdefault(room(module), set()).add(room(other))
    assert circle(graph) is None


def test_modules_make_no_circle():
    assert circle(arrows()) is None


@pytest.mark.parametrize(
    "text, expected",
    [
        ("from ..errors import UsageError", {"errors"}),
        ("from .. import catalog, __version__", {"catalog"}),
        ("from . import base", {"devices.base"}),
        ("def f():\n    from ..runner import Runner", {"runner"}),
        ("if TYPE_CHECKING:\n    import hybrid_gemm.cli.run", {"cli.run"}),
        ("from hybrid_gemm import gemm", {"__init__"}),
        ("import numpy\nfrom collections import abc", set()),
    ],
)
def test_imports_are_seen_wherever_they_stand(text, expected):
    path = PACKAGE / "devices" / "cpu.py"
    assert set(imported(ast.parse(text), path, modules())) == expected


def test_a_circle_is_found():
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) is None


MOST_LINES, MOST_PARAMETERS = 50, 8


def large(text: str) -> Iterator[str]:
    """The functions of a file that are too long, or take too much, without a reason: `# Long: ...`
    or `# Many parameters: ...` directly above. Docstrings and `self` do not count."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = min(x.lineno for x in (node, *node.decorator_list)) - 1
        above = itertools.takewhile(lambda x: x.lstrip().startswith("#"), reversed(lines[:first]))
        reasons = "\n".join(above)
        documented = (ast.get_docstring(node, clean=False) or "").splitlines()
        length = node.end_lineno - node.lineno + 1 - len(documented)
        given = node.args
        names = [x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        count = len([x for x in names if x not in ("self", "cls")])
        if length > MOST_LINES and "# Long: " not in reasons:
            yield f"{node.name} has {length} lines"
        if count > MOST_PARAMETERS and "# Many parameters: " not in reasons:
            yield f"{node.name} takes {count} parameters"


def test_functions_are_short_and_take_little_or_say_why():
    found = [
        f"{name}: {what}"
        for name, path in (modules() | scripts()).items()
        for what in large(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_large_functions_are_found():
    many = "(self, a, b, c, d, /, e, *, f, g, h, i)"
    assert list(large(f"def f{many}: 0")) == ["f takes 9 parameters"]
    assert not list(large(f"# Many parameters: as in BLAS.\n# Here too.\n@named\ndef f{many}: 0"))
    assert list(large(f"# Long: no.\ndef f{many}: 0")) == ["f takes 9 parameters"]
    body = '    """Two\n    lines."""\n' + "    0\n" * 50
    assert list(large("class C:\n  def f(self):\n" + body)) == ["f has 51 lines"]
    assert not list(large("# Long: a table.\ndef f():\n" + body))
    assert not list(large("def f():\n" + body.removesuffix("    0\n")))
