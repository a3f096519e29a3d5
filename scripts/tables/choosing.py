"""Which arithmetic to choose: docs/choosing.md."""

import json

from . import ROOT, grid, kernel_rows, paragraphs, result

SIDE = 8192  # of the speeds
K = 4096  # of the errors
WORDS = {  # how it is asked for, memory for an element on a GPU, and when to take it
    "fp32": ("float32 arrays, the default", "4",
             "You want what NumPy and BLAS give, or have no reason to choose."),
    "fp32x3": ("float32 arrays, `compute=\"fp32x3\"`", "4, and 8 for A and B packed",
               "Large float32 products on tensor cores, as accurate as fp32 on most data."),
    "tf32": ("float32 arrays, `compute=\"tf32\"`", "4",
             "Three digits are enough, and the range of float32 is needed."),
    "float16": ("float16 arrays", "2",
                "Data is float16 already, or three digits and magnitudes from 6e-5 to 65504 do."),
    "bfloat16": ("bfloat16 arrays (ml_dtypes)", "2",
                 "Data is bfloat16 already, or two digits do and float32's range is needed."),
    "float64": ("float64 arrays", "8",
                "More than seven digits are needed; for references."),
    "int32": ("arrays of integers up to 32 bits", "4",
              "Whole numbers: exact, but for wrapping around at 2^bits as NumPy does."),
}  # fmt: skip
RESULTS = {"fp32x3": "fp32x3", "tf32": "tf32", "float16": "narrow", "bfloat16": "narrow"}


def choices() -> str:
    """Error, speed and memory of each arithmetic, and when to take it."""
    error, fastest = _errors(), _rates()
    title = (
        "Speed is that of the fastest kernel measured, cuBLAS included, on NVIDIA H200s at m = n = "
        f"k = {SIDE}: device time, data on the GPU, packing included ([strict fp32, float64, "
        "int32](../hybrid_gemm/kernel_choice/tuned/nvidia_h200.json), "
        "[fp32x3](results/named_fp32x3_h200.json), [TF32](results/named_tf32_h200.json), "
        "[16 bits](results/named_narrow_h200.json)). Error "
        "is the Frobenius norm of the error over that of C, for standard normal float32 data at "
        f"k = {K} ([fp32, fp32x3, TF32 on an H200]"
        "(results/accuracy_h200.json), [the others on the emulator]"
        "(results/dtypes_emulator.json))."
    )
    table = []
    for name, (how, size, when) in WORDS.items():
        lost = f"{error[name]:.1e}" if error[name] else "0"
        table.append([name, how, lost, f"{fastest[name]:.0f}", size, when])
    columns = ["<arithmetic", "<how to ask", "error", "TFLOP/s", "<bytes an element", "<when"]
    return paragraphs(title, grid(columns, table))


def _errors() -> dict[str, float]:
    found = {
        row["way"]: row["frobenius"]
        for row in result("accuracy")["rows"]
        if (row["data"], row["k"]) == ("normal", K)
    }
    emulated = json.loads((ROOT / "docs/results/dtypes_emulator.json").read_text())["rows"]
    return found | {row["dtype"]: row["frobenius"] for row in emulated if row["k"] == K}


def _rates() -> dict[str, float]:
    """TFLOP/s (integers: 10^12 operations a second) of the fastest measured kernel."""
    table = json.loads((ROOT / "hybrid_gemm/kernel_choice/tuned/nvidia_h200.json").read_text())
    found: dict[str, float] = {}
    for row in table["rows"]:
        if (row["m"], row["n"], row["k"], row["layout"]) == (SIDE, SIDE, SIDE, "nn"):
            name = row["dtype"].replace("float32", "fp32")
            found[name] = max(found.get(name, 0), 2 * SIDE**3 / row["time_ms"] / 1e9)
    for name, file in RESULTS.items():
        found[name] = max(
            row["gflops"] / 1e3
            for row in kernel_rows(file)
            if (row["m"], row["n"], row["k"], row["layout"]) == (SIDE, SIDE, SIDE, "nn")
            and name in (row["dtype"], row["compute"].partition(" ")[0])
        )
    return found
