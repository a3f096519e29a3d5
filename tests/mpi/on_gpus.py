"""Runs tests/mpi on 1, 2 and 4 GPUs with 1 to 4 ranks: python tests/mpi/on_gpus.py OUT.json

Says for each transport how often it was tried, and why it was not where it was not."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
RUNS = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 4), (4, 3), (4, 4)]  # GPUs, ranks
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def main(out: str) -> int:
    rows = []
    for gpus, ranks in RUNS:
        started = time.monotonic()
        done = subprocess.run(
            ["mpirun", "-n", str(ranks), "--bind-to", "none", sys.executable, "-m", "pytest", "-q",
             "-rs", "-p", "no:cacheprovider", "--color=no", str(HERE), "-k", "cuda"],
            capture_output=True, text=True, timeout=200,
            env={**os.environ, **ENVIRONMENT,
                 "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))},
        )  # fmt: skip
        rows.append({
            "gpus": gpus, "ranks": ranks, "exit_code": done.returncode,
            "seconds": round(time.monotonic() - started, 1),
            "passed": re.findall(r"(\d+) passed", done.stdout),
            "skipped": sorted(set(re.findall(r"SKIPPED.*", done.stdout))),
            "tail": "" if done.returncode == 0 else (done.stdout + done.stderr)[-4000:],
        })  # fmt: skip
        print({x: y for x, y in rows[-1].items() if x != "skipped"}, flush=True)
        Path(out).write_text(json.dumps(rows, indent=1))
    return max(row["exit_code"] for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
