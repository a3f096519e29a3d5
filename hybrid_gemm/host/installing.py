"""What to type to install what is missing, and which package does not work here."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from ..errors import UnavailableError

LEAST_NUMPY = "1.26"
REQUIRED = "click", "ml_dtypes", "numpy", "rich", "threadpoolctl"


def pip_install(extra: str) -> str:
    """The command that brings one of the package's extras: from this checkout, or by name."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'hybrid-gemm[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"


def unusable(error: BaseException) -> UnavailableError | None:
    """What to say instead of `error`, which was raised while modules were imported, if Python finds
    no package of a name that is required, or a NumPy that is too old or is built for another
    Python. None for other errors."""
    if isinstance(error, ModuleNotFoundError) and error.name in REQUIRED:
        return UnavailableError(
            f"{error.name} is not installed for this Python; to install it: "
            f"{sys.executable} -m pip install {error.name}"
        )
    found = isinstance(error, (ImportError, AttributeError)) and importlib.util.find_spec("numpy")
    if not found or not found.origin:
        return None
    folder = Path(found.origin).parent
    try:
        import numpy
    except ImportError:
        what = f"NumPy in {folder} does not load in Python {sys.version.split()[0]}"
    else:
        if _numbers(numpy.__version__) >= _numbers(LEAST_NUMPY):
            return None
        what = f"NumPy in {folder} is {numpy.__version__}; {LEAST_NUMPY} or newer is needed"
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if folder.parent in {Path(path).absolute() for path in paths}:
        what += " (PYTHONPATH, which a cluster's modules may set, leads there: unset it)"
    return UnavailableError(what)


def _numbers(version: str) -> tuple[int, ...]:
    """The first two of a version."""
    return tuple(map(int, version.split(".")[:2]))
