"""The chart of what `results.json` says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def chart(results: Mapping[str, Any], path: Path) -> None:
    """Draws how many times better than the other side each row is (faster, smaller), with its bars."""
    bars = [(row["name"], bar) for row in results["rows"] for bar in row["bars"] if bar["reached"] is not None]
    labels = [f"{name}: {'1 / ' if bar['at_most'] else ''}{bar['what']}" for name, bar in bars]
    reached, least, aim = (
        [bar[field] ** (-1 if bar["at_most"] else 1) for _, bar in bars] for field in ("reached", "least", "aim")
    )
    figure = Figure(figsize=(10, 1.5 + 0.34 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    heights = range(len(bars))
    axes.barh(heights, reached, color=["tab:green" if bar["met"] else "tab:orange" for _, bar in bars])
    axes.plot(least, heights, "k|", markersize=14, label="at least")
    axes.plot(aim, heights, "kD", markersize=4, fillstyle="none", label="the aim")
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.set_yticks(heights, labels)
    axes.invert_yaxis()
    hardware = results["hardware"]
    axes.set_title(f"Times better, on {hardware['cores']} cores of an {hardware['cpu']}, {results['date']}")
    axes.legend()
    figure.savefig(path, dpi=120)
