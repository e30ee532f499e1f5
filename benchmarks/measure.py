"""Runs the sides of a row in turn, each time in a fresh process, and puts their figures together."""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rows import Row
from flax_tf.errors import InputError

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 1200  # seconds, of a process

FIGURES = ("s", "range_s", "peak_mb", "extra_mb", "compile_s", "compile_again_s")

Measured = dict[str, float]


class SideError(InputError):
    """A side could not run; the message is the last line that it wrote."""


def run_side(
    work: str, side: str, caches: Path, checkpoint: Path, tiny: bool, options: tuple[str, ...] = ()
) -> Measured:
    """One side in a process of its own, which finds what it compiled before in `caches` and nowhere else."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        # PyTorch's threads wait for each other by spinning, and where tests share the cores that takes seconds a step.
        "OMP_NUM_THREADS": "1" if tiny else str(len(os.sched_getaffinity(0))),
        "JAX_COMPILATION_CACHE_DIR": str(caches / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "FLAX_TF_CACHE": str(caches / "flax_tf"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    with tempfile.TemporaryDirectory() as room:
        result = Path(room) / "result.json"
        command = [sys.executable, "-m", "benchmarks.worker"]
        arguments = [work, side, str(result), str(checkpoint), "TINY" if tiny else "FULL", *options]
        try:
            process = subprocess.run(
                [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT
            )
        except subprocess.TimeoutExpired:
            raise SideError(f"not done in {TIME_LIMIT} s") from None
        if process.returncode:
            lines = process.stderr.strip().splitlines()
            raise SideError(lines[-1] if lines else f"ended by signal or code {process.returncode}")
        return json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}


def run_row(row: Row, rounds: int, tiny: bool, tell: Callable[[str], None]) -> dict[str, Any]:
    """The fields of the row in `results.json`. A side that fails has none of its figures, and is told."""
    taken: dict[str, list[Measured]] = {side: [] for side in row.sides}
    failures: dict[str, str] = {}
    file_mb = None
    options = ("keep_memory",) if row.keep_memory else ()
    with tempfile.TemporaryDirectory(prefix="flax_tf_benchmarks_") as directory:
        checkpoint = Path(directory) / "model.pt"
        if row.checkpoint:
            run_side(row.work or row.name, "checkpoint", Path(directory), checkpoint, tiny)
            file_mb = checkpoint.stat().st_size / 2**20
        for k in range(rounds):
            # Each comes first as often as the others, but that what fills a cache comes before what reads it.
            turn = 0 if row.compile_time else k % len(row.sides)
            for side in (*row.sides[turn:], *row.sides[:turn]):
                if side in failures:
                    continue
                caches = Path(directory) / (f"round{k}" if row.compile_time else "caches")
                tell(f"{row.name}  round {k + 1} of {rounds}  {side} ...")
                try:
                    found = run_side(
                        row.work or row.name, side.removesuffix("_cached"), caches, checkpoint, tiny, options
                    )
                except SideError as error:
                    failures[side] = str(error)
                    tell(f"    failed: {error}")
                else:
                    taken[side].append(found)
                    tell(f"    {found['s']:.4g} s, first call {found['first_s']:.3g} s, {found['peak_mb']:,.0f} MB")
    figures = {side: summary(runs, row.compile_time) for side, runs in taken.items() if side not in failures}
    return {
        "name": row.name,
        "about": row.about,
        "rounds": rounds,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **{
            f"{side}_{figure}": figures.get(side, {}).get(figure)
            for side in dict.fromkeys(("ours", "torch_eager", "torch_compile", *row.sides))
            for figure in FIGURES
        },
        "file_mb": file_mb,
        "failures": failures,
    }


def summary(runs: list[Measured], compile_time: bool) -> dict[str, Any]:
    """The `FIGURES`: over the rounds, medians and spreads of times, and the highest of memory."""
    times = [run["compile_s" if compile_time else "s"] for run in runs]
    later = [run["compile_s"] for run in runs[1:]]
    return {
        "s": statistics.median(times),
        "range_s": [min(times), max(times)],
        "peak_mb": max(run["peak_mb"] for run in runs),
        "extra_mb": max(run["extra_mb"] for run in runs),
        # Only the first round starts with nothing in the cache.
        "compile_s": runs[0]["compile_s"],
        "compile_again_s": statistics.median(later) if later and not compile_time else None,
    }
