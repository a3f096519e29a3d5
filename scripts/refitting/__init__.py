"""What scripts/refit-models measures and fits: the shapes and kernels of its files."""

from pathlib import Path

from hybrid_gemm import catalog
from hybrid_gemm.bench.drawing import Drawn

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "fitted_h200.json"
TIMES = RESULTS.with_name("fitted_times_h200.json.gz")
MOST_DRAWN = 20_000  # shapes of a seed


def drawn(row: list) -> Drawn:
    """The shape of a row of the results."""
    return Drawn(tuple(row[:3]), row[3], row[4])


def variant_of(name: str) -> catalog.Variant:
    """The variant that a name as `str` gives it stands for."""
    kernel, *params = name.split()
    return catalog.get(kernel).variant({k: int(v) for k, v in (x.split("=") for x in params)})
