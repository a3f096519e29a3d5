"""One file an experiment; a new file here is found by itself."""

# As a course would take them; others follow by name.
ORDER = (
    "device_query", "block_size", "row_split", "column_split", "library", "crossover",
    "register_tiles", "shared_tiles", "ladder", "occupancy", "coalescing", "padding",
    "transposed_b", "strassen", "emulation",
)  # fmt: skip
