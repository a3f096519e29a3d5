"""Matrices for tests: whole numbers, parts of larger ones on a device, and another library's."""

import types

import numpy as np

# Ways in which a matrix equal to another one lies in memory.
LIES = {
    "rows": lambda x: x.copy(),
    "columns": np.asfortranarray,
    "part": lambda x: np.pad(x, 3)[3:-3, 3:-3],
    "steps": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "backwards": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
}
PARTS_OF_C = np.s_[:], np.s_[0], np.s_[:1], np.s_[:, :1], np.s_[:1, :1], np.s_[0, :1]  # broadcast


def integers(rng, shape, dtype="float32"):
    """Whole numbers whose float32 products are exact."""
    return rng.integers(-4, 5, shape).astype(dtype)


def poison(dtype):
    """A value that no test computes, to find out what was read or written by mistake."""
    dtype = np.dtype(dtype)
    return -(2**30) if dtype.kind == "i" else np.asarray(np.nan, dtype)[()]


def padded(device, host, pad, poison, rows=1):
    """Copies a matrix to the device into a larger one full of `poison`: `rows` rows above and below
    it, and `pad` columns after it. Returns the larger matrix and the view of the copy."""
    height, width = host.shape
    inner = slice(rows, rows + height), slice(width)
    whole = np.full((height + 2 * rows, width + pad), poison, host.dtype)
    whole[inner] = host
    stream = device.stream()
    there = device.empty(*whole.shape, host.dtype.name)
    device.copy(there, whole, stream)
    stream.synchronize()
    return there, there[inner]


def fetch(device, matrix):
    """A matrix of the device, copied to the host."""
    stream = device.stream()
    host = np.empty(matrix.shape, matrix.dtype)
    device.copy(host, matrix, stream)
    stream.synchronize()
    return host


def copied(cupy, lying):
    """A view on a GPU of all the memory that a view of the host is of; it lies there as here."""
    whole = lying if lying.base is None else lying.base
    at = lying.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    there = cupy.asarray((whole if whole.flags.c_contiguous else whole.T).view("u1"))
    return cupy.ndarray(lying.shape, lying.dtype, there.data + at, lying.strides)


class WithPointer(np.ndarray):
    """A NumPy array whose address is at `data.ptr`, as a CuPy array's is."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


class Other:
    """An array of a library of which nothing is known but DLPack and the array API."""

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    ndim = property(lambda self: self.array.ndim)

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda x: Other(np.from_dlpack(x)))
