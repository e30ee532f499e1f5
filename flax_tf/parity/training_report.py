"""What two trainings side by side found, as data and as a table for a terminal."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from flax_tf.parity.report import finite
from flax_tf.parity.tolerances import STEPS_FLOAT64, relative_error
from flax_tf.terminal import print_table


@dataclass(frozen=True)
class TrainingRow:
    """One parameter or buffer over all steps."""

    kind: Literal["parameter", "buffer"]
    name: str
    """PyTorch's key."""
    error: float
    """The largest relative error after any step."""
    gradient: float
    """The largest relative error of its gradient in any step; 0 for a buffer."""
    step: int | None
    """The first step, from 1, after which it was out of the contract; 0 if it was before training; None if never."""

    @property
    def ok(self) -> bool:
        return self.step is None


@dataclass(frozen=True)
class TrainingReport:
    """The verdict over two runs. Truthy exactly when they are the same training."""

    rows: tuple[TrainingRow, ...]
    """Parameters, then buffers, in the order of PyTorch's state dict."""
    torch_losses: tuple[float, ...]
    flax_losses: tuple[float, ...]
    unpaired: tuple[str, ...]
    """Parameters that only one side has or trains, each with the side named."""
    dropout: tuple[str, ...]
    """How dropout differs."""
    diagnosis: str | None
    """What made the first step that left the contract leave it; None if none did."""

    @property
    def loss_error(self) -> float:
        """The largest relative error of the loss in any step."""
        pairs = zip(self.flax_losses, self.torch_losses, strict=True)
        return max(relative_error(np.asarray(ours), np.asarray(theirs)) for ours, theirs in pairs)

    @property
    def ok(self) -> bool:
        rows = all(row.ok for row in self.rows) and self.loss_error <= STEPS_FLOAT64
        return rows and not (self.unpaired or self.dropout or self.diagnosis)

    __bool__ = ok.fget

    def summary(self) -> str:
        """One line: the verdict, with the largest errors or what went apart first."""
        if self.ok:
            worst = max(row.error for row in self.rows)
            return (
                f"the same training: {len(self.torch_losses)} steps, {len(self.rows)} parameters and buffers within "
                f"{worst:.1e}, losses within {self.loss_error:.1e} in float64"
            )
        return f"NOT the same training: {(*self.unpaired, *self.dropout, self.diagnosis)[0]}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, with the verdict, in types that JSON has; an error that is not finite is null."""
        rows = [
            {**asdict(row), "ok": row.ok, "error": finite(row.error), "gradient": finite(row.gradient)}
            for row in self.rows
        ]
        return {
            "same": self.ok,
            "summary": self.summary(),
            "loss_error": finite(self.loss_error),
            **asdict(self),
            "rows": rows,
        }

    def table(self) -> Table:
        """A line per parameter and buffer."""
        title = f"Flax against PyTorch over {len(self.torch_losses)} steps: largest relative errors ‖a-b‖/‖b‖"
        table = Table(title=title, box=box.SIMPLE_HEAD)
        for heading in ("", "name", "kind"):
            table.add_column(heading, no_wrap=True)
        for heading in ("after a step", "gradient", "first step apart"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                Text("ok", "green") if row.ok else Text("DIFFERS", "bold red"),
                Text(row.name),
                row.kind,
                f"{row.error:.1e}",
                f"{row.gradient:.1e}" if row.kind == "parameter" else "",
                "" if row.step is None else str(row.step),
            )
        return table

    def print(self) -> None:
        """The table, the losses, what differs besides, and the summary."""
        print_table(self.table())
        print(f"loss: PyTorch {self.torch_losses[0]:.6g} to {self.torch_losses[-1]:.6g}, ", end="")
        print(f"Flax {self.flax_losses[0]:.6g} to {self.flax_losses[-1]:.6g}, largest error {self.loss_error:.1e}")
        print(
            *(f"unpaired: {line}" for line in self.unpaired), *(f"dropout: {line}" for line in self.dropout), sep="\n"
        )
        print(self.summary())
