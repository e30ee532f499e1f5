"""Runs of train_jax.py, in a process of its own or in this one, and what they leave."""

import contextlib
import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import torch_ref.saving
import train_jax
from flax_tf.training.metrics import read_rows

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "train_jax.py"


def environment(room: Path, **extra: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLAX_TF_CACHE": str(room / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(room / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


@dataclasses.dataclass
class Done:
    """How a run ended."""

    code: int
    out: str
    err: str

    def check_refused(self, message: str) -> None:
        """One line on stderr, with the message; no usage text, nothing on stdout."""
        assert self.code == 2, self.out + self.err
        assert self.out == ""
        assert len(self.err.splitlines()) == 1, self.err
        assert self.err.startswith("train_jax.py: error: ")
        assert message in self.err


def run(arguments: Sequence[object], room: Path, **extra: str) -> Done:
    """Runs Python in a process of its own."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=room, env=environment(room, **extra), capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def train(room: Path, *flags: str) -> Done:
    """Runs train_jax.py in this process, which takes seconds less than a new one."""
    out, err = io.StringIO(), io.StringIO()
    base = [] if "--config" in flags else ["--config", "tiny.yaml"]
    with (
        contextlib.chdir(room),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("FLAX_TF_CACHE", str(room / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        code = train_jax.main([*base, *flags])
    return Done(code, out.getvalue(), err.getvalue())


def losses(run_dir: Path) -> list[dict]:
    """The rows of a run without what the clock decides."""
    rows = read_rows(run_dir / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def exported(run_dir: Path) -> dict[str, np.ndarray]:
    state = torch_ref.saving.from_pretrained(run_dir / "export").state_dict()
    return {name: tensor.numpy() for name, tensor in state.items()}
