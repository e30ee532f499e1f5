"""The document, in Markdown, of what `results.json` says."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import chart
from flax_tf.files import replacing

SIDES = {"ours": "ours", "torch_eager": "PyTorch eager", "torch_compile": "torch.compile"}
OTHERS = {
    "nnx_jit": "plain `nnx.jit`",
    "ours_cached": "ours, in a second process",
    "torch_compile_cached": "torch.compile, in a second process",
    "torch_mmap": "PyTorch with `mmap=True`",
}

HEAD = """# Speed and memory

Written by `make bench` from `benchmarks/results.json`; do not edit. Measured on {date}, on {cores} cores of an {cpu}
with {memory_gb} GB: {versions}.

{tiny}Each side of each row runs in fresh processes, in turn, for as many rounds as the table says. PyTorch is the
reference of `torch_ref` as it is, run as one does who knows PyTorch: fused optimizers, gradients set to None, inference
mode, and in generation a hand-written cache of keys and values with the heads' weights in one matrix, a classifier that
sees the last position alone, and `torch.multinomial`. All sides compute in float32 on all cores; where a row says so,
all keep memory from step to step, as `train_jax.py --keep_memory true` does. A time is the median over the rounds of
the median step of a process, after two calls to warm up; in brackets are the fastest and the slowest round. Memory is
the resident memory of the process at its highest, which holds the interpreter, the libraries and compilation too; the
highest round counts. A bar is a ratio that was set before measuring, "at least"; "aim" is a further one.
"""

TINY = "**At tiny sizes, to try the benchmarks themselves: the figures mean nothing.**\n\n"

COMPILATION = """
What the first call takes more than a later one: first with every cache empty, then (the median of the later rounds)
with what the first round left in the caches of both.
"""

PORTING = """
`port-1gb`: PyTorch makes no tensor but those of the file (the model is built on the meta device, and takes them by
`assign=True`). Both sides read a number of every page at the end, so that what is mapped and not yet read does not
count as loaded. Extra memory is the peak less what the process held before it opened the file; pages of a mapped file
count.
"""


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.3g} s"


def with_range(row: Mapping[str, Any], side: str) -> str:
    """The time of a side, with its fastest and slowest round."""
    if row.get(f"{side}_s") is None:
        return "failed" if side in row["failures"] else ""
    low, high = row[f"{side}_range_s"]
    return f"{seconds(row[f'{side}_s'])} ({seconds(low)} – {seconds(high)})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def markdown(results: Mapping[str, Any]) -> str:
    """The document; it has every row of `results`."""
    rows = results["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    failures = [f"`{row['name']}`, {side}: {why}" for row in rows for side, why in row["failures"].items()]
    return "\n".join(
        [
            HEAD.format(
                date=results["date"], versions=versions, tiny=TINY if results["tiny"] else "", **results["hardware"]
            ),
            "## Against the bars\n\n![Times better than PyTorch, with the bars](performance.png)\n",
            _bars(rows),
            "## Times\n",
            _times(rows),
            "## Peak memory\n",
            _memory(rows),
            "## Compilation\n" + COMPILATION,
            _compilation(rows),
            "## The rows\n",
            _items(f"`{row['name']}`: {row['about']}" for row in rows) + PORTING,
            *(["## What could not run\n", _items(failures)] if failures else []),
        ]
    )


def _items(lines: Iterable[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _bars(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for row in rows:
        for bar in row["bars"]:
            sign = "≤ " if bar["at_most"] else "≥ "
            reached = "not measured" if bar["reached"] is None else f"**{bar['reached']:.3g}**"
            verdict = "the aim" if bar["aim_met"] else "yes" if bar["met"] else "no"
            least, aim = (f"{sign}{bar[name]:.3g}" for name in ("least", "aim"))
            cells.append([row["name"], bar["what"], reached, least, aim, verdict])
    return table(["row", "what", "reached", "at least", "aim", "met"], cells)


def _times(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [[row["name"], *(with_range(row, side) for side in SIDES), str(row["rounds"]), row["date"]] for row in rows]
    others = [
        f"`{row['name']}`, {name}: {with_range(row, side)}"
        for row in rows
        for side, name in OTHERS.items()
        if f"{side}_s" in row
    ]
    return table(["row", *SIDES.values(), "rounds", "date"], cells) + (f"\n{_items(others)}" if others else "")


def _memory(rows: Sequence[Mapping[str, Any]]) -> str:
    values = [(row["name"], [row[f"{side}_peak_mb"] for side in SIDES]) for row in rows]
    cells = [[name, *("" if mb is None else f"{mb:,.0f} MB" for mb in sides)] for name, sides in values]
    return table(["row", *SIDES.values()], cells)


def _compilation(rows: Sequence[Mapping[str, Any]]) -> str:
    fields = {
        f"{side}_{field}": f"{SIDES[side]}, {when}"
        for side in ("ours", "torch_compile")
        for field, when in (("compile_s", "first"), ("compile_again_s", "again"))
    }
    compiled = [row for row in rows if row["torch_compile_s"] is not None and "ours_cached_s" not in row]
    return table(["row", *fields.values()], [[row["name"], *(seconds(row.get(f)) for f in fields)] for row in compiled])


def write(results: Mapping[str, Any], directory: Path) -> None:
    """`performance.md` and `performance.png` in the directory."""
    with replacing(directory / "performance.md") as fresh:
        fresh.write_text(markdown(results), encoding="utf-8")
    with replacing(directory / "performance.png") as fresh:
        chart(results, fresh)
