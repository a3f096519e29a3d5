"""Draws pictures of results as SVG or PNG, with matplotlib.

Published figures are hollow, dashed or hatched and ours solid, so that they differ in grey
too; the colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import UnavailableError, UsageError
from ..host.installing import pip_install
from .chrome_trace import Gantt
from .pictures import Line, Panel, Picture

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^DvPX"
DASHES = ("-", (0, (1, 1.5)), (0, (6, 2, 1, 2)))  # of ours, where there are more than 7 lines
LETTERS = 66  # letters of tick labels that have room side by side
THEIRS = "#555555"
HATCHES = (None, "..", "xx", "--")
# Dark to light, so that they differ in grey too.
PHASE_STYLES: dict[str, dict[str, Any]] = {
    "upload": {"facecolor": "#56B4E9", "hatch": "///"},
    "relay": {"facecolor": "#CC79A7", "hatch": "xxx"},
    "multiply": {"facecolor": "#0B3C5D"},
    "reduce": {"facecolor": "#E69F00", "hatch": "..."},
    "download": {"facecolor": "#F5E9C8"},
}
FORMATS = ("svg", "png")
WIDTH, HEIGHT = {1: 7, 2: 9.2, 3: 10}, 4.8  # inches, by panels; a page scales them to its own
SETTINGS = {
    "font.size": 15, "font.family": "sans-serif",
    # The letters are text in an SVG: readers without the first font have one of its width.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"], "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd", "axes.axisbelow": True,
    "legend.frameon": True, "legend.framealpha": 0.85, "legend.edgecolor": "none",
    "legend.fontsize": 13, "lines.linewidth": 2.2, "hatch.linewidth": 1.2,
    "svg.fonttype": "none", "svg.hashsalt": "hybrid-gemm",
}  # fmt: skip


def needed() -> ModuleType:
    """The matplotlib module. Raises `UnavailableError`, which says how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise UnavailableError(f"plots need matplotlib ({pip_install('plot')})") from None
    return matplotlib


def draw(picture: Picture | Gantt, form: str = "svg", description: str = "") -> bytes:
    """A picture as the bytes of a file; `form` is "svg" or "png".

    `description` goes into an SVG's metadata. Raises `UnavailableError` without matplotlib,
    `UsageError` for another format.
    """
    if form not in FORMATS:
        raise UsageError(f"plots are written as {' or '.join(FORMATS)}, not {form!r}")
    matplotlib = needed()
    with matplotlib.rc_context(SETTINGS):
        figure = _gantt(picture) if isinstance(picture, Gantt) else _panels(picture)
        out = io.BytesIO()
        metadata = {"Date": None, "Description": description} if form == "svg" else None
        figure.savefig(out, format=form, metadata=metadata, dpi=110)
    return out.getvalue()


def _panels(picture: Picture) -> Figure:
    """The panels side by side; those with the picture's own labels share the vertical axis, and
    where bars lie the horizontal one too."""
    from matplotlib.figure import Figure

    count = len(picture.panels)
    tall = max(
        (len(p.lines[0].x) * (1 + len(p.lines)) for p in picture.panels if _across(p)),
        default=0,
    )
    size = WIDTH[count], max(HEIGHT, 1.6 + 0.18 * tall)
    figure = Figure(size, layout="constrained", facecolor="white")
    axes = figure.subplots(1, count, squeeze=False)[0]
    first, last = None, picture.panels[-1]
    labels = [line.label for line in last.lines]
    for panel, ax in zip(picture.panels, axes, strict=True):
        own = bool(panel.y)
        if not own and first is not None:
            ax.sharey(first)
            if _across(panel) and _across(picture.panels[0]):
                ax.sharex(first)
            ax.tick_params(labelleft=False)
        (_bars if panel.bars else _lines)(ax, panel, picture)
        if panel.bars and (panel is last or [x.label for x in panel.lines] != labels):
            _bars_legend(ax, panel)
        if not panel.lines:
            ax.set_axis_off()
        if not own and first is None:
            first = ax
        elif not own:
            ax.set_ylabel("")
        ax.set_title(panel.title, fontsize=15)
    if not last.bars:
        _lines_legend(figure, axes)
    _break_labels(figure, axes)
    return figure


def _break_labels(figure: Figure, axes: Sequence[Axes]) -> None:
    """Breaks the labels of vertical axes that the picture is too low for."""
    figure.draw_without_rendering()
    for ax in axes:
        label = ax.yaxis.label
        box, text = label.get_window_extent(), label.get_text()
        if text and not 0 <= box.y0 < box.y1 <= figure.bbox.height:
            letters = int(len(text) * ax.bbox.height / box.height)
            label.set_text(textwrap.fill(text, max(letters, 1), break_on_hyphens=False))


def _lines_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend for the lines of all panels, above them, where it hides none."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found[label] = handle  # the last panel's, which are ours
    if not found:
        return
    room = int(6.5 * figure.get_figwidth())  # letters in a row; a mark takes as much as five
    columns = max(1, min(len(found), room // (max(map(len, found)) + 5)))
    figure.legend(
        list(found.values()), list(found), loc="outside upper center", ncols=columns
    )  # fmt: skip
    figure.set_figheight(figure.get_figheight() + 0.4 * -(-len(found) // columns))


def _gantt(picture: Gantt) -> Figure:
    """A row for each worker; in it its phases, one under another."""
    from matplotlib.figure import Figure

    phases, count = picture.phases, len(picture.rows)
    figure = Figure(
        (11, 2.2 + max(0.26 * len(phases), 0.5) * count), layout="constrained", facecolor="white"
    )
    ax = figure.subplots()
    thick = 0.8 / max(1, len(phases))
    for i, phase in enumerate(phases):
        style = PHASE_STYLES[phase]
        for y, row in enumerate(picture.rows.values()):
            ax.broken_barh(
                row.get(phase, []), (y - 0.4 + i * thick, 0.9 * thick),
                **{"edgecolor": "black", "linewidth": 0.4, "label": None if y else phase, **style},
            )  # fmt: skip
    ax.set_yticks(range(count), picture.rows)
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.grid(False, axis="y")
    ax.set_xlabel("ms from the start of the run")
    if picture.title:
        figure.suptitle(picture.title, fontsize=15)
    figure.legend(loc="outside lower center", ncols=len(phases) or 1)
    return figure


def _lines(ax: Axes, panel: Panel, picture: Picture) -> None:
    """The panel's lines, its axes and their labels."""
    mixed = len({line.theirs for line in panel.lines}) > 1
    drawn = [line for line in panel.lines if line.x]
    for line in drawn:
        colour = THEIRS if line.theirs and mixed else COLOURS[line.style % len(COLOURS)]
        dashes = DASHES[line.style // len(COLOURS) % len(DASHES)]
        ax.plot(
            line.x, line.y, color=colour, label=line.label,
            marker=MARKERS[line.style % len(MARKERS)],
            linestyle=(0, (4, 2)) if line.theirs else dashes,
            markerfacecolor="white" if line.theirs else colour, markeredgewidth=2,
            markersize=max(6, 12 - 1.3 * line.style),  # equal lines show each other's marks
        )  # fmt: skip
    if picture.ends:
        _write_ends(ax, drawn)
    log_y = picture.log_y if panel.log_y is None else panel.log_y
    _logarithmic(ax.yaxis, ax.set_yscale, log_y, [])
    values = sorted({x for line in drawn for x in line.x})
    room = LETTERS // len(picture.panels)
    _logarithmic(ax.xaxis, ax.set_xscale, picture.log_x and not panel.x, values, room)
    if not (picture.log_x and not panel.x) and len(values) <= 8:
        ax.set_xticks(values)
    ax.set_xlabel(panel.x or picture.x)
    ax.set_ylabel(panel.y or picture.y)
    heights = [y for line in drawn for y in line.y]
    if heights and not log_y and min(heights) < 0.4 * max(heights):
        ax.set_ylim(bottom=0)
    if picture.reference is not None and not panel.y:
        ax.axhline(picture.reference, color="black", linewidth=1, zorder=1)
    if not drawn:
        ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes, color=THEIRS)


def _number(value: float) -> str:
    """A value as it stands beside its mark: three digits, and never an exponent above them."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _write_ends(ax: Axes, lines: Sequence[Line]) -> None:
    """The last value of each line beside it; those of the highest and lowest keep clear."""
    ends = sorted(line.y[-1] for line in lines)
    for line in lines:
        y = line.y[-1]
        aside = 6 * ((y == ends[-1]) - (y == ends[0])) if len(ends) > 1 else 0
        ax.annotate(
            _number(y), (line.x[-1], y), (9, aside),
            textcoords="offset points", va="center", fontsize=12, annotation_clip=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )  # fmt: skip
    ax.margins(x=0.14)


def _logarithmic(
    axis: Axis, set_scale: Callable[..., None], wanted: bool, values: Sequence, room: int = 0
) -> None:
    """A logarithmic axis with plain numbers: at the `values` themselves where they are few, or
    at those powers of two among them whose labels take at most `room` letters."""
    if not wanted:
        return
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    if not values:
        set_scale("log")
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        low, high = axis.get_data_interval()
        if low > 0 and high < 30 * low:  # a decade alone has too few marks
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        set_scale("log", base=2)
        shown = values if len(values) <= 8 else [v for v in values if v & (v - 1) == 0]
        while len(shown) > 1 and sum(len(str(v)) + 2 for v in shown) > room:
            shown = shown[::-1][::2][::-1]  # the largest stays
        axis.set_major_locator(FixedLocator(shown))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _across(panel: Panel) -> bool:
    """Whether bars are horizontal: where there are many, or names are long."""
    if not (panel.bars and panel.lines):
        return False
    names = panel.lines[0].x
    return len(names) > 4 or any(len(name) > 12 for name in names)


def _one_each(panel: Panel) -> bool:
    """Whether each name has a bar of one line alone: then the names tell the lines apart."""
    found = zip(*(line.y for line in panel.lines), strict=True)
    return all(sum(value is not None for value in values) == 1 for values in found)


def _bars(ax: Axes, panel: Panel, picture: Picture) -> None:
    """The panel's groups of bars with their values, its axes and their labels."""
    if not panel.lines:
        return
    names, count = panel.lines[0].x, 1 if _one_each(panel) else len(panel.lines)
    across = _across(panel)
    thick = 0.8 / count
    for i, line in enumerate(panel.lines):
        places = [j + (i % count - (count - 1) / 2) * thick for j in range(len(names))]
        values = [v or 0 for v in line.y]
        bars = (ax.barh if across else ax.bar)(places, values, thick, **_look(line))
        ax.bar_label(bars, [_number(v) if v else "" for v in line.y], padding=3, fontsize=11)
    label = panel.y or picture.y
    if across:
        ax.set_yticks(range(len(names)), [textwrap.fill(n, 34) for n in names])
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel(label)
        ax.grid(False, axis="y")
        ax.margins(x=0.12)
    else:
        ax.set_xticks(range(len(names)), names)
        ax.set_xlabel(panel.x or picture.x)
        ax.set_ylabel(label)
        ax.grid(False, axis="x")
        ax.margins(y=0.1)


def _look(line: Line) -> dict[str, Any]:
    """The label, colours and hatch of a line's bars."""
    if line.theirs:
        return {"label": line.label, "edgecolor": THEIRS, "color": "white", "hatch": "///"}
    colour, hatch = COLOURS[line.style % len(COLOURS)], HATCHES[line.style % len(HATCHES)]
    return {"label": line.label, "edgecolor": "white", "color": colour, "hatch": hatch}


def _bars_legend(ax: Axes, panel: Panel) -> None:
    """The legend of several groups of bars, above the panel, which they fill."""
    if len(panel.lines) > 1 and not _one_each(panel):
        long = _across(panel) or sum(len(line.label) for line in panel.lines) > 36
        ax.legend(
            loc="lower left", bbox_to_anchor=(0, 1.06 if panel.title else 1.0),
            ncols=1 if long else len(panel.lines),
        )  # fmt: skip
