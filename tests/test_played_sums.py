"""How Hopper's kernels read and write C where beta scales it, by their own text on the CPU: these
kernels run on no emulator."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLAYED = ROOT / "tests" / "support" / "played_sums.cpp"
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
TENSOR = r"struct alignas\(2 \* OUT\) Pair \{.*?^\};|^struct Result \{.*?(?=^#if OUT == 4)"
ACROSS = r"^__device__ __forceinline__ int my_row\(\) \{.*?^\}|^struct Result \{.*?^\};"


def text(file: str, pattern: str) -> str:
    """The parts of a kernel's file that are played; `Result` up to where sums are stored."""
    found = re.findall(pattern, (ROOT / "kernels" / file).read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 2, f"{file} has another form"
    return "\n".join(found) + ("" if found[-1].endswith("};") else "};")


def played(folder: Path, code: str, **defined: int) -> str:
    """What the program says."""
    result, program = folder / "result.h", folder / "played"
    shares = re.compile(r"^    // Where the sums of a share.*?^    \}\n", re.MULTILINE | re.DOTALL)
    result.write_text(shares.sub("", code))  # they go to matrices of their own
    how = ["-std=c++17", "-Og", "-fno-strict-aliasing", "-w", *SANITIZED, f'-DRESULT="{result}"']
    how += [f"-D{name}={value}" for name, value in defined.items()]
    built = subprocess.run(["g++", *how, PLAYED, "-o", program], capture_output=True, text=True)
    if built.returncode and "cannot find" in built.stderr:
        pytest.skip(f"g++ has no sanitizer here: {built.stderr.splitlines()[-1]}")
    assert not built.returncode, built.stderr[:2000]
    done = subprocess.run([program], capture_output=True, text=True)
    return done.stdout + done.stderr[:2000]


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@needs_compiler
@pytest.mark.parametrize(("out", "bn"), [(4, 64), (4, 192), (2, 256)])
def test_sums_are_added_to_c_as_it_lies(tmp_path, out, bn):
    said = played(tmp_path, text("wgmma_result.cuh", TENSOR), OUT=out, BN=bn)
    assert said == "630 products, 0 elements wrong\n"


@needs_compiler
@pytest.mark.parametrize("turned", [0, 1])
def test_those_of_an_operand_across_k_are_stored(tmp_path, turned):
    said = played(tmp_path, text("wgmma_across.cu", ACROSS), OUT=4, BN=128, TURNED=turned, ACROSS=1)
    assert said == "630 products, 0 elements wrong\n"


@needs_compiler
@pytest.mark.parametrize(
    ("out", "right", "wrong"),
    [
        (4, "min(row + 8 * half, m - 1)", "(row + 8 * half)"),  # reads beyond C
        (4, "col + c + 1 < n ?", "col + c < n ?"),
        (4, "4 * (first + j) + 2 * half", "4 * (first + j)"),  # of the other row
        (4, "beta == 0", "beta > 9"),
        (2, "rows % 16 == 0 && col + BN <= n", "rows % 16 == 0"),
        (2, "rows % 16 == 0 && col + BN <= n", "col + BN <= n"),  # off 16 bytes
        (2, "exchange<1>(pairs), exchange<2>(pairs)", "exchange<1>(pairs)"),
        (2, "upper ? values[low] : values[high], BIT", "values[high], BIT"),
        (2, "const bool upper = threadIdx.x & BIT", "const bool upper = threadIdx.x & 1"),
    ],
)
def test_faults_are_found(tmp_path, out, right, wrong):
    code = text("wgmma_result.cuh", TENSOR)
    assert right in code
    said = played(tmp_path, code.replace(right, wrong), OUT=out, BN=64)
    assert "AddressSanitizer" in said or not said.endswith(" 0 elements wrong\n"), said
