"""What a comparison found, as data and as a table for a terminal."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from flax_tf.files import check_file, replacing
from flax_tf.parity import tolerances
from flax_tf.terminal import print_table

ROOT = "(model)"


class Low(NamedTuple):
    """Errors in a precision below float64, against PyTorch's float64 result."""

    flax: float
    torch: float


@dataclass(frozen=True)
class Row:
    """A submodule's output, a gradient of a parameter or input, a buffer after a step, or a tensor of the weights."""

    kind: Literal["output", "gradient", "buffer", "tensor"]
    name: str
    """PyTorch's path of the submodule ("(model)" for the whole), or the parameter's key; "input 1" for an input."""
    flax: str
    """The same as NNX has it."""
    layer: str
    """The Flax class of a submodule."""
    float64: float
    """Relative error of Flax against PyTorch, both in float64."""
    low: Mapping[str, Low] = field(default_factory=dict)
    """Relative errors by precision: "float32", "bfloat16"."""

    @property
    def module(self) -> str:
        """The submodule that it belongs to, by PyTorch's path."""
        return self.name if self.kind == "output" else self.name.rpartition(".")[0] or ROOT

    @property
    def limit64(self) -> float:
        """The contract's bound on `float64`."""
        output, gradient = tolerances.OUTPUT_FLOAT64, tolerances.GRADIENT_FLOAT64
        return {"output": output, "gradient": gradient, "buffer": output, "tensor": 0.0}[self.kind]

    def limit(self, precision: str) -> float:
        """The contract's bound on Flax's error in a precision below float64."""
        floor = tolerances.GRADIENT_FLOOR if self.kind == "gradient" else tolerances.OUTPUT_FLOOR
        return tolerances.low_limit(self.low[precision].torch, precision, floor)

    def ok_in(self, precision: str) -> bool:
        """Whether Flax's error in a precision below float64 is within the contract."""
        return self.low[precision].flax <= self.limit(precision) < float("inf")

    @property
    def ok(self) -> bool:
        """Whether all precisions are within the contract."""
        return self.float64 <= self.limit64 and all(map(self.ok_in, self.low))

    @property
    def in_low_alone(self) -> bool:
        """Whether it failed, and not in float64."""
        return not self.ok and self.float64 <= self.limit64

    def merged(self, other: "Row") -> "Row":
        """The worse of two rows of the same name: a failure before a pass, then the larger float64 error."""
        return max(self, other, key=lambda row: (not row.ok, row.float64))


@dataclass(frozen=True)
class Report:
    """The verdict over two models. Truthy exactly when they are the same model."""

    rows: tuple[Row, ...]
    """Outputs in the order of execution, then gradients, then tensors, in the order of the state dict."""
    unpaired: tuple[str, ...]
    """Parameters, buffers and results that only one side has, and dropouts that differ: each a reason to fail."""
    notes: tuple[str, ...]
    """What could not be compared by itself, such as a submodule that one side alone calls: no reason to fail, as all
    that goes through it is compared where it comes out."""
    culprit: str | None
    """The first submodule that is wrong on right inputs, or whose gradients are; None if there is none."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Versions and precisions that it was measured with."""

    @property
    def ok(self) -> bool:
        return not self.unpaired and all(row.ok for row in self.rows)

    __bool__ = ok.fget

    @property
    def in_low_alone(self) -> bool:
        """Whether models that are the same in float64 differ below it."""
        failed = [row for row in self.rows if not row.ok]
        return bool(failed) and not self.unpaired and all(row.in_low_alone for row in failed)

    @property
    def precisions(self) -> list[str]:
        """Those below float64 that were compared."""
        return list(dict.fromkeys(precision for row in self.rows for precision in row.low))

    def differences(self) -> list[Row]:
        """The rows outside the contract, those of the culprit first."""
        return sorted((row for row in self.rows if not row.ok), key=lambda row: row.module != self.culprit)

    def merged(self, other: "Report") -> "Report":
        """The worse of two reports on the same pair of models, row by row."""
        theirs = {(row.kind, row.name): row for row in other.rows}
        rows = tuple(row.merged(theirs.pop((row.kind, row.name), row)) for row in self.rows)
        return Report(
            rows=rows + tuple(theirs.values()),
            unpaired=tuple(dict.fromkeys(self.unpaired + other.unpaired)),
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            culprit=self.culprit or other.culprit,
            settings=self.settings,
        )

    def summary(self) -> str:
        """One line: the verdict, with the largest errors or the place of the first difference."""
        failed = [row for row in self.rows if not row.ok]
        if self.ok:
            found = {kind: [row.float64 for row in self.rows if row.kind == kind] for kind in ("output", "gradient")}
            low = " and ".join(self.precisions)
            return (
                f"the same model: {len(found['output'])} submodules within {max(found['output'], default=0.0):.1e} and "
                f"{len(found['gradient'])} gradients within {max(found['gradient'], default=0.0):.1e} in float64"
                + (f", {low} as accurate as PyTorch" if low else "")
            )
        if self.culprit is not None:
            counts = [f"{len(failed)} row{'s differ' if len(failed) != 1 else ' differs'}"] if failed else []
            counts += [f"{len(self.unpaired)} unpaired"] if self.unpaired else []
            return f"NOT the same model: the first difference is in {self.culprit} ({', '.join(counts)})"
        if self.unpaired:
            return f"NOT the same model: {self.unpaired[0]} ({len(self.unpaired)} unpaired)"
        return f"NOT the same model: {failed[0].name} ({failed[0].kind}) and {len(failed) - 1} other rows differ"

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON: errors are numbers, or null for what is not finite; limits are beside them."""
        return {
            "same": self.ok,
            "summary": self.summary(),
            "culprit": self.culprit,
            "unpaired": list(self.unpaired),
            "notes": list(self.notes),
            "settings": dict(self.settings),
            "rows": [_row_dict(row) for row in self.rows],
        }

    def table(self) -> Table:
        """A line per submodule in the order of execution, with the worst gradient of its own parameters."""
        table = Table(title="Flax against PyTorch: relative errors ‖a-b‖/‖b‖", box=box.SIMPLE_HEAD)
        renamed = any(row.flax != row.name for row in self.rows if row.kind == "output")
        headings = ["", "submodule", *(["in Flax"] if renamed else []), "layer", "float64", "gradient float64"]
        headings += [heading for precision in self.precisions for heading in (precision, f"PyTorch {precision}")]
        for heading in headings:
            text = heading in ("", "submodule", "in Flax", "layer")
            table.add_column(heading, justify="left" if text else "right", no_wrap=True)
        gradients = [row for row in self.rows if row.kind == "gradient"]
        for row in (row for row in self.rows if row.kind == "output"):
            own = [gradient for gradient in gradients if gradient.module == row.name]
            ok = row.ok and all(gradient.ok for gradient in own)
            worst = f"{max(gradient.float64 for gradient in own):.1e}" if own else ""
            low = [f"{error:.1e}" for precision in row.low for error in row.low[precision]]
            table.add_row(
                Text("ok", "green") if ok else Text("DIFFERS", "bold red"),
                Text(row.name),
                *([Text(row.flax)] if renamed else []),
                row.layer,
                f"{row.float64:.1e}",
                worst,
                *low,
            )
        return table

    def difference_table(self, most: int) -> Table:
        """The `differences`, at most so many, with the contract's limits."""
        table = Table(box=box.SIMPLE_HEAD)
        limits = [heading for precision in ("float64", *self.precisions) for heading in (precision, "limit")]
        for heading in ("differs", "of", "layer", *limits):
            table.add_column(heading, no_wrap=True)
        for row in self.differences()[:most]:
            numbers = [row.float64, row.limit64]
            for precision in row.low:
                numbers += [row.low[precision].flax, row.limit(precision)]
            table.add_row(row.kind, Text(row.name), row.layer, *(f"{number:.1e}" for number in numbers))
        return table

    def print(self) -> None:
        """The table, what is unpaired or not compared, the settings, and the summary."""
        print_table(self.table())
        print(*(f"note: {line}" for line in self.notes), *(f"unpaired: {line}" for line in self.unpaired), sep="\n")
        if self.settings:
            print(", ".join(f"{name} {value}" for name, value in self.settings.items()))
        print(self.summary())


def write_json(report: Report, path: str | os.PathLike) -> None:
    """Writes `Report.to_dict` to a JSON file, as `write_page` writes."""
    write_page(json.dumps(report.to_dict(), indent=2, allow_nan=False, ensure_ascii=False) + "\n", path)


def write_page(text: str, path: str | os.PathLike) -> None:
    """Writes a whole file, or leaves what was there. Raises InputError if it is a directory or can't be written."""
    check_file(path)
    with replacing(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def _row_dict(row: Row) -> dict[str, Any]:
    fields = asdict(row) | {"ok": row.ok, "float64": finite(row.float64), "limit64": row.limit64}
    fields["low"] = {
        precision: {"flax": finite(low.flax), "torch": finite(low.torch), "limit": finite(row.limit(precision))}
        for precision, low in row.low.items()
    }
    return fields


def finite(error: float) -> float | None:
    """The error as JSON has it: null for what is not finite."""
    return error if error < float("inf") else None
