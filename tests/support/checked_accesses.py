"""Runs kernels of which a checker watches each memory access:

python -m support.checked_accesses emulator|cuda kernels|thin|tensor-cores|checks|few

The emulator's are checked by AddressSanitizer, in the environment that
`sanitized_environment()` gives; those of a GPU by compute-sanitizer, which starts this program.
"few" is one or two of each kind.
"""

import sys
from unittest import mock

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.devices.checksums import ExactLimits, KernelChecksums, Limits
from hybrid_gemm.kernel_choice import tensor_cores

from .devices import open_device
from .kernels import GEMMS, check_every_kernel
from .lines import (
    ENDS,
    FEW_ENDS,
    GEMV,
    SKINNY,
    THIN,
    THIN_SHAPES,
    cases,
    check_ends,
    check_lines,
    few_blocks,
)
from .stacks import CASES, check_stack
from .tensor_cores import check_split_products, multiply, operands

FEW_THIN = ("gemv", "tall")
KINDS = ("kernels", "thin", "tensor-cores", "checks")


def main(kind: str, what: str) -> None:
    device = open_device(kind, **({"sanitize": True} if kind == "emulator" else {}))
    check = {
        "kernels": check_kernels, "thin": check_thin, "tensor-cores": check_tensor_cores,
        "checks": check_sums,
    }  # fmt: skip
    few = what == "few"
    for each in KINDS if few else (what,):
        print(f"clean: {check[each](device, few)}")


def check_kernels(device, few: bool) -> str:
    """Kernels of products, passes, and stacks."""
    variants, stacks = GEMMS, CASES
    if device.kind == "emulator":  # where each has to be compiled: the default variant of each
        variants = list({v.name: v for v in reversed(GEMMS)}.values())
        stacks = [x for x in CASES if x[1] == "float16"]
    if few:
        variants = [v for v in variants if v.name in ("naive", "conflict_free")]
        stacks = stacks[:1]
    count = check_every_kernel(device, variants)
    for i, (variant, dtype) in enumerate(stacks):
        for layout in catalog.LAYOUTS if device.kind == "cuda" else (("nt", "tn")[i % 2],):
            check_stack(device, variant, dtype, layout, np.random.default_rng(i))
    return f"{count} variants, the passes, and stacks by {len(stacks)} variants and dtypes"


def check_thin(device, few: bool) -> str:
    """C with a thin side."""
    cuda = device.kind == "cuda"
    thin = THIN if cuda else [(few_blocks(v), x) for v, x in THIN[1::11]]
    rows = [*cases(GEMV), *cases(SKINNY)] if cuda else [*cases(GEMV)[::9], *cases(SKINNY)[::9]]
    if few:
        thin, rows = [next(x for x in thin if x[0].name == name) for name in FEW_THIN], rows[:1]
    for i, (variant, dtype) in enumerate(thin):
        shapes = THIN_SHAPES[variant.name]
        for layout in catalog.LAYOUTS if cuda else (("nt", "tn")[i % 2],):
            rng = np.random.default_rng(i)
            check_lines(device, variant, dtype, layout, shapes, rng, rows_around=0)
    for variant, dtype in rows:
        for layout in catalog.LAYOUTS if cuda else ("nn", "tt")[: 1 if few else 2]:
            if variant.params.get("OUT") != 4:
                ends = FEW_ENDS if variant.kernel in SKINNY else ENDS
                check_ends(device, variant, dtype, layout, np.random.default_rng(0), ends)
    return f"C with a thin side by {len(thin)} variants and dtypes"


def check_tensor_cores(device, few: bool) -> str:
    """Products on tensor cores, with the packing of operands."""
    device.processors = max(8, device.processors)  # so that k is cut
    names = ["mma", *(["wgmma"] if device.capability == 90 else [])]
    if few:
        multiply((device, "mma"), *operands("normal", 67, 130, 71)[:2], terms=3, pad=3)
        return "a product on tensor cores by mma"
    for name in names:
        check_split_products((device, name))
    # Eight processors make tiles in two rounds, of which the last is cut. The emulator cuts
    # none of them: the products above would be the same again.
    device.processors, sides = 8, (520, 300, 200) if device.kind == "cuda" else (260, 130, 200)
    with mock.patch.object(tensor_cores, "_PARTS_US", -1e9):
        tensor_cores.cut.cache_clear()
        if device.kind == "cuda":
            check_split_products((device, names[-1]))
        for terms in (1, 3):
            multiply((device, names[-1]), *operands("normal", *sides)[:2], terms=terms)
    return f"products on tensor cores by {' and '.join(names)}"


# Of 1,300 rows the product has shares of k. Of 9,400 each block sums several groups up.
SUMMED = [(1, 1), (37, 5), (65, 65), (70, 130), (64, 128), (3, 9_001), (1_300, 2), (9_400, 2)]


def check_sums(device, few: bool) -> str:
    """The sums of checked products, of matrices of odd sides in each storage order. Integers are
    read as floating point of their size is: what they add are their sums and their judge."""
    sums, stream, rng, count = KernelChecksums(device), device.stream(), np.random.default_rng(1), 0
    for dtype in ("float32",) if few else ("float32", "float16", "float64", "int32"):
        exact = dtype == "int32"
        for i, shape in enumerate(SUMMED[2:3] if exact or few else SUMMED):
            both = exact or device.kind == "cuda"
            for order in "CF" if both else "CF"[(i + len(dtype) + (dtype == "float16")) % 2]:
                host = np.asarray(4 * rng.standard_normal(shape), dtype, order=order)
                with device.using(stream):
                    there = device.empty_like(host, dtype)
                    device.copy(there, host, stream)
                    got = sums.sums(there, stream)
                    count += 1
                    if shape[0] > 9_000:
                        continue
                    sums.bits(there, stream)
                    for alone in (True, False):
                        with mock.patch.object(KernelChecksums, "_alone", lambda *_, x=alone: x):
                            product = sums.product(there.T[:90], there[:, :90], stream)
                    sums.product(there.T[None, :90], there[None, :, :90], stream)  # of stacks
                    if shape[0] == shape[1]:
                        limits = (
                            ExactLimits(1, 5, 2**32 - 1) if exact else Limits(1, 0.5, 1, 1, 1, 1, 0)
                        )
                        sums.judge(limits, product, got, got, stream)
    return f"the sums of {count} matrices"


if __name__ == "__main__":
    main(*sys.argv[1:])
