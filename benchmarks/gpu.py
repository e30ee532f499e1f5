#!/usr/bin/env python3
"""Trains in bfloat16 on an NVIDIA GPU: steps and tokens a second, utilisation, and where the time goes.

`python benchmarks/gpu.py` writes docs/performance_gpu.md. Weights, gradients and optimizer stay float32; the model
computes in bfloat16.
"""

import datetime
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.gpu_cases import Case, cases, in_bfloat16, peak_rate
from benchmarks.op_profile import profile
from benchmarks.report import table
from flax_tf.command import OK, Parser, run
from flax_tf.errors import InputError
from flax_tf.files import check_writable, replacing
from flax_tf.saving import build
from flax_tf.training.optimizer import build_optimizer
from flax_tf.training.sharding import data_mesh, replicate
from flax_tf.training.step import all_finite, start
from flax_tf.training.stepper import Stepper

PROG = "gpu.py"
DOCS = Path(__file__).parent.parent / "docs" / "performance_gpu.md"
MOST_EXPENSIVE = 12

HEAD = """# Training on a GPU

Written by `python benchmarks/gpu.py` on {date}, on {device}, jax {jax}, flax {flax}. The models compute in bfloat16,
with float32 weights and optimizer. Utilisation is the operations that the model asks for (6 a token and weight, and
attention) by what large bfloat16 matrix products reach on the same device: {peak:.4g} TFLOP/s.
"""


def measure(case: Case, steps: int, peak: float) -> tuple[list[str], list[tuple[str, float]]]:
    """The case's cells of the table, and its profile."""
    state, compiled = start(build(case.config), build_optimizer(case.optimizer, 1000), in_bfloat16(case.loss), seed=0)
    operations = case.operations(state.params)
    batch, mesh = case.batch(), data_mesh(case.batch_size, jax.local_devices()[:1])
    clock = time.perf_counter()
    stepper = Stepper(replicate(mesh, state), compiled.train, mesh, [batch])

    def several(count: int) -> None:
        for _ in range(count):
            stepper.take([batch])
        jax.block_until_ready(stepper.state)

    several(1)
    first = time.perf_counter() - clock
    several(2)
    times = []
    for _ in range(3):
        clock = time.perf_counter()
        several(steps)
        times.append((time.perf_counter() - clock) / steps)
    seconds = statistics.median(times)
    if not bool(all_finite(stepper.state)):
        raise InputError(f"{case.name}: the loss became NaN or infinite")
    memory = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    cells = [
        case.name,
        str(case.batch_size),
        f"{1 / seconds:,.4g}",
        f"{case.tokens() / seconds:,.0f}",
        f"{operations / seconds / peak:.1%}",
        "" if memory is None else f"{memory / 2**30:.1f} GiB",
        f"{first:.1f} s",
        case.bar,
    ]
    return cells, profile(lambda: several(3))


def bench(argv: Sequence[str]) -> int:
    parser = Parser(prog=PROG, description="Training in bfloat16 on an NVIDIA GPU.")
    parser.add_argument("--batch_size", type=int, default=32, help="sequences of a step of GPT-2's shape")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed together, three times")
    parser.add_argument("--out", default=str(DOCS), metavar="FILE", help="the Markdown file to write")
    parser.add_argument(
        "--tiny", action="store_true", help="at tiny sizes on any device, to try the script; needs --out"
    )
    options = parser.parse_args(list(argv))
    for name in ("batch_size", "steps"):
        if getattr(options, name) < 1:
            raise InputError(f"{name} must be at least 1, not {getattr(options, name)}")
    if not options.tiny and jax.default_backend() != "gpu":
        raise InputError(
            "JAX sees no GPU: install the extra cuda13 on a machine that has one, or try --tiny --out FILE"
        )
    if options.tiny and Path(options.out) == DOCS:
        raise InputError("--tiny measures nothing that is worth keeping: give --out, where to write it")
    check_writable(options.out)

    peak = peak_rate(*((64, 2) if options.tiny else (8192, 20)), clock=time.perf_counter)
    print(f"bfloat16 matrix products: {peak / 1e12:.4g} TFLOP/s", flush=True)
    rows, profiles = [], []
    for case in cases(options.tiny, options.batch_size):
        cells, shares = measure(case, options.steps, peak)
        print("  ".join(cells), flush=True)
        rows.append(cells)
        listed = [[name, f"{share:.1%}"] for name, share in shares[:MOST_EXPENSIVE]]
        profiles.append(f"## Where the time goes: {case.name}\n\n{table(['operations', 'share'], listed)}")
    head = HEAD.format(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        device=jax.devices()[0].device_kind,
        peak=peak / 1e12,
        **{name: importlib.metadata.version(name) for name in ("jax", "flax")},
    )
    header = ["training", "batch", "steps/s", "tokens/s", "utilisation", "peak memory so far", "first step", "bar"]
    with replacing(options.out) as fresh:
        fresh.write_text("\n".join([head, table(header, rows), *profiles]), encoding="utf-8")
    print(f"wrote {options.out}")
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, lambda: bench(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
