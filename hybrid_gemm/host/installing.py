"""What to type to install what is missing, and which package does not work here."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from pathlib import Path

from ..errors import UnavailableError, in_one_line

# Packages that are required, and the least version of each, as in pyproject.toml; what others
# import comes first.
REQUIRED = {
    "numpy": "1.26", "ml_dtypes": "0.5", "click": "8.1", "rich": "13", "threadpoolctl": "3.5",
}  # fmt: skip
CUPY = "14.0"  # the least, as in the extras cuda12 and cuda13: older ones do not know bfloat16


def outdated_cupy(version: str) -> str | None:
    """What is wrong with a CuPy of this version; None of one that is new enough."""
    if _numbers(version) >= _numbers(CUPY):
        return None
    newer = f"{pip_install('cuda13')}, or cuda12 for an older driver"
    return f"CuPy is {version}; {CUPY} or newer is needed ({newer})"


def first_cause(error: BaseException) -> BaseException:
    """Of an error that names others: NumPy's and CuPy's own have pages of advice."""
    while error.__cause__:
        error = error.__cause__
    return error


def pip_install(extra: str) -> str:
    """The command that brings one of the package's extras: from this checkout, or by name."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'hybrid-gemm[{extra}]'"
    return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"


def unusable(error: BaseException) -> UnavailableError | None:
    """What to say instead of `error`, which was raised while modules were imported, if Python finds
    no package of a name that is required, or one that is too old or is built for another Python.
    None for other errors."""
    if isinstance(error, ModuleNotFoundError) and error.name in REQUIRED:
        return UnavailableError(
            f"{error.name} is not installed for this Python; to install it: "
            f"{sys.executable} -m pip install {error.name}"
        )
    if not isinstance(error, (ImportError, AttributeError)):
        return None
    said = (_what_is_wrong(name, least) for name, least in REQUIRED.items())
    return next((UnavailableError(what) for what in said if what), None)


def _what_is_wrong(name: str, least: str) -> str | None:
    """With a package that Python finds by this name."""
    found = importlib.util.find_spec(name)
    if not found or not found.origin:
        return None
    place = Path(found.origin)
    if place.name == "__init__.py":
        place = place.parent
    called = "NumPy" if name == "numpy" else name
    try:
        version = _version(name)
    except (ImportError, AttributeError) as error:
        what = (
            f"{called} in {place} does not load in Python {sys.version.split()[0]}: "
            f"{in_one_line(first_cause(error))}"
        )
    else:
        if _numbers(version) >= _numbers(least):
            return None
        what = f"{called} in {place} is {version}; {least} or newer is needed"
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if place.parent in {Path(path).absolute() for path in paths}:
        what += " (PYTHONPATH, which a cluster's modules may set, leads there: unset it)"
    return what


def _version(name: str) -> str:
    """That of the package that is imported, which may have come without metadata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that will be gone, as click's __version__
        version = getattr(importlib.import_module(name), "__version__", None)
    if version:
        return str(version)
    from importlib import metadata  # which takes 50 ms, and no command waits for it

    return metadata.version(name)


def _numbers(version: str) -> tuple[int, ...]:
    """The first two of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
