"""What an installed hybrid-gemm must do, with nothing but what its wheel brings.

    cd /tmp && ENVIRONMENT/bin/python CHECKOUT/tests/installed.py

`scripts/packages` runs it in a bare environment of each Python.
"""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np

import hybrid_gemm as hg
from hybrid_gemm import catalog

COMMAND = Path(sys.executable).parent / "hybrid-gemm"


def command(*arguments: str) -> str:
    """What the command prints; it must succeed."""
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main() -> None:
    package = Path(hg.__file__).parent
    assert package.is_relative_to(sys.prefix), f"{package} is not what was installed"
    assert (package / "py.typed").is_file()
    assert len(catalog.kernels()) > 10 and catalog.directory() == package / "kernels"
    version = metadata.version("hybrid-gemm")
    assert hg.__version__ == version and command("--version").strip() == f"hybrid-gemm {version}"

    a = np.arange(35 * 50, dtype="float32").reshape(35, 50) % 7
    devices = ["cpu", "emulator"] if shutil.which("g++") else ["cpu"]
    for device in devices:
        for split in ("rows", "cols"):
            c = hg.gemm(a, a.T, device=device, threads=2, split=split)
            assert (c == a @ a.T).all(), (device, split)
        run = "run", "--size", "65", "--device", device, "--verify", "full"
        assert "verification passed" in command(*run)
    assert "double_buffered" in command("kernels")
    assert "python: " in command("info")
    print(f"hybrid-gemm {version} works on Python {sys.version.split()[0]}: {', '.join(devices)}")


if __name__ == "__main__":
    main()
