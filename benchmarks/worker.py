"""Runs one side of one row in this process, and writes what was measured as JSON.

`python -m benchmarks.worker ROW SIDE RESULT CHECKPOINT FULL|TINY [keep_memory]`; `measure` starts it.
"""

import json
import re
import statistics
import sys
import time
from pathlib import Path

from benchmarks.work import Work
from benchmarks.workloads import FULL, TINY, Sizes
from flax_tf.memory import keep_memory

LEAST_STEPS = 3


def memory_mb(field: str) -> float:
    """Resident memory of this process: `VmRSS` is now, `VmHWM` at its highest.

    The latter is what getrusage calls ru_maxrss, but for one thing: that starts from the memory of whoever started the
    process.
    """
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) / 1024


def prepare(work: str, side: str, checkpoint: Path, sizes: Sizes) -> Work:
    """Imports the side's framework, and only that."""
    if side.startswith("torch"):
        from benchmarks import pytorch as module
    else:
        from benchmarks import ours as module
    return module.works(checkpoint)[work, side](sizes)


def measure(work: Work, seconds: float) -> dict[str, float]:
    """The time of the first call, which compiles, and the median of later ones; in seconds, of a step."""
    before = memory_mb("VmRSS")
    times: list[float] = []
    while not times or (not work.once and (len(times) < LEAST_STEPS + 2 or sum(times[2:]) < seconds)):
        clock = time.perf_counter()
        work.run()
        times.append(time.perf_counter() - clock)
    # The second call still warms up.
    later = times if work.once else times[2:]
    return {
        "s": statistics.median(later) / work.steps,
        "first_s": times[0],
        "compile_s": max(0.0, times[0] - statistics.median(later)),
        "calls": len(later),
        "peak_mb": memory_mb("VmHWM"),
        "extra_mb": memory_mb("VmHWM") - before,
    }


def main(name: str, side: str, result: str, checkpoint: str, scale: str, *options: str) -> None:
    if "keep_memory" in options:
        keep_memory()
    sizes = {"FULL": FULL, "TINY": TINY}[scale]
    if side == "checkpoint":
        from benchmarks.pytorch import write_checkpoint

        write_checkpoint(Path(checkpoint), sizes)
    else:
        measured = measure(prepare(name, side, Path(checkpoint), sizes), sizes.seconds)
        Path(result).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
