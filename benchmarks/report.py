"""The table in Markdown and the chart of what `results.json` says."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flax_tf.files import replacing

SIDES = {"ours": "ours", "torch_eager": "PyTorch eager", "torch_compile": "torch.compile"}
OTHERS = {
    "nnx_jit": "plain `nnx.jit`",
    "ours_cached": "ours, in a second process",
    "torch_compile_cached": "torch.compile, in a second process",
    "torch_mmap": "PyTorch with `mmap=True`",
}

HEAD = """# Speed and memory

Written by `make bench` from `benchmarks/results.json`; do not edit. Measured on {date}, on {cores} cores of an {cpu} with
{memory_gb} GB: {versions}.

Each side of each row runs in fresh processes, in turn, for several rounds; PyTorch is the reference as it is, in `torch_ref`, as
one runs it who knows PyTorch: fused AdamW, gradients set to None, inference mode, and a hand-written cache of keys and values in generation
whose classifier sees the last position alone. Both sides compute in float32 on all cores. A time is the median over the rounds of the median
step of a process, after two calls to warm up; in brackets are the lowest and highest round. Memory is the resident memory
of the process at its highest, with interpreter, libraries and compilation in it.
"""

PORTING = """
`port-1gb`: no tensor is made on PyTorch's side but those of the file (the model is built on the meta device, and takes
them by `assign=True`), and both sides read every page once at the end, so that what is mapped and not read does not count as loaded. Extra
memory is the peak less what the process held before it opened the file, pages of a mapped file included.
"""


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.3g} s"


def megabytes(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} MB"


def with_range(row: Mapping[str, Any], side: str) -> str:
    if row.get(f"{side}_s") is None:
        return "failed" if side in row["failures"] else ""
    low, high = row[f"{side}_range_s"]
    return f"{seconds(row[f'{side}_s'])} ({seconds(low)} – {seconds(high)})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def bar_cells(row: Mapping[str, Any], bar: Mapping[str, Any]) -> list[str]:
    sign = "≤ " if bar["at_most"] else "≥ "
    reached = "not measured" if bar["reached"] is None else f"**{bar['reached']:.3g}**"
    verdict = "the aim" if bar["aim_met"] else "yes" if bar["met"] else "no"
    return [row["name"], bar["what"], reached, f"{sign}{bar['least']:.3g}", f"{sign}{bar['aim']:.3g}", verdict]


def markdown(results: Mapping[str, Any]) -> str:
    """The document; every row that `results` has, and no other."""
    rows = results["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [HEAD.format(date=results["date"], versions=versions, **results["hardware"])]
    parts.append("## Against the bars\n![Times better than PyTorch, with the bars](performance.png)\n")
    header = ["row", "what", "reached", "at least", "aim", "met"]
    parts.append(table(header, [bar_cells(row, bar) for row in rows for bar in row["bars"]]))
    parts.append("## Times\n")
    cells = [[row["name"], *(with_range(row, side) for side in SIDES), str(row["rounds"]), row["date"]] for row in rows]
    parts.append(table(["row", *SIDES.values(), "rounds", "date"], cells))
    others = [
        f"- `{row['name']}`, {name}: {with_range(row, side)}"
        for row in rows
        for side, name in OTHERS.items()
        if f"{side}_s" in row
    ]
    if others:
        parts.append("\n".join(others) + "\n")
    parts.append("## Peak memory\n")
    cells = [[row["name"], *(megabytes(row[f"{side}_peak_mb"]) for side in SIDES)] for row in rows]
    parts.append(table(["row", *SIDES.values()], cells))
    parts.append("## Compilation\n")
    parts.append(
        "What the first call takes more than a later one: with every cache empty, and in the later rounds with what the first left.\n"
    )
    columns = {"ours": "ours", "torch_compile": "torch.compile"}
    fields = {
        f"{side}_{field}": f"{name}, {when}"
        for side, name in columns.items()
        for field, when in (("compile_s", "first"), ("compile_again_s", "again"))
    }
    cells = [
        [row["name"], *(seconds(row.get(field)) for field in fields)]
        for row in rows
        if row["torch_compile_s"] is not None and "ours_cached_s" not in row
    ]
    parts.append(table(["row", *fields.values()], cells))
    parts.append("## The rows\n")
    parts.append("\n".join(f"- `{row['name']}`: {row['about']}" for row in rows) + "\n" + PORTING)
    failures = [f"- `{row['name']}`, {side}: {why}" for row in rows for side, why in row["failures"].items()]
    if failures:
        parts.append("## What could not run\n")
        parts.append("\n".join(failures) + "\n")
    return "\n".join(parts)


def chart(results: Mapping[str, Any], path: Path) -> None:
    """How many times better than the other side each row is (faster, smaller), with its bars."""
    from matplotlib.figure import Figure

    labels, reached, least, aim, colors = [], [], [], [], []
    for row in results["rows"]:
        for bar in row["bars"]:
            if bar["reached"] is not None:
                power = -1 if bar["at_most"] else 1
                labels.append(f"{row['name']}: {'1 / ' if bar['at_most'] else ''}{bar['what']}")
                reached.append(bar["reached"] ** power)
                least.append(bar["least"] ** power)
                aim.append(bar["aim"] ** power)
                colors.append("tab:green" if bar["met"] else "tab:orange")
    figure = Figure(figsize=(10, 1.5 + 0.34 * len(labels)), layout="constrained")
    axes = figure.add_subplot()
    heights = range(len(labels))
    axes.barh(heights, reached, color=colors)
    axes.plot(least, heights, "k|", markersize=14, label="at least")
    axes.plot(aim, heights, "kD", markersize=4, fillstyle="none", label="the aim")
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.set_yticks(heights, labels)
    axes.invert_yaxis()
    axes.set_title(
        f"Times better, on {results['hardware']['cores']} cores of an {results['hardware']['cpu']}, {results['date']}"
    )
    axes.legend()
    with replacing(path) as fresh:
        figure.savefig(fresh, dpi=120)


def write(results: Mapping[str, Any], directory: Path) -> None:
    """`performance.md` and `performance.png` in the directory."""
    with replacing(directory / "performance.md") as fresh:
        fresh.write_text(markdown(results), encoding="utf-8")
    chart(results, directory / "performance.png")
