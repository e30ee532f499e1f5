"""What a run reports: `metrics.jsonl`, TensorBoard events, progress on stderr and a picture of the loss."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # ty: ignore[missing-module-member]
from tensorboardX.summary import scalar

from flax_tf.files import replacing

SCORES_DRAWN = {"exact_match": "exact match, %", "bleu": "BLEU", "chrf": "chrF"}
PLAIN_LINES = 20  # about how many training losses are printed where there is no terminal for a bar


class Metrics:
    """Writes each row to `run_dir/metrics.jsonl` (flushed at once) and `run_dir/tensorboard`, and shows it.

    A training row has step, loss (nats per token), learning_rate and tokens_per_second; a validation row has step,
    valid_loss, perplexity and scores of the task (such as bleu). Rows that a killed run wrote after `step`, where it
    resumes, are cut.
    """

    def __init__(self, run_dir: Path, step: int, total_steps: int):
        self._total_steps = total_steps
        self._last_line = step
        path = run_dir / "metrics.jsonl"
        kept = [row for row in read_rows(path) if row["step"] <= step]
        with replacing(path) as fresh:
            fresh.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")
        # Not SummaryWriter: on a full disk its thread dies, and closing it never returns.
        (run_dir / "tensorboard").mkdir(exist_ok=True)
        self._events = EventsWriter(str(run_dir / "tensorboard" / "events"))
        if step:  # TensorBoard forgets what a killed run reported from here on
            self._write_event(step + 1, session_log=SessionLog(status=SessionLog.START))
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("valid {task.fields[valid]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=step, loss="-", valid="-", speed="-")

    def train(self, step: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        """Reports the mean training loss since the last report."""
        self._write(step=step, loss=loss, learning_rate=learning_rate, tokens_per_second=round(tokens_per_second, 1))
        speed = f"{tokens_per_second:,.0f}"
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}", speed=speed)
        if step - self._last_line >= self._total_steps / PLAIN_LINES or step == self._total_steps:
            self._last_line = step
            self._line(f"step {step}/{self._total_steps}: loss {loss:.4f}, {speed} tokens/s")

    def valid(self, step: int, loss: float, scores: Mapping[str, float]) -> None:
        """Reports a validation loss, and scores by their names."""
        self._write(step=step, valid_loss=loss, perplexity=perplexity(loss), **scores)
        self._progress.update(self._task, valid=f"{loss:.3f}")
        self._line(f"step {step}/{self._total_steps}: {describe(loss, scores)}")

    def _line(self, text: str) -> None:
        if self._progress.disable:
            self._progress.console.print(text, highlight=False, soft_wrap=True)

    def _write(self, step: int, **values: float) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._write_event(step, summary=scalar(name, value))
        self._events.flush()

    def _write_event(self, step: int, **content: Any) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, **content))

    def __enter__(self) -> "Metrics":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        with contextlib.suppress(OSError):  # the disk may be what failed
            self._file.close()
        with contextlib.suppress(OSError):
            self._events.close()


def describe(loss: float, scores: Mapping[str, float]) -> str:
    """A validation's result in words."""
    parts = [f"validation loss {loss:.4f}", f"perplexity {perplexity(loss):.2f}"]
    return ", ".join([*parts, *(f"{name} {value:.2f}" for name, value in scores.items())])


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, without a last one that was cut off in writing; [] if there is no file."""
    return list(_rows(path)) if path.is_file() else []


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return


def plot_losses(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draws the losses of a run over its steps, and the scores of its validation split, into a PNG file."""
    from matplotlib.figure import Figure  # seconds to import, and only for the end of a run

    scored = [row for row in rows if "valid_loss" in row]
    names = [name for name in SCORES_DRAWN if any(name in row for row in scored)]
    figure = Figure(figsize=(8, 8 if names else 5), dpi=150, layout="constrained")
    loss_axes, *score_axes = figure.subplots(2 if names else 1, squeeze=False, sharex=True)[:, 0]
    _draw_losses(loss_axes, rows)
    for axes in score_axes:
        for name in names:
            points = [(row["step"], row[name]) for row in scored if name in row]
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{SCORES_DRAWN[name]} (last {points[-1][1]:.1f})")
        axes.set(ylabel="validation score")
    loss_axes.set_title(title, parse_math=False)
    for axes in (loss_axes, *score_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    (score_axes or [loss_axes])[-1].set(xlabel="step")
    figure.savefig(path, format="png")


def _draw_losses(axes: Any, rows: list[dict[str, Any]]) -> None:
    train = np.array([(row["step"], row["loss"]) for row in rows if "loss" in row])
    valid = np.array([(row["step"], row["valid_loss"]) for row in rows if "valid_loss" in row])
    if len(train):
        axes.plot(*train.T, color="tab:blue", alpha=0.3, linewidth=1)
        axes.plot(train[:, 0], _smooth(train[:, 1]), color="tab:blue", linewidth=2, label="training (smoothed)")
    if len(valid):
        step, loss = valid[valid[:, 1].argmin()]
        best = f"best {loss:.3f} at step {step:.0f}, perplexity {perplexity(loss):.2f}"
        axes.plot(*valid.T, color="tab:orange", marker="o", linewidth=1.5, label=f"validation ({best})")
        axes.plot(step, loss, color="tab:red", marker="*", markersize=14)
    axes.set(ylabel="cross-entropy (nats per token)")


def _smooth(losses: np.ndarray) -> np.ndarray:
    """The mean of each value and its neighbours: a fortieth of all on either side, fewer near the ends."""
    n = len(losses)
    reach = [min(n // 40, i, n - 1 - i) for i in range(n)]
    return np.array([losses[i - reach[i] : i + reach[i] + 1].mean() for i in range(n)])
