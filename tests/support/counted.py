"""What models of times count of each kernel, in short: shipped models were fitted to these counts.
Run as a program it writes `counted.json`, once they are fitted to others."""

import hashlib
import itertools
import json
import sys
from pathlib import Path

from hybrid_gemm.catalog import LAYOUTS
from hybrid_gemm.kernel_choice import costs, likeness, model_files
from hybrid_gemm.kernel_choice.fitted import OPERANDS
from hybrid_gemm.kernel_choice.tables import Machine

FILE = Path(__file__).with_name("counted.json")
MACHINE = Machine("NVIDIA H200", 132, 90)
SIDES = (
    (64, 64, 64), (1000, 1000, 1000), (4096, 4096, 4096), (8191, 513, 77), (1, 3000, 20000),
    (2049, 1, 4097), (30, 50, 100000), (70000, 3, 9), (7, 12000, 640), (3000, 5000, 16),
    (5, 300, 70001), (303, 7, 5000), (2000, 9, 33), (9, 2001, 3), (640, 640, 6400),
)  # fmt: skip


def counted() -> dict[str, str | float]:
    """By kernel and mode, a digest of what is counted of its variants at some shapes; and which
    form of the counts that is, by which models of another one are refused."""
    found: dict[str, str | float] = {"form": likeness.CONSTANTS[-1]}
    for mode, dtype in OPERANDS.items():
        data = model_files.shipped(MACHINE, mode)
        assert data is not None
        fitted = model_files.from_data(data, MACHINE).fitted
        variants = sorted((x.variant for x in fitted), key=str)
        for name, group in itertools.groupby(variants, key=lambda v: v.name):
            digest = hashlib.sha256()
            for variant, sides, layout in itertools.product(group, SIDES, LAYOUTS):
                numbers = costs.counts(variant, sides, layout, dtype, MACHINE.multiprocessors)
                digest.update(f"{variant} {' '.join(f'{x:.9g}' for x in numbers)}\n".encode())
            found[f"{name}, {mode}"] = digest.hexdigest()[:12]
    return found


if __name__ == "__main__":
    now, then = counted(), json.loads(FILE.read_text()) if FILE.is_file() else {}
    changed = [x for x in now if x in then and now[x] != then[x]]
    if changed and "form" not in changed:
        sys.exit(f"{', '.join(changed)} changed: raise _COUNTS of likeness.py and fit models again")
    FILE.write_text(json.dumps(now, indent=1) + "\n")
