"""What `refit-models fit` and `continue` do: put new times to older ones, and fit models."""

import dataclasses
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.arrays import output_files
from hybrid_gemm.bench import drawing, fitting, left_out, models
from hybrid_gemm.kernel_choice import choices, model_files
from hybrid_gemm.kernel_choice.library_kernels import Launched
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.reporting import console

from . import MOST_DRAWN, RESULTS, TIMES, drawn, variant_of

MACHINE = Machine("NVIDIA H200", 132, 90, 66.9)
LEADS = (0.8, 1.0, 1.25, 1.5)  # errors that a kernel of ours has to lead a library by


def fit_again(files: list[str]) -> None:
    """What `fit` does."""
    results = json.loads(RESULTS.read_text())
    times = json.loads(gzip.decompress(TIMES.read_bytes()))
    modes, again = times["modes"], [json.loads(Path(x).read_text()) for x in files]
    for new in again:
        for mode in new["modes"]:
            modes[mode] |= merged(mode, modes[mode], new["modes"][mode])
            if new.get("seed") is not None:
                modes[mode]["seeds"] = sorted({*modes[mode].get("seeds", []), new["seed"]})
    listed = {str(v) for kernel in catalog.kernels().values() for v in kernel.variants()}
    made, rows = {}, {}
    timed = {mode for new in again for mode in new["modes"]} or set(modes)
    if timed & (either := {"float32", "tf32", "fp32x3"}):
        timed |= either  # what the others are worth is of either
    for mode, found in modes.items():
        if mode not in timed:
            continue
        keep_listed(found, listed)
        made[mode] = fit_mode(mode, found, MACHINE)
        rows[mode] = rows_of_seeds(found)
    for mode, worth in worths(made, modes, rows).items():
        results["modes"][mode] = {"worth": worth}
    results["leads"] = results.get("leads", {}) | leads(made, modes, rows)
    results["again"] = results.get("again", []) + [
        {"kernels": new["kernels"], "seed": new.get("seed"), "modes": list(new["modes"]),
         "environment": new["environment"]}
        for new in again
    ]  # fmt: skip
    console.write(str(RESULTS), json.dumps(results, indent=1) + "\n")
    write_times(TIMES, times)


def fit_mode(
    mode: str, found: dict, machine: Machine, base: dict | None = None
) -> left_out.LeftOut:  # fmt: skip
    """Fits the model of a mode to its times on a machine, and writes it. With `base`, the data of
    another GPU's model, it continues that one."""
    made, data = models.fit(measured(mode, found), machine, base)
    file = model_files.HERE / model_files.file_name(machine.model, mode)
    file.write_bytes(model_files.as_bytes(data))
    print(f"{mode}: fitted to {len(made.measured.drawn)} shapes", flush=True)
    return made


def continue_models(files: list[str]) -> None:
    """What `continue` does."""
    again = [json.loads(Path(x).read_text()) for x in files]
    known = [x for x in RESULTS.parent.glob("fitted_times_*.json.gz") if x != TIMES]
    of = again[:1] or [json.loads(gzip.decompress(x.read_bytes())) for x in sorted(known)]
    for each in of:
        continue_of(each["machine"], again)


def continue_of(asked: dict, again: list[dict]) -> None:
    """The same for one GPU, with new times."""
    machine = Machine(**asked)
    name = machine.model.split()[1].lower()  # NVIDIA H100 80GB HBM3
    file, times = RESULTS.with_name(f"fitted_times_{name}.json.gz"), {"modes": {}}
    if file.is_file():
        times = json.loads(gzip.decompress(file.read_bytes()))
    times["machine"] = asked
    made, rows = {}, {}
    for mode in {mode: None for new in again for mode in new["modes"]} | times["modes"]:
        found = times["modes"].setdefault(mode, {"variants": [], "rows": []})
        for new in again:
            if mode in new["modes"]:
                found |= merged(mode, found, new["modes"][mode])
                found["seeds"] = sorted({*found.get("seeds", []), new["seed"]})
        base = model_files.shipped(MACHINE, mode)
        assert base, f"{MACHINE.model} has no model of {mode} to continue"
        made[mode] = fit_mode(mode, found, machine, base)
        rows[mode] = rows_of_seeds(found)
    worth = {x: {"worth": y} for x, y in worths(made, times["modes"], rows).items()}
    path = RESULTS.with_name(f"fitted_{name}.json")
    before = json.loads(path.read_text()).get("again", []) if path.is_file() else []
    results = {
        "machine": times["machine"], "continues": MACHINE.model, "modes": worth,
        "again": before + [{"seed": new["seed"], "modes": list(new["modes"]),
                            "environment": new["environment"]} for new in again],
    }  # fmt: skip
    console.write(str(path), json.dumps(results, indent=1) + "\n")
    write_times(file, times)


def merged(mode: str, old: dict, new: dict) -> dict:
    """Rows of a mode with what was timed anew."""
    names = [*old["variants"], *(x for x in new["variants"] if x not in old["variants"])]
    if mode == "fp32x3":
        names = [x for x in names if not variant_of(x).kernel.library]
    again = {tuple(row[:4]): dict(zip(new["variants"], row[5], strict=True))
             for row in new["rows"]}  # fmt: skip
    known = [[*x[:5], [old["kernels"][x[5][0]], *x[5][1:]], x[6]] for x in old.get("library", [])]
    library = list({tuple(x[:4]): x for x in (*known, *new["library"])}.values())
    name = next((x for x in names if variant_of(x).kernel.library), None)
    alone = {tuple(row[:4]): {name: row[6]} for row in library}
    rows = []
    nothing = [[*row[:5], [None] * len(old["variants"])] for row in new["rows"]]
    for row in {tuple(r[:4]): r for r in (*nothing, *old["rows"])}.values():
        times = dict(zip(old["variants"], row[5], strict=True))
        times |= alone.get(tuple(row[:4]), {})
        times |= {x: us for x, us in again.get(tuple(row[:4]), {}).items() if us}
        if any(us for us in times.values()):
            rows.append([*row[:5], [times.get(name) for name in names]])
    kernels = sorted({x[5][0] for x in library})
    library = [[*x[:5], [kernels.index(x[5][0]), *x[5][1:]], x[6]] for x in library]
    return {"variants": names, "rows": rows, "kernels": kernels, "library": library}


def measured(mode: str, found: dict) -> fitting.Measured:
    """The times of a mode."""
    rows, alone = found["rows"], found.get("library") or []
    launches = fitting.LibraryTimes(
        [drawn(x) for x in alone],
        [Launched(found["kernels"][x[5][0]], *x[5][1:]) for x in alone],
        np.array([x[6] for x in alone]),
    )
    return fitting.Measured(
        mode, [drawn(r) for r in rows], [variant_of(x) for x in found["variants"]],
        np.array([row[5] for row in rows], float), launches if alone else None,
    )  # fmt: skip


def write_times(file: Path, times: dict) -> None:
    """Measured times, a row a line."""
    text = json.dumps(times, separators=(",", ":")).replace("],[", "],\n[")
    output_files.write_file(
        output_files.check_output(file), gzip.compress((text + "\n").encode(), mtime=0)
    )


def worths(made: dict, modes: dict, rows: dict) -> dict[str, dict]:
    """What the models are worth at these rows, by mode."""
    found = {}
    for mode, each in made.items():
        if mode in ("fp32x3", "tf32"):
            plain = {tuple(modes["float32"]["rows"][i][:4]): i for i in rows["float32"]}
            keys = {i: tuple(modes[mode]["rows"][i][:4]) for i in rows[mode]}
            pairs = [(i, plain[key]) for i, key in keys.items() if key in plain]
            found[mode] = worth_of_either(each, made["float32"], pairs)
        else:
            found[mode] = left_out.worth(each, rows[mode] or None)
        print(mode, {k: round(v, 3) for k, v in found[mode]["all"].items()})
    return found


def worth_of_either(
    of: left_out.LeftOut, plain: left_out.LeftOut, pairs: Sequence[tuple[int, int]]
) -> left_out.Figures:
    """As `left_out.worth`, of fp32x3 or TF32 or `plain`, strict fp32, whichever is predicted to be
    faster, at `pairs` of rows of the two. The library is TF32's, or that of strict fp32."""
    found: dict[str, list[tuple[float, ...]]] = {}
    mode = of.measured.mode
    both = of, plain
    beside = of if of.measured.library is not None else plain
    for pair in pairs:
        times = [x.timed(row) for x, row in zip(both, pair, strict=True)]
        takes = []
        for own in (True, False):
            made = [
                x.choice(row, own or x.measured.library is None, ask=x.measured.mode == "tf32")
                for x, row in zip(both, pair, strict=True)
            ]
            here = int(choices.strict_is_faster(mode, made[1], made[0]))
            takes.append(times[here][both[here].measured.variants.index(made[here].variant)])
        at = both.index(beside)
        theirs = times[at][beside.measured.library]
        best_own = min(x[y.measured.ours].min() for x, y in zip(times, both, strict=True))
        line = (theirs, *takes, best_own, min(x.min() for x in times))
        for kind in ("all", of.measured.drawn[pair[0]].kind):
            found.setdefault(kind, []).append(line)
    return {kind: left_out.figures(np.array(lines)) for kind, lines in found.items()}


def leads(made: dict, modes: dict, rows: dict) -> dict[str, list]:
    """What `auto` is worth, by mode, where ours has to lead by each of these numbers of errors."""
    found: dict[str, list] = {}
    for lead in LEADS:
        asked = {mode: dataclasses.replace(each, lead=lead) for mode, each in made.items()}
        for mode, worth in worths(asked, modes, rows).items():
            found.setdefault(mode, []).append({"lead": lead, **worth["all"]})
    return found


def rows_of_seeds(found: dict) -> list[int]:
    """The rows of shapes that were drawn for all modes: there all that was plausible was timed.
    All rows of a mode of which only one row or column was drawn so."""
    drawn_so = {(*d.shape, d.layout) for seed in found.get("seeds", [])
                for classes in (drawing.FITTED, *zip(drawing.ALONE.values()))
                for d in drawing.draw(seed, MOST_DRAWN, classes)}  # fmt: skip
    rows = [i for i, row in enumerate(found["rows"]) if tuple(row[:4]) in drawn_so]
    lines = rows and all(found["rows"][i][4] == drawing.LINE for i in rows)
    return list(range(len(found["rows"]))) if lines else rows


def keep_listed(found: dict, listed: set[str]) -> None:
    """Leaves out times of variants that kernels no longer list."""
    keep = [i for i, name in enumerate(found["variants"]) if name in listed]
    found["variants"] = [found["variants"][i] for i in keep]
    found["rows"] = [[*row[:5], [row[5][i] for i in keep]] for row in found["rows"]]
    found["rows"] = [row for row in found["rows"] if any(row[5])]
