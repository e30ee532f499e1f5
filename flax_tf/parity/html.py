"""A report as one self-contained HTML page, for a reader who was not there."""

import datetime
import os
from collections.abc import Iterable, Sequence
from html import escape

from flax_tf.parity import tolerances
from flax_tf.parity.picture import draw_errors, row_ids
from flax_tf.parity.report import ROOT, Report, Row, write_page


def write_html(report: Report, path: str | os.PathLike) -> None:
    """Writes the page, dated today, to a file: a whole one, or what was there stays.

    Raises InputError if `path` is a directory or can't be written.
    """
    write_page(html_page(report, datetime.date.today()), path)


def html_page(report: Report, date: datetime.date) -> str:
    """The page: the verdict, where the first difference is, a picture of the errors, and every row. It loads nothing
    from elsewhere, and is the same for the same report and date."""
    model = next((row.layer for row in report.rows if row.name == ROOT), "")
    title = f"{model}: Flax against PyTorch" if model else "Flax against PyTorch"
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    parts = [
        f"<h1>{escape(title)}</h1>",
        _verdict(report),
        _first_difference(report),
        _list("Without a partner", "Each of these alone makes the models differ.", report.unpaired),
        "<h2>The error of every submodule</h2>",
        f"<p>{_PICTURE}</p>",
        f"<figure>{draw_errors(report)}</figure>",
        "<h2>What this means</h2>",
        *(f"<p>{paragraph}</p>" for paragraph in _explanation(report)),
        *_tables(report),
        _list(
            "Notes",
            "What could not be compared by itself. All that goes through it is compared where it comes out.",
            report.notes,
        ),
        "<h2>Measured with</h2>",
        f"<p>{escape(settings)}</p>" if settings else "",
        f"<p>Written on {date.isoformat()}.</p>",
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _verdict(report: Report) -> str:
    look, words = ("same", "The same model") if report.ok else ("differs", "Not the same model")
    return f'<p class="verdict {look}"><strong>{words}.</strong> {escape(report.summary())}</p>'


def _first_difference(report: Report) -> str:
    """Where to look first, and what is off there."""
    if report.culprit is None:
        return ""
    rows = [row for row in report.differences() if row.module == report.culprit]
    kinds = {row.kind for row in rows}
    if "output" in kinds:
        why = "Everything that goes into it agrees, and what comes out does not: look for the fault here first."
    elif "tensor" in kinds:
        why = "Its own weights differ."
    elif kinds:
        why = "All outputs agree, and so do the gradients that come back to it: the fault is in its own gradients."
    else:
        why = "This is where the first difference was found."
    found = next((row for row in report.rows if row.kind == "output" and row.name == report.culprit), None)
    layer = f" ({escape(found.layer)}, in Flax <code>{escape(found.flax)}</code>)" if found else ""
    table = _table(report, {id: row for id, row in row_ids(report).items() if row in rows}, anchors=False)
    return (
        f'<section class="first"><h2>The first difference: <code>{escape(report.culprit)}</code>{layer}</h2>'
        f"<p>{why}</p>{table if rows else ''}</section>"
    )


def _explanation(report: Report) -> Iterable[str]:
    yield (
        "A model written in PyTorch and its counterpart in Flax, a library of JAX, were run on the same inputs, "
        "forwards and backwards. Compared are what every submodule puts out, the gradient of every parameter and "
        "input, and the weights themselves. Submodules are paired by their paths, and stand in the order in which they "
        "run: where the first one leaves the contract, the fault begins."
    )
    yield (
        "The <em>relative error</em> is ‖a−b‖/‖b‖: how long the difference of Flax's result a from PyTorch's result b "
        "is, as a part of the length of b. An error of 1e-12 means that twelve digits agree."
    )
    yield (
        "<em>float64</em> numbers carry sixteen digits. Computed in them, two correct implementations differ by "
        f"rounding alone, and a wrong formula or constant stands out. The contract: at most "
        f"{tolerances.OUTPUT_FLOAT64:.0e} for outputs, and {tolerances.GRADIENT_FLOAT64:.0e} for gradients, which pass "
        "through the model twice. Weights must be equal."
    )
    if report.precisions:
        yield (
            f"Models are used in less precise numbers, here {' and '.join(map(escape, report.precisions))}, whose "
            "rounding is so large that two results being close proves little. So both frameworks are measured against "
            "the same float64 result of PyTorch. <em>As accurate as PyTorch</em> means that Flax's "
            f"error is at most {tolerances.LOW_RATIO:g} times PyTorch's own, which allows for another order of "
            f"summation, or below {tolerances.OUTPUT_FLOOR} units in the last place (for gradients "
            f"{tolerances.GRADIENT_FLOOR}), where the errors are luck."
        )


def _tables(report: Report) -> Iterable[str]:
    ids = row_ids(report)
    for kind, heading in (
        ("output", "Outputs, in the order they run"),
        ("gradient", "Gradients"),
        ("buffer", "Buffers after the step"),
    ):
        if rows := {id: row for id, row in ids.items() if row.kind == kind}:
            yield f"<h2>{heading}</h2>"
            yield _table(report, rows)
    tensors = {id: row for id, row in ids.items() if row.kind == "tensor"}
    wrong = {id: row for id, row in tensors.items() if not row.ok}
    if tensors:
        yield "<h2>Weights</h2>"
        yield f"<p>{len(tensors) - len(wrong)} of {len(tensors)} tensors are equal in both models.</p>"
    if wrong:
        yield _table(report, wrong)


def _table(report: Report, rows: dict[str, Row], anchors: bool = True) -> str:
    """A line for each row. The anchors are what the marks of the picture link to."""
    precisions = [p for p in report.precisions if any(p in row.low for row in rows.values())]
    headings = ["", "PyTorch", "Flax", "layer", "float64", "limit"]
    headings += [heading for p in precisions for heading in (p, "PyTorch's own", "limit")]
    lines = []
    for id, row in rows.items():
        words = [row.name, row.flax, row.layer]
        numbers = [row.float64, row.limit64]
        for p in precisions:
            numbers += [row.low[p].flax, row.low[p].torch, row.limit(p)] if p in row.low else []
        cells = [f"<td>{'ok' if row.ok else 'DIFFERS'}</td>", *(f"<td>{escape(word)}</td>" for word in words)]
        cells += [f'<td class="number">{number:.1e}</td>' for number in numbers]
        attributes = f' id="{id}"' * anchors + ' class="wrong"' * (not row.ok)
        lines.append(f"<tr{attributes}>{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "\n".join(lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _list(heading: str, meaning: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>{heading}</h2><p>{meaning}</p><ul>{items}</ul>"


_PICTURE = (
    "From left to right, the submodules in the order they run. The scale is logarithmic: a step up is an error ten or "
    "more times as large. What lies below the dashed line keeps the contract. An error of exactly zero stands on the "
    "lower edge, one that is no number (another shape, or a NaN) on the upper. Point at a mark to read its name; click "
    "it to go to its row."
)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2129; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p { max-width: 48rem; }
.verdict { max-width: none; padding: .8rem 1rem; border-left: .4rem solid; font-size: 1.05rem; }
.same { background: #e8f5e9; border-color: #2e7d32; } .differs { background: #ffebee; border-color: #c62828; }
.first { border: 2px solid #c62828; border-radius: .3rem; padding: 0 1rem 1rem; } .first h2 { margin-top: 1rem; }
figure { margin: 0; } svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; white-space: nowrap; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; border-bottom: 1px solid #e0e0e0; }
th { position: sticky; top: 0; background: white; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.wrong { background: #ffebee; } .wrong td:first-child { color: #c62828; font-weight: bold; }
tr:target { outline: 2px solid #2563a8; }
"""
