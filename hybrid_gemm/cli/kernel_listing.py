"""What `hybrid-gemm kernels` does: the catalog as data and as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from .. import catalog
from ..catalog import Kernel, Variant
from ..errors import UsageError, shown
from ..reporting import console

# What kernels are for, by role.
_TENSOR_CORES = "on tensor cores: --compute fp32x3 and tf32, 16-bit matrices"
_USES = {
    "gemm": "for --kernel NAME", "tensor": _TENSOR_CORES,
    "residues": "on tensor cores: --compute fp64x",
}  # fmt: skip
_INSIDE = "parts of products, checks and experiments"
_ARCH = re.compile(r"(?:sm|compute)_([0-9]{1,9})[af]?")


def kernels(names: Sequence[str], arch: str | None, dtype: str) -> dict[str, Any]:
    """The kernels called `names` (all, if there are none) as plain data.

    With `arch` ("sm_90") each variant is compiled for `dtype`, and its registers, memory and
    spills are there too. Raises `UsageError` for an unknown kernel or architecture,
    `UnavailableError` without a compiler, and `KernelError` where one does not compile.
    """
    chosen = [catalog.get(name) for name in names] or list(catalog.kernels().values())
    rows = []
    for kernel in chosen:
        rows.append({
            "kernel": kernel.name, "role": kernel.role, "summary": kernel.summary,
            "source": kernel.source, "variants": [dict(v.params) for v in kernel.variants()],
            "tile": list(kernel.tile), "persistent": kernel.persistent, "arch": kernel.arch,
            "require": list(kernel.require), "limits": list(kernel.limits),
            "dtypes": list(kernel.dtypes), "layouts": list(kernel.layouts),
            "runs_on": list(kernel.runs_on),
        })  # fmt: skip
    data = {"kernels": rows}
    if arch is not None:
        data["compiled"] = _compile(chosen, arch, dtype)
    return data


def _check_arch(arch: str) -> None:
    """Raises `UsageError` for what is no architecture, or one that NVRTC does not know."""
    from ..devices.cuda import nvrtc

    version = nvrtc.version()  # or says what is missing
    from cuda.bindings.nvrtc import nvrtcGetSupportedArchs

    _status, known = nvrtcGetSupportedArchs()
    if not (found := _ARCH.fullmatch(arch)) or int(found[1]) not in known:
        raise UsageError(
            f"--compile {shown(arch)}: NVRTC {version} compiles for "
            f"{', '.join(f'sm_{x}' for x in known)}"
        )


def _compile(chosen: Sequence[Kernel], arch: str, dtype: str) -> list[dict[str, Any]]:
    """A row for each variant that is compiled; libraries have none."""
    from ..devices.cuda import nvrtc

    _check_arch(arch)
    if all(kernel.library for kernel in chosen):
        names = ", ".join(kernel.name for kernel in chosen)
        raise UsageError(f"--compile is for kernels of this project; {names} is a library's")
    rows = []
    for kernel in chosen:
        if kernel.library:
            continue
        for variant in kernel.variants():
            row: dict[str, Any] = {"variant": str(variant), "arch": arch, "dtype": dtype}
            if reason := _refusal(variant, dtype):
                row["refused"] = reason
            else:
                layout = kernel.layouts[0]
                _cubin, usage = nvrtc.compile(
                    variant.source(dtype, layout), arch, f"{variant.name}.cu"
                )
                row |= dataclasses.asdict(usage)
            rows.append(row)
    return rows


def _refusal(variant: Variant, dtype: str) -> str | None:
    """Why a variant is not compiled for a dtype; None if it is."""
    if dtype not in variant.kernel.dtypes:
        return f"no {dtype} form"
    try:
        variant.check(dtype)
    except UsageError as error:  # a parameter that suits smaller elements
        return str(error).removeprefix(f"kernel {variant} is not possible: ")
    return None


def print_kernels(data: dict[str, Any]) -> None:
    """Prints what `kernels` returned: a paragraph for each kernel, and the compiled variants."""
    groups: dict[str, list[dict[str, Any]]] = {use: [] for use in (*_USES.values(), _INSIDE)}
    for k in data["kernels"]:
        groups[_USES.get(k["role"], _INSIDE)].append(k)
    for use, rows in groups.items():
        if rows and len(rows) < len(data["kernels"]):
            console.line(f"-- {use} --")
        _print_paragraphs(rows)
    if compiled := data.get("compiled"):
        _print_compiled(compiled)


def _print_paragraphs(rows: Sequence[dict[str, Any]]) -> None:
    for k in rows:
        console.line(f"{k['kernel']}: {k['summary']}", 4, first=0, style="bold")
        columns = {name: [v[name] for v in k["variants"]] for name in k["variants"][0]}
        values = [f"{x} {', '.join(map(str, dict.fromkeys(v)))}" for x, v in columns.items()]
        facts = {
            "parameters": "; ".join(values),
            "tile": " x ".join(k["tile"]),
            "needs": ", ".join([*k["require"], *k["limits"]]),
            "dtypes": " ".join(k["dtypes"]),
            "layouts": " ".join(k["layouts"]),
            "runs on": " ".join(k["runs_on"]),
            "source": k["source"],
        }
        for name, fact in facts.items():
            if fact:
                console.line(f"{name}: {fact}", 8, first=4)


def _print_compiled(compiled: Sequence[dict[str, Any]]) -> None:
    made = next((row for row in compiled if "refused" not in row), {})
    fields = [f for f in made if f not in ("variant", "arch", "dtype")]
    console.table(
        ["<variant", *(f.replace("_", " ") for f in fields), "<not compiled"],
        [[r["variant"], *(r.get(f, "") for f in fields), r.get("refused", "")] for r in compiled],
        title=f"compiled for {compiled[0]['arch']}, {compiled[0]['dtype']}",
    )
