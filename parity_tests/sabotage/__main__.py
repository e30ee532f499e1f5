"""`make sabotage`: every planted fault and 500 honest pairs, as a table."""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import track
from rich.table import Table

from flax_tf.terminal import print_table
from sabotage import FAULTS, find
from sabotage.honest import false_alarm

HEADINGS = ("planted fault", "trap", "where it is", "found")


def main() -> int:
    """Returns 0 if all faults were caught and located, and no honest pair was called different; else 1."""
    parser = argparse.ArgumentParser(prog="make sabotage", description=__doc__)
    parser.add_argument("--honest", type=int, default=500, help="how many honest pairs to try")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--docs", type=Path, help="a Markdown file to write the table to")
    options = parser.parse_args()
    # A new process now and then: compiled programs stay in memory.
    with multiprocessing.get_context("spawn").Pool(options.workers, maxtasksperchild=50) as pool:
        found = _all(pool, find, len(FAULTS), "planted faults")
        alarms = [line for line in _all(pool, false_alarm, options.honest, "honest pairs") if line]
    caught = sum(place is not None for place in found)
    located = sum(fault.place == place for fault, place in zip(FAULTS, found, strict=True))
    verdict = (
        f"caught {caught} of {len(FAULTS)}, located {located} of {len(FAULTS)}, "
        f"false alarms {len(alarms)} of {options.honest}"
    )
    rows = [
        (
            fault.name,
            fault.trap,
            fault.place,
            "located" if place == fault.place else "NOT caught" if place is None else place,
        )
        for fault, place in zip(FAULTS, found, strict=True)
    ]
    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*row)
    print_table(table)
    print(*(f"false alarm {line}" for line in alarms), verdict, sep="\n")
    if options.docs:
        options.docs.write_text(_markdown(rows, verdict), encoding="utf-8")
    return 0 if caught == located == len(FAULTS) and not alarms else 1


def _all(pool: Any, function: Callable[[int], Any], count: int, what: str) -> list[Any]:
    return list(track(pool.imap(function, range(count)), description=what, total=count))


def _markdown(rows: list[tuple[str, str, str, str]], verdict: str) -> str:
    lines = [
        "# What the checks catch",
        "",
        "Every fault below is planted, by itself, in one of two models that are the same. The report must say that",
        "they differ, and name the submodule, or the part of the training step, where the fault is. And honest pairs,",
        "random in size, settings, weights and inputs, must pass. A trap is a row of [differences.md](differences.md).",
        "This file was written by `make sabotage`, which ended with:",
        "",
        f"    {verdict}",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|---|---|---|---|",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
