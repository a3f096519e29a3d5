"""Runs kernels of which a checker watches each memory access:

python -m support.checked_accesses emulator|cuda kernels|tensor-cores

The emulator's are checked by AddressSanitizer, in the environment that
`sanitized_environment()` gives; those of a GPU by compute-sanitizer, which starts this program.
"""

import sys

from .devices import open_device
from .kernels import GEMMS, check_every_kernel
from .tensor_cores import check_split_products


def main(kind: str, what: str) -> None:
    device = open_device(kind, **({"sanitize": True} if kind == "emulator" else {}))
    if what == "tensor-cores":
        device.processors = max(8, device.processors)  # so that k is cut
        names = ["mma", *(["wgmma"] if device.capability == 90 else [])]
        for name in names:
            check_split_products((device, name))
        print(f"clean: products on tensor cores by {' and '.join(names)}")
        return
    variants = GEMMS
    if kind == "emulator":  # where each has to be compiled: the default variant of each kernel
        variants = list({v.name: v for v in reversed(GEMMS)}.values())
    print(f"clean: {check_every_kernel(device, variants)} variants and the passes")


if __name__ == "__main__":
    main(*sys.argv[1:])
