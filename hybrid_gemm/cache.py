"""Where compiled kernels and tuning results are kept between runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .errors import UnavailableError


def directory(kind: str) -> Path:
    """The folder for one kind of file, made if it is not there.

    It lies in `$HYBRID_GEMM_CACHE`, else `$XDG_CACHE_HOME/hybrid-gemm`, else
    `~/.cache/hybrid-gemm`. Raises `UnavailableError` if it cannot be made.
    """
    base = os.environ.get("HYBRID_GEMM_CACHE")
    if not base:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        base = Path(caches) / "hybrid-gemm"
    path = Path(base) / kind
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(
            f"cannot make the cache folder {path}: {error.strerror}; "
            "HYBRID_GEMM_CACHE names another place"
        ) from error
    return path


def atomic_write(path: Path, data: bytes) -> None:
    """Writes a whole file or nothing: readers, in other processes too, never see a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
