"""`results.json`: what was measured, on what, and against which bars."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rows import ROWS, Bar
from flax_tf.errors import InputError
from flax_tf.files import replacing

LIBRARIES = ("flax-tf", "jax", "jaxlib", "flax", "optax", "numpy", "torch")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in LIBRARIES}}


def hardware() -> dict[str, Any]:
    """The processor's name, how many cores this process may use, and the memory of the machine."""
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 2**30),
    }


def judge(bar: Bar, row: Mapping[str, Any]) -> dict[str, Any]:
    """The bar and what was reached; None where a side could not run."""
    try:
        reached = bar.ratio(row)
    except (TypeError, ValueError):  # a None, or nothing to take the least of
        reached = None
    sign = -1 if bar.at_most else 1
    return {
        "what": bar.what,
        "at_most": bar.at_most,
        "least": bar.least,
        "aim": bar.aim,
        "reached": reached,
        "met": reached is not None and sign * reached >= sign * bar.least,
        "aim_met": reached is not None and sign * reached >= sign * bar.aim,
    }


def kept(path: Path, measured: set[str], tiny: bool) -> dict[str, Any]:
    """{name: row} of the rows in `results.json` that stay when those named are measured.

    Raises InputError if the file holds something else, or rows of other versions or other hardware would stay: one
    table holds one state of things.
    """
    if not path.is_file():
        return {}
    now = _now(tiny)
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["name"]: row for row in old["rows"]}
        other = [field for field in now if old[field] != now[field]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not what the benchmarks write ({error!r}): move it away") from None
    if not other:
        return rows
    if rows.keys() <= measured:
        return {}
    raise InputError(f"{path} was measured with other {' and '.join(other)}: measure all rows, or give another --out")


def content(rows: Mapping[str, Any], tiny: bool) -> dict[str, Any]:
    """What `results.json` holds: these rows in the order of `ROWS`, each with its bars, and what they were run on."""
    judged = [
        {**rows[name], "bars": [judge(bar, rows[name]) for bar in row.bars]}
        for name, row in ROWS.items()
        if name in rows
    ]
    return {**_now(tiny), "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "rows": judged}


def _now(tiny: bool) -> dict[str, Any]:
    return {"versions": versions(), "hardware": hardware(), "tiny": tiny}


def write(path: Path, results: Mapping[str, Any]) -> None:
    with replacing(path) as fresh:
        fresh.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
