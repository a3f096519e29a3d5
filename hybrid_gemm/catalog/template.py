"""`hybrid-gemm new-kernel NAME`: a kernel of one's own to start from."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from .. import catalog
from ..errors import HybridGemmError, UsageError
from ..host.cache import atomic_write
from ..options import AUTOMATIC_KERNELS

_TEMPLATE = Path(__file__).with_name("new_kernel.cu")  # in which NAME stands for the kernel's name


def text(name: str) -> str:
    """The file's text; `UsageError` unless the name is a C identifier in lower case."""
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name):
        raise UsageError(
            f"{name!r} cannot name a kernel: use lower-case letters, digits and _, a letter first"
        )
    return _TEMPLATE.read_text().replace("NAME", name)


def write(name: str, directory: str | None = None) -> Path:
    """Writes `gemm_NAME.cu`, whole or not at all, where the catalog finds it; returns its path.

    Never overwrites: `UsageError` if a kernel has that name, or the folder cannot be written;
    `HybridGemmError` where the disk is full, say.
    """
    name = name.removeprefix("gemm_")
    content = text(name)
    if name in AUTOMATIC_KERNELS:
        raise UsageError(f"--kernel {name} lets kernels be chosen; give the kernel another name")
    if name in catalog.kernels():
        raise UsageError(f"there is a kernel called {name} already: {catalog.kernels()[name].path}")
    folder = _own_folder() if directory is None else _made(directory)
    path = folder / f"gemm_{name}.cu"
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; give another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"cannot write {path}: no permission in {folder}; name a folder with --directory"
        )
    try:
        atomic_write(path, content.encode())
    except OSError as error:
        raise HybridGemmError(f"could not write {path}: {error.strerror}") from None
    catalog.kernels.cache_clear()
    return path


def _made(directory: str) -> Path:
    """The folder of --directory, which is made where it is not there."""
    if not directory:
        raise UsageError("--directory '' names no folder")
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"--directory {directory} is no folder; name one") from None
    except OSError as error:
        raise UsageError(f"cannot make the folder {directory}: {error.strerror}") from None
    return folder


def _own_folder() -> Path:
    if catalog.own_directories():
        return catalog.own_directories()[0]
    if catalog.directory().parent == Path(__file__).resolve().parents[1]:  # installed
        raise UsageError(
            "the package is installed, and its own folder is not for new kernels: name a folder of "
            f"yours with --directory, or in {catalog.VARIABLE}, which is searched for kernels too"
        )
    return catalog.directory()


def next_steps(name: str, path: Path) -> str:
    """What to do with the new file, as commands."""
    name = name.removeprefix("gemm_")
    known = (catalog.directory(), *catalog.own_directories())
    lines = []
    if path.resolve().parent not in [folder.resolve() for folder in known]:
        folder = shlex.quote(str(path.resolve().parent))
        lines.append(f"export {catalog.VARIABLE}={folder}{os.pathsep}${catalog.VARIABLE}")
    lines += [
        f"hybrid-gemm kernels {name} --compile sm_90        # registers, shared memory, spills",
        f"hybrid-gemm run --kernel {name} --size 200 --verify full --device emulator",
        f"hybrid-gemm run --kernel {name} --check            # every access, barriers, races",
        f"hybrid-gemm run --kernel {name} --check -m 33 -n 65 -k 50 --alpha 2 --beta 1 --trans-a",
        "# and on a GPU:",
        f"hybrid-gemm tune --kernel {name}                   # every combination of parameters",
        f"hybrid-gemm bench --kernels naive,shared_tile,{name},cublas --shapes 1024,4096",
        "hybrid-gemm reproduce ladder --scale full          # your rung among the others",
    ]
    return "\n".join(lines)
