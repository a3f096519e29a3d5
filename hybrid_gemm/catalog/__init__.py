"""The kernels: what `kernels/*.cu` say of themselves in their headers. Pure: knows no device."""

from .files import (
    VARIABLE,
    directory,
    forget_changed,
    gemm_kernels,
    get,
    helper,
    include_digest,
    included,
    kernels,
    own_directories,
    product,
    product_names,
    text_digest,
)
from .kernel import (
    C_TYPES,
    DTYPES,
    ITEM_SIZE,
    LAYOUTS,
    LISTED_FOR,
    MAX_GRID,
    MAX_THREADS,
    TENSOR_TYPES,
    Kernel,
    Launch,
    Variant,
)

__all__ = [
    "C_TYPES", "DTYPES", "ITEM_SIZE", "LAYOUTS", "LISTED_FOR", "MAX_GRID", "MAX_THREADS",
    "TENSOR_TYPES", "VARIABLE", "Kernel", "Launch", "Variant", "directory", "forget_changed",
    "gemm_kernels", "get", "helper", "include_digest", "included", "kernels", "own_directories",
    "product", "product_names", "text_digest",
]  # fmt: skip
