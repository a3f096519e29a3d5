"""Sizes by which small products are cut and copied as large ones are."""

from hybrid_gemm.execution import staging
from hybrid_gemm.kernel_choice import choose
from hybrid_gemm.planning import on_grid, planner

PANELS = {
    "PART_BYTES": 256, "PART_SIDE": {"A": 8, "B": 8}, "PANEL_ELEMENTS": 64, "PANEL_ROWS": 8,
    "PAIR_START_MS": 1e-9,
}  # fmt: skip
TURNS = {"LEAST_CHUNK": 8, "LEAST_TILE": 8, "LARGEST_PART_BYTES": 4096}
SLOTS = {"SLOT_BYTES": 1000, "NATIVE_BYTES": 1000, "SMALL_BYTES": 300}


def small_panels(monkeypatch) -> None:
    """Parts of A and B, and panels of C, of a few hundred bytes; the emulator multiplies them by a
    kernel that does not compute a tile of 128 x 128 for each."""
    monkeypatch.setitem(choose.AUTO, "emulator", ("shared_tile",))
    for name, value in PANELS.items():
        monkeypatch.setattr(on_grid, name, value)
    monkeypatch.setattr(planner, "PART_SIDE", PANELS["PART_SIDE"])


def small_turns(monkeypatch) -> None:
    """What has not enough memory is multiplied in tiles and chunks of 8 and more."""
    for name, value in TURNS.items():
        monkeypatch.setattr(planner, name, value)
    monkeypatch.setattr(on_grid, "LARGEST_PART_BYTES", TURNS["LARGEST_PART_BYTES"])


def small_slots(monkeypatch) -> None:
    """Copies go through slots of a thousand bytes."""
    for name, value in SLOTS.items():
        monkeypatch.setattr(staging, name, value)
