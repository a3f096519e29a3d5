"""The cache folder: compiled kernels and measured times, kept from one run to the next."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from ..errors import UnavailableError


def directory(kind: str) -> Path:
    """The folder for one kind of file ("tuned", "host", ...), made if it is not there.

    It lies in `$HYBRID_GEMM_CACHE`, else `$XDG_CACHE_HOME/hybrid-gemm`, else
    `~/.cache/hybrid-gemm`. Raises `UnavailableError` if it cannot be made.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = os.environ.get("HYBRID_GEMM_CACHE") or Path(caches) / "hybrid-gemm"
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
    """Writes a whole file or nothing, so that no reader, of any process, sees part of it.

    A file that was there is replaced, and the new one has its permissions. Raises `OSError` if
    the disk refuses.
    """
    name = path.with_name(f".hybrid-gemm-{secrets.token_hex(8)}.tmp")
    try:
        # Made by open, not mkstemp, so that the umask gives the usual permissions.
        with open(name, "xb") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
