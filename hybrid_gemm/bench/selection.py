"""What is timed, by name: series of shapes, and variants of kernels."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from .. import catalog, devices
from ..catalog import LISTED_FOR, Variant
from ..errors import UsageError
from .study import Shape

SERIES: dict[str, list[Shape]] = {
    # S1's series: K = 1024, m = n
    "published": [
        (m, m, 1024)
        for m in (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
                  12288, 16384)
    ],
}  # fmt: skip


def multiprocessors(kind: str) -> int:
    """Of the GPU on which kernels are timed; elsewhere what their variants are listed for."""
    return devices.open_first(kind).processors if devices.are_gpus(kind) else LISTED_FOR


def select(
    names: Sequence[str] | None, all_params: bool, params: Mapping[str, int], device: str = "auto"
) -> list[Variant]:
    """Variants of the kernels called `names` (default: each that multiplies on the device); `*` and
    `?` in a name stand for any letters, and for one.

    With `all_params` every listed variant, else each kernel's first. `params` replaces these
    parameters in each kernel that has them; `UsageError` for one that none has. On a GPU other
    parameters that count blocks of the whole GPU are for its multiprocessors.
    """
    kind, _why = devices.choose(device)
    if names:
        every = [kernel.name for kernel in catalog.gemm_kernels()]
        kernels = [catalog.product(name) for name in matching(names, every)]
    else:
        kernels = [k for k in catalog.gemm_kernels() if kind in k.runs_on]
    known = {p for kernel in kernels for p in kernel.params[0]}
    if unknown := params.keys() - known:
        raise UsageError(f"no kernel here has the parameters {', '.join(sorted(unknown))}")
    count = multiprocessors(kind)
    out: list[Variant] = []
    for kernel in kernels:
        listed = kernel.variants() if all_params else kernel.variants()[:1]
        for variant in listed:
            mine = {name: value for name, value in params.items() if name in variant.params}
            variant = variant.for_multiprocessors(count, mine)
            variant = kernel.variant({**variant.params, **mine})
            if variant not in out:
                out.append(variant)
    return out


def matching(patterns: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names in `patterns`, each with `*`, `?` or `[` replaced by those of `known` that match.
    Raises `UsageError` for a pattern that matches none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        glob = set(pattern) & set("*?[")
        hits = fnmatch.filter(known, pattern) if glob else [pattern]
        if not hits:
            raise UsageError(f"no kernel is like {pattern!r}; there are {', '.join(known)}")
        found |= dict.fromkeys(hits)
    return list(found)
