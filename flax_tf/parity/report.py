"""What a comparison found, as data and as a table for a terminal."""

from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

from flax_tf.parity import tolerances
from flax_tf.terminal import print_table


@dataclass(frozen=True)
class Row:
    """One submodule's output (`kind` "output"), parameter's gradient ("gradient") or ported tensor ("tensor")."""

    kind: str
    name: str
    """PyTorch's path of the submodule ("(model)" for the whole), or the parameter's key."""
    layer: str
    """The Flax class."""
    float64: float
    """Relative error of Flax against PyTorch, both in float64."""
    float32: float
    """Relative error of Flax in float32 against PyTorch's float64 result."""
    torch_float32: float
    """Relative error of PyTorch in float32 against the same."""

    @property
    def limit64(self) -> float:
        """The contract's bound on `float64`."""
        limits = {"output": tolerances.OUTPUT_FLOAT64, "gradient": tolerances.GRADIENT_FLOAT64, "tensor": 0.0}
        return limits[self.kind]

    @property
    def ok(self) -> bool:
        """Whether both precisions are within the contract."""
        output = self.kind == "output"
        floor = tolerances.OUTPUT_FLOAT32_FLOOR if output else tolerances.GRADIENT_FLOAT32_FLOOR
        return self.float64 <= self.limit64 and tolerances.float32_passes(self.float32, self.torch_float32, floor)

    @property
    def in_float32_gradient_alone(self) -> bool:
        """Whether it is a gradient that failed in float32 and not in float64."""
        return self.kind == "gradient" and not self.ok and self.float64 <= self.limit64

    def merged(self, other: "Row") -> "Row":
        """The worse of two rows of the same name: a failure before a pass, then the larger float64 error."""
        return max(self, other, key=lambda row: (not row.ok, row.float64))


@dataclass(frozen=True)
class Report:
    """The verdict over two models. Truthy exactly when they are the same model."""

    rows: tuple[Row, ...]
    """Outputs in the order of execution, then gradients, then tensors, in the order of the state dict."""
    unpaired: tuple[str, ...]
    """Submodules and parameters that only one side has, each with the side named."""
    culprit: str | None
    """The first submodule that is wrong on PyTorch's own inputs to it; None if there is none."""

    @property
    def ok(self) -> bool:
        return not self.unpaired and all(row.ok for row in self.rows)

    __bool__ = ok.fget

    @property
    def in_float32_gradients_alone(self) -> bool:
        """Whether models that are the same in all else differ in gradients in float32."""
        failed = [row for row in self.rows if not row.ok]
        return bool(failed) and not self.unpaired and all(row.in_float32_gradient_alone for row in failed)

    def luckier(self, other: "Report") -> "Report":
        """The report with the other's results where a gradient failed in float32 alone; all else stays."""
        theirs = {(row.kind, row.name): row for row in other.rows}
        rows = (theirs.get((row.kind, row.name), row) if row.in_float32_gradient_alone else row for row in self.rows)
        return Report(tuple(rows), self.unpaired, self.culprit)

    def merged(self, other: "Report") -> "Report":
        """The worse of two reports on the same pair of models, row by row."""
        theirs = {(row.kind, row.name): row for row in other.rows}
        rows = tuple(row.merged(theirs.pop((row.kind, row.name), row)) for row in self.rows)
        unpaired = tuple(dict.fromkeys(self.unpaired + other.unpaired))
        return Report(rows + tuple(theirs.values()), unpaired, self.culprit or other.culprit)

    def summary(self) -> str:
        """One line: the verdict, with the largest errors or the place of the first difference."""
        failed = [row for row in self.rows if not row.ok]
        if self.ok:
            worst = {kind: max((r.float64 for r in self.rows if r.kind == kind), default=0.0) for kind in _KINDS}
            return (
                f"the same model: {sum(r.kind == 'output' for r in self.rows)} submodules within "
                f"{worst['output']:.1e} and {sum(r.kind == 'gradient' for r in self.rows)} gradients within "
                f"{worst['gradient']:.1e} in float64, float32 as accurate as PyTorch"
            )
        if self.culprit is not None:
            return f"NOT the same model: the first difference is in {self.culprit} ({len(failed)} rows differ)"
        if self.unpaired:
            return f"NOT the same model: {self.unpaired[0]} ({len(self.unpaired)} unpaired)"
        return f"NOT the same model: {failed[0].name} ({failed[0].kind}) and {len(failed) - 1} other rows differ"

    def table(self) -> Table:
        """A line per submodule in the order of execution, with the worst gradient of its own parameters."""
        table = Table(title="Flax against PyTorch: relative errors ‖a-b‖/‖b‖", box=box.SIMPLE_HEAD)
        for heading, justify in _COLUMNS:
            table.add_column(heading, justify=justify, no_wrap=True)
        gradients = [row for row in self.rows if row.kind == "gradient"]
        for row in (row for row in self.rows if row.kind == "output"):
            own = [gradient for gradient in gradients if gradient.name.rpartition(".")[0] == row.name]
            ok = row.ok and all(gradient.ok for gradient in own)
            worst = f"{max(gradient.float64 for gradient in own):.1e}" if own else ""
            table.add_row(
                Text("ok", "green") if ok else Text("DIFFERS", "bold red"),
                Text(row.name),
                row.layer,
                f"{row.float64:.1e}",
                worst,
                f"{row.float32:.1e}",
                f"{row.torch_float32:.1e}",
            )
        return table

    def print(self) -> None:
        """The table, what is unpaired, and the summary."""
        print_table(self.table())
        print(*(f"unpaired: {line}" for line in self.unpaired), self.summary(), sep="\n")


_KINDS = ("output", "gradient")
_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("", "left"),
    ("submodule", "left"),
    ("layer", "left"),
    ("float64", "right"),
    ("gradient float64", "right"),
    ("float32", "right"),
    ("PyTorch float32", "right"),
)
