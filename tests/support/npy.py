"""Writing .npy files."""

from hybrid_gemm.arrays.npy_files import NpyWriter


def write(path, c, **options):
    with NpyWriter(path, c.shape, c.dtype, **options) as writer:
        writer.array[...] = c
