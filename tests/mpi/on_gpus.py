"""Runs tests/mpi on 1, 2 and 4 GPUs with 1 to 4 ranks: python tests/mpi/on_gpus.py OUT.json

Says for each transport how often it was tried, and why it was not where it was not."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.command import environment  # noqa: E402  (found by the line above)
from support.ranks import MPI_ENVIRONMENT, MPIRUN  # noqa: E402

RUNS = [(4, 4), (1, 2), (2, 2), (1, 3), (2, 4), (4, 3), (1, 1)]  # GPUs, ranks
LIMIT_S = 230


def _run(gpus: int, ranks: int, timeout: float):
    return subprocess.run(
        [MPIRUN, "-n", str(ranks), "--bind-to", "none", sys.executable, "-m", "pytest", "-q",
         "-rs", "-p", "no:cacheprovider", "--color=no", str(HERE), "-m", "gpu"],
        capture_output=True, text=True, timeout=timeout,
        env=environment(**MPI_ENVIRONMENT, CUDA_VISIBLE_DEVICES=",".join(map(str, range(gpus)))),
    )  # fmt: skip


def main(out: str) -> int:
    rows, began = [], time.monotonic()
    for gpus, ranks in RUNS:
        started = time.monotonic()
        left = LIMIT_S - (started - began)
        try:
            done = _run(gpus, ranks, max(1, left))
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode() + (error.stderr or b"").decode()
            rows.append({"gpus": gpus, "ranks": ranks, "exit_code": 124, "tail": output[-4000:]})
            print(f"{ranks} ranks on {gpus} GPUs: no time left", flush=True)
            Path(out).write_text(json.dumps(rows, indent=1))
            continue

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
