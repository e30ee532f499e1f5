"""The guide runs: every snippet and command of docs/port_your_own.md, in order, prints what the guide shows."""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
import torch

from flax_tf.porting import rules

GUIDE = Path(__file__).parents[1] / "docs" / "port_your_own.md"
# Measurements and versions differ between machines: 1.3e-16, 3.21s, 2.13.0+cpu, on cpu.
VARIES = re.compile(r"\b\d+(\.\d+)+(e[-+]\d+)?(\+\w+)?|\bon (cpu|gpu|tpu)\b")
# The command that the guide runs on a machine without PyTorch.
WITHOUT_TORCH = "python check_gpt.py"
# "..." in the guide stands for any text.
RULES_OF_TEXT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Fence(NamedTuple):
    language: str
    line: int
    """Of its first line of text, from 1."""
    text: str


def fences(markdown: str) -> Iterator[Fence]:
    """The fenced blocks. Fails for one that is not closed."""
    language, start, lines = None, 0, []
    for number, line in enumerate(markdown.splitlines(), 1):
        if language is None and line.startswith("```"):
            language, start, lines = line[3:].strip(), number + 1, []
        elif line == "```":
            yield Fence(str(language), start, "".join(f"{line}\n" for line in lines))
            language = None
        elif language is not None:
            lines.append(line)
    assert language is None, f"the block that starts at line {start} has no end"


def file_of(fence: Fence) -> Path | None:
    """The file that the block says it belongs to."""
    first = re.match(r"# (\w+\.(py|yaml))\n", fence.text)
    return Path(first[1]) if first else None


def execute(fence: Fence, namespace: dict) -> str:
    """Runs a snippet, whose tracebacks are those of the guide; what it printed."""
    printed = io.StringIO()
    code = compile("\n" * (fence.line - 1) + fence.text, GUIDE, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def command(line: str) -> str:
    """Runs a command line with this environment's programs, where warnings are errors; what it printed."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    settings |= {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONWARNINGS": "error",
        "PYTHONPATH": str(hidden_torch()) if line == WITHOUT_TORCH else "",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(shlex.split(line), env=settings, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def hidden_torch() -> Path:
    """A directory in which importing torch fails, as if it were not installed."""
    directory = Path("hidden")
    directory.mkdir()
    (directory / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    return directory.absolute()


def check_output(shown: str, printed: str, line: int) -> None:
    """Fails unless what was printed is what the guide shows at this line."""
    same = doctest.OutputChecker().check_output(VARIES.sub("#", shown), VARIES.sub("#", printed), RULES_OF_TEXT)
    assert same, f"{GUIDE.name}, line {line}, shows\n{shown}\nbut this was printed:\n{printed}"


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh directory, and what a reader's session changes is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(rules, "RULES", dict(rules.RULES))
    with torch.random.fork_rng(), jax.numpy_rank_promotion("allow"):
        yield
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


def follow(guide: str) -> None:
    """Does all that the guide says. Fails where it raises, or prints what isn't shown, or isn't understood."""
    namespace = {"__name__": "guide"}
    printed = ""
    for fence in fences(guide):
        if fence.language == "text":
            check_output(fence.text, printed, fence.line)
            printed = ""
            continue
        assert not printed.strip(), f"{GUIDE.name} does not show, before line {fence.line}:\n{printed}"
        if (file := file_of(fence)) is not None:
            with file.open("a", encoding="utf-8") as opened:
                opened.write(fence.text)
        elif fence.language == "python":
            printed = execute(fence, namespace)
        elif fence.language == "console":
            line, shown = fence.text.split("\n", 1)
            assert line.startswith("$ "), f"{GUIDE.name}, line {fence.line}: a command begins with $"
            check_output(shown, command(line[2:]), fence.line)
        else:
            raise AssertionError(f"{GUIDE.name}, line {fence.line}: a block of unknown language {fence.language!r}")
    assert not printed.strip(), f"{GUIDE.name} does not show at its end:\n{printed}"


@pytest.mark.usefixtures("reader")
def test_every_snippet_of_the_guide_runs_and_prints_what_it_shows() -> None:
    follow(GUIDE.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(
    ("guide", "error"),
    [
        ("```python\nassert 1 == 2\n```", None),
        ("```python\nprint(1.5, 7)\n```\n```text\n2.5 8\n```", "line 5, shows"),
        ("```python\nprint(7)\n```\n```python\nx = 1\n```", "does not show, before line 5"),
        ("```python\nprint(7)\n```", "does not show at its end"),
        ("```pyhton\nx = 1\n```", "unknown language 'pyhton'"),
        ("```python\nx = 1\n", "has no end"),
        ("```console\n$ python -c 'print(7)'\n8\n```", "line 2, shows"),
        ("```console\n$ python -c 'raise SystemExit(1)'\n```", "SystemExit"),
        ("```python\n# lost.py\nx = 1\n```\n```python\nfrom lost import y\n```", None),
    ],
)
def test_a_guide_that_has_rotted_is_noticed(guide: str, error: str | None) -> None:
    with pytest.raises((AssertionError, ImportError), match=error):
        follow(guide)
