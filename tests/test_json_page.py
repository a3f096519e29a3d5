"""docs/json.md names each field that commands write, with its type, and no others."""

import contextlib
import fnmatch
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import environment
from support.devices import needs
from support.ranks import mpirun, needs_mpirun

from hybrid_gemm.cli import cli
from hybrid_gemm.experiments import sizes
from hybrid_gemm.experiments.engine import experiments

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/json.md").read_text()

# --- the page -------------------------------------------------------------------------------


@dataclass
class Node:
    """A field of the page, and those below it."""

    path: str
    types: str = ""  # "" where only fields below it are named
    only: bool = False  # in some results
    below: dict[str, "Node"] = field(default_factory=dict)

    def named(self, name: str) -> "Node | None":
        fits = (node for pattern, node in self.below.items() if fnmatch.fnmatchcase(name, pattern))
        return self.below.get(name) or next(fits, None)

    @property
    def optional(self) -> bool:
        """Whether results may lack it: as the page says, or as all that is below it."""
        if self.types:
            return self.only
        return all(node.optional or "*" in name for name, node in self.below.items())


def rows_of_page() -> dict[str, list[list[str]]]:
    """The cells of the tables of fields, by heading."""
    found: dict[str, list[list[str]]] = {}
    for line in PAGE.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| `"):
            cells = [x.strip() for x in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) == 4:  # those of other tables have three, and two
                found.setdefault(heading, []).append(cells)
    return found


ROWS = rows_of_page()
COLUMNS = "Columns of experiments"  # each experiment has some of them


def full(heading: str, cell: str) -> str:
    """The path of a field from the top of its result."""
    return f"experiments[].rows[].{cell[1:-1]}" if heading == COLUMNS else cell[1:-1]


def tree(*headings: str) -> Node:
    """The fields below these headings."""
    top = Node("")
    for heading in headings:
        for name, types, _unit, meaning in ROWS[heading]:
            node = top
            for part in full(heading, name).replace("[]", ".[]").split("."):
                child = Node(f"{node.path}.{part}".replace(".[]", "[]").lstrip("."))
                node = node.below.setdefault(part, child)
            node.types = types
            node.only = meaning.startswith("only") or heading == COLUMNS
    return top


KINDS = {
    "integer": lambda x: type(x) is int,
    "number": lambda x: type(x) in (int, float),
    "string": lambda x: type(x) is str,
    "boolean": lambda x: type(x) is bool,
    "null": lambda x: x is None,
    "object": lambda x: type(x) is dict,
    "list": lambda x: type(x) is list,
    "any": lambda x: True,
}


def has_type(value, types: str) -> bool:
    for kind in types.split(" or "):
        item = re.fullmatch(r"list of (\w+)s", kind)
        if item and type(value) is list and all(map(KINDS[item[1]], value)):
            return True
        if not item and KINDS[kind](value):
            return True
    return False


def faults(value, node: Node, seen: set[str]) -> list[str]:
    """In what a value differs from the page; paths of the page that it has go into `seen`."""
    seen.add(node.path)
    if node.types and not has_type(value, node.types):
        return [f"{node.path} is {value!r:.50} and not {node.types}"]
    if type(value) is list and "[]" in node.below:
        return [x for item in value for x in faults(item, node.below["[]"], seen)]
    if type(value) is not dict or node.types == "any":
        return (
            [] if node.types else [f"{node.path} is {value!r:.50}, of which the page says nothing"]
        )
    found = []
    for name, item in value.items():
        if child := node.named(name):
            found += faults(item, child, seen)
        else:
            found.append(f"{node.path}.{name} is not on the page")
    missing = {name for name, x in node.below.items() if not x.optional and "*" not in name}
    return found + [f"{node.path}.{name} is not there" for name in missing - value.keys()]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, []),
        ({"more": 1}, [".more is not on the page"]),
        ({"seconds": "1 s"}, ["seconds is '1 s' and not number"]),
        ({"products": True}, ["products is True and not integer"]),
        ({"kernels": [{}]}, [f"kernels[].{x} is not there" for x in
                             ("device", "dtype", "layout", "variant")]),
        ({"kernels": None}, ["kernels is None, of which the page says nothing"]),
    ],
)  # fmt: skip
def test_what_differs_from_the_page_is_found(change, fault):
    data = {"products": 1, "kernels": [], "seconds": 1.5}
    assert sorted(faults(data | change, tree("warm"), set())) == fault


# --- results ----------------------------------------------------------------------------------


def result(folder: Path, name: str, words: str, ranks: int = 0):
    """What a command writes with --json."""
    arguments = [*shlex.split(words), "-q", "--json", f"{name}.json"]
    if ranks:
        mpirun(ranks, "-m", "hybrid_gemm", *arguments, cwd=folder, check=0)
    else:
        with contextlib.chdir(folder):
            done = CliRunner().invoke(cli, arguments)
        assert not done.exit_code, done.output
    return read(folder / f"{name}.json")


def refuse(constant: str):
    raise AssertionError(f"{constant} is no JSON")


def read(file: Path):
    return json.loads(file.read_text(), parse_constant=refuse)


EVERY = "Every result"
PLAN = (EVERY, "run", "The plan")
ALONE = (*PLAN, "What was done", "Times")
RESUMED = (EVERY, "run", "What was done", "run --resume")
OVER_RANKS = (EVERY, "run", "The plan over ranks", "What was done", "Times")
PLANNED = (EVERY, "run", "The plan over ranks", "run --dry-run")
# Headings, and the command; later ones read what earlier ones wrote.
COMMANDS = {
    "info": ((EVERY, "info"), "info"),
    "split": (ALONE, "run --size 32 --device emulator --kernel naive --threads 2 --split cols "
              "--algorithm strassen --trace trace.json"),
    "c": (ALONE, "run --size 32 --device cpu -o C.npy --sha256 --verify off"),
    "d": (ALONE, "run C.npy C.npy --device cpu -o D.npy --sha256 --checked --repeat 2"),
    "complex": (ALONE, "run --size 8 --device cpu --dtype complex64 --alpha 1-2j"),
    "empty": (ALONE, "run -m 0 -n 4 -k 4 --device cpu"),
    "not finite": (ALONE, "run --size 8 --device cpu --alpha nan --beta=-inf"),
    "resumed": (RESUMED, "run --size 32 --device cpu -o R.npy --resume --panel 16"),
    "dry": ((*PLAN, "run --dry-run"), "run --size 32 --device cpu --dry-run"),
    "dry ranks": (PLANNED, "run --size 32 --device cpu --ranks 4 --dry-run"),
    "bench": ((EVERY, "bench"), "bench --shapes 32 --device emulator --kernels naive "
              "--samples 5"),
    "refused": ((EVERY, "bench"), "bench --shapes 32,2048x32x32 --device emulator --kernels "
                "one_block,naive --samples 1"),
    "accuracy": ((EVERY, "bench --accuracy"),
                 "bench --accuracy --shapes 16x16x32 --device emulator --data normal"),
    "libraries": ((EVERY, "bench --libraries"), "bench --libraries --shapes 32 --device cpu"),
    "rows": ((EVERY, "compare"), "compare bench.json bench.json"),
    "ways": ((EVERY, "compare"), "compare libraries.json libraries.json"),
    "runs": ((EVERY, "compare"), "compare c.json c.json"),
    "kernels": ((EVERY, "kernels"), "kernels"),
    "warm": ((EVERY, "warm"), "warm --shapes 32 --device emulator --kernel naive"),
    "tune": ((EVERY, "bench", "tune --kernel"),
             "tune --kernel shared_tile --device emulator --shapes 16 --samples 1"),
    "experiments": ((EVERY, "reproduce", COLUMNS),
                    "reproduce column_split --device cpu"),
}  # fmt: skip
RANKS = {
    "info over ranks": ((EVERY, "info"), "info"),
    "dry run of ranks": (PLANNED, "run --size 32 --device cpu --dry-run"),
    "ranks": (OVER_RANKS, "run --size 32 --device cpu --checked --split cols"),
    "resumed ranks": (RESUMED, "run --size 32 --device cpu -o RR.npy --resume"),
}
# Results of GPUs that are kept; they may lack what is newer.
KEPT = {
    "named_tf32_h200": (EVERY, "bench"),
    "peers2_h200": (EVERY, "bench --libraries"),
    "links8_h200": (EVERY, "tune --links"),
    "experiments_h200": (EVERY, "reproduce", COLUMNS),
}
# Of the page, what none of these has; by heading, with the reason.
ELSEWHERE = {
    # As the machine is.
    EVERY: ["environment.checkout.*", "environment.variables.*", "environment.cuda.reason"],
    "What was done": ["checks.faults*.*"],  # a device that errs
    # A GPU whose rate is known, and a host where nothing else runs.
    "The plan": ["plan.bounds_ms.*", "plan.phases_ms.*"],
    "kernels": ["compiled*"],  # NVRTC: has a test of its own
    "tune": ["*"],  # a GPU, and minutes
    "tune --shapes": ["*"],  # a GPU
    COLUMNS: ["*.note"],  # a row that could not be measured
}


@needs("emulator")
@needs_mpirun
def test_the_page_names_what_commands_write(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "LAB_SIZES", (32, 64))  # of reproduce
    wrong, seen = {}, {heading: set() for heading in ROWS}

    def judge(name: str, data, *headings: str) -> list[str]:
        found: set[str] = set()
        wrong[name] = faults(data, tree(*headings), found)
        for heading in headings:
            seen[heading] |= found
        return wrong[name]

    for commands, ranks in ((COMMANDS, 0), (RANKS, 2)):
        for name, (headings, words) in commands.items():
            judge(name, result(tmp_path, name, words, ranks), *headings)
    trace = read(tmp_path / "trace.json")
    judge("trace", {x: trace["otherData"].pop(x) for x in ("command", "environment")}, EVERY)
    judge("events", trace, "run --trace")
    for name, headings in KEPT.items():
        found = judge(name, read(ROOT / f"docs/results/{name}.json"), *headings)
        wrong[name] = [x for x in found if not x.endswith("is not there")]
    assert not {name: x for name, x in wrong.items() if x}
    unseen = {
        heading: [
            path
            for name, *_cells in rows
            if (path := full(heading, name)) not in seen[heading]
            and not any(fnmatch.fnmatchcase(path, x) for x in ELSEWHERE.get(heading, []))
        ]
        for heading, rows in ROWS.items()
    }
    assert not {heading: x for heading, x in unseen.items() if x}, "which no result has"


def test_the_page_names_the_columns_that_experiments_declare():
    row = tree(COLUMNS).below["experiments"].below["[]"].below["rows"].below["[]"]
    declared = {name for x in experiments().values() for name in x.columns}
    assert "ratio_gflops" in declared
    assert not [name for name in declared if row.named(name) is None]


def test_the_page_names_what_a_compiler_says(tmp_path):
    """Of kernels that compile quickly: in float64 there are variants of all kinds."""
    pytest.importorskip("cuda.core")
    data = result(tmp_path, "made", "kernels probe_aligned outer --compile sm_90 --dtype float64")
    seen = set()
    assert not faults(data, tree(EVERY, "kernels"), seen)
    refused = [x["refused"] for x in data["compiled"] if "refused" in x]
    assert refused == ["no float64 form", "it needs DEPTH * COLS * SIZE <= 256"]
    assert seen >= {name[1:-1] for name, *_cells in ROWS["kernels"]}


GPU = {
    "run": (ALONE, "run --size 64 --device cuda --split cols"),
    "bench": ((EVERY, "bench"), "bench --shapes 64 --device cuda --kernels naive,cublas"),
    "accuracy": ((EVERY, "bench --accuracy"), "bench --accuracy --shapes 64 --device cuda"),
    "libraries": ((EVERY, "bench --libraries"), "bench --libraries --shapes 64 --device cuda"),
    "shapes": ((EVERY, "bench", "tune --shapes"), "tune --shapes 64 --quick --dtype float32 "
               "-o table.json"),
    "links": ((EVERY, "tune --links"), "tune --links --gpus 0"),
}  # fmt: skip


@needs("cuda")
@pytest.mark.parametrize("name", GPU)
def test_the_page_names_what_gpus_give(tmp_path, name):
    headings, words = GPU[name]
    assert not faults(result(tmp_path, name, words), tree(*headings), set())


# --- examples, and order ----------------------------------------------------------------------


def test_the_examples_of_the_page_work(tmp_path):
    if subprocess.run(["sh", "-c", "command -v jq"], capture_output=True).returncode:
        pytest.skip("no jq (apt install jq)")
    blocks = re.findall(r"```(sh|python)\n(.*?)```", PAGE, re.S)
    assert [kind for kind, _text in blocks] == ["sh", "sh", "python", "python"]
    command = f'hybrid-gemm() {{ {sys.executable} -m hybrid_gemm "$@"; }}\nset -euo pipefail\n'
    said = []
    for kind, text in blocks:
        words = ["bash", "-c", command + text] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=tmp_path, env=environment()
        )
        assert done.returncode == 0, done.stderr
        assert "null" not in done.stdout
        said.append(done.stdout)
    assert re.search(r"^blas\t64\t[\d.e-]+\t[\d.]+\tpassed$", said[0], re.M)
    assert re.search(r"^true$.*\"fastest_ms\": [\d.]+", said[1], re.M | re.S)
    assert re.match(r"cpu, \d+ cores?.* \{'multiply': [\d.e-]+\} of [\d.]+ ms", said[2])
    assert said[3] == "{(64, 64, 64): 'blas', (128, 128, 128): 'blas'}\n"


def test_keys_come_in_the_same_order(tmp_path):
    def keys(value):
        if isinstance(value, dict):
            return [(name, keys(x)) for name, x in value.items()]
        return [keys(x) for x in value] if isinstance(value, list) else None

    for words in ("run --size 32 --device cpu --threads 1 --reduce ordered",
                  "bench --shapes 32 --device cpu --samples 1"):  # fmt: skip
        first, second = (result(tmp_path, name, words) for name in ("first", "second"))
        assert keys(first) == keys(second)
