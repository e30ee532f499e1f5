"""`python -m benchmarks` measures every row; `--rows lm-step-32 generate-1` only these, `--list` names them."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report, results
from benchmarks.measure import ROOT, run_row
from benchmarks.rows import ROWS, choose
from flax_tf.command import DIFFERENT, OK, Parser, run
from flax_tf.errors import InputError
from flax_tf.files import check_writable

PROG = "benchmarks"


def bench(argv: Sequence[str]) -> int:
    """Measures and writes. Returns 1 if a side could not run."""
    parser = Parser(prog=PROG, description="Times and memory against PyTorch.")
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="only these; all by default")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs, a fresh process each time")
    parser.add_argument("--list", action="store_true", help="name the rows, and measure nothing")
    parser.add_argument(
        "--tiny", action="store_true", help="at tiny sizes, to try the benchmarks themselves; needs --out"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where benchmarks/results.json and docs/performance.* go; here by default"
    )
    options = parser.parse_args(list(argv))
    rows = choose(options.rows)
    if options.list:
        print("\n".join(f"{row.name:24}{row.about}" for row in ROWS.values()))
        return OK
    if options.rounds < 1:
        raise InputError(f"rounds must be at least 1, not {options.rounds}")
    if options.tiny and options.out is None:
        raise InputError("--tiny measures nothing that is worth keeping: give --out, where to write it")
    if importlib.util.find_spec("torch") is None:
        raise InputError("PyTorch is the other side, and is not installed: make bench installs it")
    out = Path(options.out) if options.out else ROOT
    path = out / "benchmarks" / "results.json"
    check_writable(path)
    check_writable(out / "docs" / "performance.md")
    found = results.kept(path, {row.name for row in rows}, options.tiny)
    for row in rows:
        found[row.name] = run_row(row, options.rounds, options.tiny, tell)
        content = results.content(found, options.tiny)
        results.write(path, content)  # after each row, so that an interrupted run keeps what it has
        report.write(content, out / "docs")
    print(f"wrote {path}, {out / 'docs' / 'performance.md'} and {out / 'docs' / 'performance.png'}")
    return DIFFERENT if any(found[row.name]["failures"] for row in rows) else OK


def tell(line: str) -> None:
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    return run(PROG, lambda: bench(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
