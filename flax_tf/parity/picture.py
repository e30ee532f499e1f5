"""A picture of a report: the error of every submodule, in the order of execution, against the contract's line."""

import html
import io
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flax_tf.parity.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = 40  # as many names have room under the axis
LABEL_LENGTH = 38  # characters
BLUE, ORANGE, RED, GREY = "#2563a8", "#d98200", "#c62828", "#777777"


def draw_errors(report: Report) -> str:
    """The picture as an SVG element, the same for the same report.

    There is a panel for the outputs in float64 and in each lower precision, and one for the gradients in float64. A
    mark is a row of the report; it links to the element "KIND-INDEX" (such as "output-3", the fourth output), and its
    title says its name and error.
    """
    from matplotlib import rc_context  # seconds to import
    from matplotlib.figure import Figure

    outputs = [row for row in report.rows if row.kind == "output"]
    gradients = [row for row in report.rows if row.kind == "gradient"]
    panels = [(outputs, precision) for precision in ("float64", *report.precisions)] + [(gradients, "float64")]
    panels = [panel for panel in panels if panel[0]]
    # Text stays text, which a reader can search and copy.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flax_tf", "font.size": 9}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has its own
        figure = Figure(figsize=(11, 2.1 * len(panels) + 3.5), layout="constrained")
        grid = figure.subplots(max(len(panels), 1), squeeze=False)[:, 0]
        for axes, (rows, precision) in zip(grid, panels, strict=False):
            _draw(axes, rows, precision, report.culprit)
        for axes, (rows, _), (below, _) in zip(grid, panels, [*panels[1:], ([], "")], strict=False):
            _name_rows(axes, rows if rows is not below else [])
        legend = {label: mark for axes in grid for mark, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(legend.values(), legend.keys(), loc="outside upper left", ncols=4, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _with_titles(buffer.getvalue(), report)


def row_ids(report: Report) -> dict[str, Row]:
    """{id: row} of all rows: "KIND-INDEX", counted within the kind."""
    kinds = {row.kind: [other for other in report.rows if other.kind == row.kind] for row in report.rows}
    return {f"{kind}-{index}": row for kind, rows in kinds.items() for index, row in enumerate(rows)}


def _draw(axes: "Axes", rows: Sequence[Row], precision: str, culprit: str | None) -> None:
    kind, low = rows[0].kind, precision != "float64"
    errors = np.array([row.low[precision].flax if low else row.float64 for row in rows])
    limits = np.array([row.limit(precision) if low else row.limit64 for row in rows])
    passed = np.array([row.ok_in(precision) if low else row.float64 <= row.limit64 for row in rows])
    theirs = np.array([row.low[precision].torch for row in rows]) if low else np.empty(0)
    shown = np.concatenate([errors, limits, theirs])
    shown = shown[(shown > 0) & np.isfinite(shown)]
    bottom, top = (shown.min() / 10, shown.max() * 10) if len(shown) else (1e-17, 1.0)

    def marks(where: np.ndarray, **style) -> None:
        places = np.flatnonzero(where)
        # A colour for each: of marks that are all alike, only the first would get its link.
        axes.scatter(
            places,
            errors[places].clip(bottom, top),
            c=[style.pop("color")] * len(places),
            urls=[f"#{kind}-{index}" for index in places],
            zorder=3,
            clip_on=False,
            **style,
        )

    size = 36 if len(rows) <= LABELS else 14
    edges = np.arange(len(rows) + 1) - 0.5
    axes.stairs(
        limits.clip(bottom, top), edges, baseline=None, color=GREY, linestyle="--", label="the contract's limit"
    )
    if low:
        places = np.arange(len(rows))
        axes.scatter(
            places, theirs.clip(bottom, top), 3 * size, marker="_", color=ORANGE, label="PyTorch's own error", zorder=4
        )
    marks(passed, s=size, color=BLUE, marker="o", label="Flax, within the contract")
    if not passed.all():
        marks(~passed, s=2 * size, color=RED, marker="X", label="Flax, outside the contract")
    found = [
        index for index, row in enumerate(rows) if row.module == culprit and (kind == "output" or not passed[index])
    ]
    if found:
        axes.axvline(found[0], color=RED, linestyle=":", zorder=1)
        # Beside the title, where it hides no mark.
        place = f"first difference (dotted line): {_short(str(culprit))}"
        axes.set_title(place, loc="right", color=RED, fontsize="medium", parse_math=False)
    what = "outputs of the submodules, in the order they run" if kind == "output" else "gradients"
    axes.set_title(f"{precision}: {what}", loc="left", fontweight="bold")
    axes.set(yscale="log", ylim=(bottom, top), xlim=(-0.8, len(rows) - 0.2), ylabel="relative error")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _name_rows(axes: "Axes", rows: Sequence[Row]) -> None:
    """Names under the axis: of every row, or, if there are many, of every so many."""
    places = range(0, len(rows), -(-len(rows) // LABELS) or 1)
    labels = [_short(rows[place].name) for place in places]
    axes.set_xticks(list(places), labels, rotation=90, fontsize=7, parse_math=False)


def _short(name: str) -> str:
    return name if len(name) <= LABEL_LENGTH else f"…{name[1 - LABEL_LENGTH :]}"


def _with_titles(svg: str, report: Report) -> str:
    """The bare element, with what a browser shows when the pointer is over a mark."""
    rows = row_ids(report)

    def titled(link: re.Match) -> str:
        row = rows[link[1]]
        errors = [("float64", row.float64), *((precision, row.low[precision].flax) for precision in row.low)]
        text = f"{row.name}: {', '.join(f'{precision} {error:.1e}' for precision, error in errors)}"
        return f"{link[0]}<title>{html.escape(text)}</title>"

    return re.sub(r'<a xlink:href="#(\w+-\d+)">', titled, svg[svg.index("<svg") :])
