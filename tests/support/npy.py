"""Writing .npy files."""

import os
import stat
import subprocess

from hybrid_gemm.arrays.npy_files import NpyWriter


def write(path, c, **options):
    with NpyWriter(path, c.shape, c.dtype, **options) as writer:
        writer.array[...] = c


def in_memory(folder):
    """Whether a folder is in a filesystem without a disk, whose pages nothing can drop."""
    done = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True)
    return done.stdout.strip() in ("tmpfs", "ramfs")


def folders_refuse_fsync(monkeypatch, error: int) -> list:
    """Has the disk refuse to sync folders with this number of an error; gives the refusals."""
    real, refused = os.fsync, []

    def fsync(descriptor):
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return real(descriptor)
        refused.append(descriptor)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", fsync)
    return refused
