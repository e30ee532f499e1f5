"""The benchmarks at tiny sizes: that they measure what they say, and keep what they measured. Never how fast it is."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torch_ref.generation
import torch_ref.saving
from benchmarks import gpu, measure, ours, pytorch, report, results, torch_cache, worker
from benchmarks.__main__ import main
from benchmarks.gpu_cases import GPT2, cases
from benchmarks.op_profile import kind
from benchmarks.rows import ROWS, Bar
from benchmarks.work import Work
from benchmarks.workloads import TINY
from flax_tf.config import LanguageModelConfig
from flax_tf.errors import InputError
from flax_tf.saving import build
from flax_tf.training.optimizer import build_optimizer
from flax_tf.training.step import start

ROOT = Path(__file__).parent.parent
NAN = float("nan")


def call(*command: Any) -> subprocess.CompletedProcess[str]:
    # LLVM's optimisation takes longer than it saves in a test.
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = (sys.executable, *map(str, command))
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def bench(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return call("-m", "benchmarks", *arguments)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows, measured one after the other into one place; the first with all three sides."""
    out = tmp_path_factory.mktemp("bench")
    for row in ("block-forward", "port-1gb"):
        done = bench("--rows", row, "--rounds", 1, "--tiny", "--out", out)
        assert done.returncode == 0, done.stderr
        assert "round 1 of 1" in done.stdout  # it shows how far it is
    return out


def test_results_hold_both_rows_and_what_they_were_run_on(measured):
    content = json.loads((measured / "benchmarks" / "results.json").read_text())
    assert content["tiny"] is True and content["hardware"]["cores"] >= 1
    assert content["versions"]["jax"] and content["versions"]["torch"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert [row["name"] for row in content["rows"]] == ["block-forward", "port-1gb"]
    block, port = content["rows"]
    for row in (block, port):
        assert row["rounds"] == 1 and row["failures"] == {}
        sides = ("ours", "torch_eager", "torch_compile") if row is block else ("ours", "torch_eager", "torch_mmap")
        for side in sides:
            low, high = row[f"{side}_range_s"]
            assert 0 < low <= row[f"{side}_s"] <= high
            assert 0 <= row[f"{side}_extra_mb"] < row[f"{side}_peak_mb"]
        assert [bar["what"] for bar in row["bars"]] == [bar.what for bar in ROWS[row["name"]].bars]
        assert all(np.isfinite(bar["reached"]) for bar in row["bars"])
    assert port["torch_compile_s"] is None and port["torch_compile_peak_mb"] is None and port["file_mb"] > 0
    assert block["torch_compile_compile_s"] > 0


def test_the_document_has_every_row_and_every_bar(measured):
    text = (measured / "docs" / "performance.md").read_text()
    for name in ("block-forward", "port-1gb"):
        assert text.count(f"| {name} |") >= 1 + len(ROWS[name].bars)
        assert ROWS[name].about in text
    assert "lm-step-32" not in text
    assert "At tiny sizes" in text  # nobody takes it for a measurement
    assert (measured / "docs" / "performance.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_name_gets_one_line():
    done = bench("--rows", "lm-step-33")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch("benchmarks: error: there is no row lm-step-33: choose from block-forward, .*\n", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rounds", "0"], "rounds must be at least 1"), (["--tiny"], "give --out"), (["--unknown"], "--unknown")],
)
def test_wrong_arguments_get_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize("start", [main, gpu.main], ids=["bench", "gpu"])
def test_where_nothing_can_be_written_nothing_is_measured(start, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert start(["--tiny", "--out", str(tmp_path / "file" / "out")]) == 2
    out, err = capsys.readouterr()
    assert "cannot be written" in err and err.count("\n") == 1 and not out


def test_the_list_names_every_row(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(ROWS)


# All but what torch.compile takes long for, and larger batches of the same.
WORKS = [
    (name, side)
    for name, side in [*ours.works(Path()), *pytorch.works(Path())]
    if side != "torch_compile" and not name.endswith(("-256", "-64"))
]


@pytest.mark.parametrize(("name", "side"), WORKS, ids=map("-".join, WORKS))
def test_every_side_runs(name, side, tmp_path):
    torch.manual_seed(0)
    checkpoint = tmp_path / "model.pt"
    pytorch.write_checkpoint(checkpoint, TINY)
    work = worker.prepare(name, side, checkpoint, TINY)
    shown = np.asarray(work.run())
    assert np.isfinite(shown).all()
    if name.startswith("generate"):
        assert shown.shape == (int(name.split("-")[1]), TINY.prompt + TINY.new_tokens)
    if name == "port-1gb":
        tensors = torch.load(checkpoint, weights_only=True).values()
        # The first number of each page; that of a kernel, which Flax transposes, is the same if there is one page.
        assert shown == pytest.approx(sum(tensor.flatten()[0].item() for tensor in tensors), abs=1e-4)  # float32 sums


def test_every_side_of_every_row_can_be_prepared():
    known = {*ours.works(Path()), *pytorch.works(Path())}
    for row in ROWS.values():
        assert {(row.work or row.name, side.removesuffix("_cached")) for side in row.sides} <= known


def test_a_step_trains(tmp_path):
    """Both sides learn their one batch by heart: the work that is timed is a training."""
    for side in ("ours", "torch_eager"):
        work = worker.prepare("lm-step-32", side, tmp_path, TINY)
        losses = [float(work.run()) for _ in range(20)]
        if side == "ours":  # which adds them up
            losses = list(np.diff([0, *losses]))
        assert losses[-1] < 0.99 * losses[0]


def test_what_is_measured():
    calls = []
    found = worker.measure(Work(lambda: calls.append(0), steps=4), seconds=0.0)
    assert len(calls) == found["calls"] + 2 == worker.LEAST_STEPS + 2
    assert found["s"] >= 0 and found["peak_mb"] > 10
    calls.clear()
    assert worker.measure(Work(lambda: calls.append(0), once=True), seconds=1.0)["calls"] == 1 == len(calls)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_cache_of_pytorch_generates_as_the_reference(batch_size):
    torch.manual_seed(1)
    config = LanguageModelConfig(vocab_size=41, max_seq_length=23, d_model=12, num_heads=3, num_layers=2)
    model = torch_ref.saving.build(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 3  # so that the most probable token depends on the text
    prompt = torch.randint(41, (batch_size, 5))
    expected = torch_ref.generation.generate(model, prompt, 18, greedy=True)
    assert torch.equal(torch_cache.generate(model, prompt, 18, greedy=True), expected)
    assert len(set(expected[0, 5:].tolist())) > 3


def test_the_cache_of_pytorch_has_the_reference_s_logits():
    torch.manual_seed(2)
    config = LanguageModelConfig(vocab_size=41, max_seq_length=23, d_model=12, num_heads=3, num_layers=2)
    model = torch_ref.saving.build(config).double().eval()
    tokens = torch.randint(41, (2, 11))
    caches = [torch.full((2, 2, 3, 11, 4), NAN, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        expected = model(tokens)
        projections = [torch_cache.pack(layer.mha) for layer in model.transformer.transformer_layers]
        for start_, end in ((0, 7), (7, 8), (8, 9), (9, 10), (10, 11)):
            logits = torch_cache.next_logits(model, projections, tokens[:, start_:end], caches, start_)
            # 1e-12: rounding of float64 over a few hundred terms
            torch.testing.assert_close(logits, expected[:, end - 1], rtol=1e-12, atol=1e-12)


def row(**fields: Any) -> dict[str, Any]:
    sides = {f"{side}_{what}": None for side in ("ours", "torch_eager", "torch_compile") for what in ("s", "peak_mb")}
    ranges = {f"{name[:-2]}_range_s": [value, value] for name, value in fields.items() if name.endswith("_s")}
    about = {"name": "lm-step-32", "about": "", "rounds": 1, "date": "", "file_mb": None, "failures": {}}
    return {**about, **sides, **ranges, **fields}


def test_bars():
    fast, small = (
        Bar("", lambda row: row["a"] / row["b"], least=2.0, aim=3.0),
        Bar("", lambda row: row["b"] / row["a"], least=0.5, aim=0.25, at_most=True),
    )
    verdicts = [[results.judge(bar, {"a": a, "b": 1.0}) for bar in (fast, small)] for a in (1.0, 2.0, 3.0, 4.0)]
    assert [[(v["met"], v["aim_met"]) for v in both] for both in verdicts] == [
        [(False, False), (False, False)],
        [(True, False), (True, False)],
        [(True, True), (True, False)],
        [(True, True), (True, True)],
    ]
    missing = results.judge(fast, {"a": None, "b": 1.0})
    assert missing["reached"] is None and not missing["met"] and not missing["aim_met"]


def test_the_better_pytorch_is_the_faster_one_that_ran():
    (bar,) = ROWS["block-forward"].bars
    assert bar.ratio(row(ours_s=1.0, torch_eager_s=3.0, torch_compile_s=2.0)) == 2.0
    assert bar.ratio(row(ours_s=1.0, torch_eager_s=3.0)) == 3.0
    assert results.judge(bar, row(ours_s=1.0))["reached"] is None


def test_other_rows_stay(tmp_path):
    path = tmp_path / "results.json"
    results.write(path, results.content({"lm-step-256": row(name="lm-step-256", ours_s=5.0)}, tiny=False))
    rows = results.kept(path, {"lm-step-32"}, tiny=False)
    rows["lm-step-32"] = row(ours_s=2.0, torch_eager_s=5.0)
    content = results.content(rows, tiny=False)
    assert [(row["name"], row["ours_s"]) for row in content["rows"]] == [("lm-step-32", 2.0), ("lm-step-256", 5.0)]
    assert content["rows"][0]["bars"][0]["reached"] == 2.5
    assert "not measured" in report.markdown(content)


def test_rows_of_another_state_do_not_stay(tmp_path):
    path = tmp_path / "results.json"
    content = results.content({"lm-step-256": row(name="lm-step-256", ours_s=5.0)}, tiny=False)
    results.write(path, {**content, "versions": {**content["versions"], "jax": "0.1"}})
    with pytest.raises(InputError, match="measured with other versions: measure all rows"):
        results.kept(path, {"lm-step-32"}, tiny=False)
    assert results.kept(path, set(ROWS), tiny=False) == {}
    path.write_text("[]")
    with pytest.raises(InputError, match="not what the benchmarks write"):
        results.kept(path, set(ROWS), tiny=False)


def test_a_side_that_fails_is_told_and_the_rest_goes_on():
    told: list[str] = []
    broken = dataclasses.replace(ROWS["host-step"], work="nothing of the kind")
    fields = measure.run_row(broken, rounds=2, tiny=True, tell=told.append)
    assert fields["failures"].keys() == {"ours", "nnx_jit"} and fields["ours_s"] is None
    assert "KeyError: ('nothing of the kind', 'ours')" in fields["failures"]["ours"]
    assert sum("failed" in line for line in told) == 2  # and no side twice
    content = results.content({"host-step": fields}, tiny=True)
    assert content["rows"][0]["bars"][0]["reached"] is None
    text = report.markdown(content)
    assert "| failed |" in text and "nothing of the kind" in text and "not measured" in text


def test_the_gpu_script_runs(tmp_path):
    out = tmp_path / "gpu.md"
    done = call("benchmarks/gpu.py", "--tiny", "--steps", 2, "--batch_size", 2, "--out", out)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    for name in ("GPT-2 124M shape", "language model", "Transformer"):
        (cells,) = re.findall(rf"^\| {name} \| \d+ \| ([\d,.e+]+) \| ([\d,]+) \| ([\d.]+)% \|", text, re.MULTILINE)
        assert all(float(cell.replace(",", "")) > 0 for cell in cells)
        profile = text.split(f"## Where the time goes: {name}\n")[1].split("##")[0]
        shares = [float(share) for share in re.findall(r"\| ([\d.]+)% \|", profile)]
        assert shares == sorted(shares, reverse=True)
        assert 50 < sum(shares) < 101  # those listed are most of the time, and not counted twice


def test_the_gpu_script_needs_a_gpu(capsys):
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert "JAX sees no GPU" in err and err.count("\n") == 1 and not out


def test_operations_of_a_step_are_those_that_xla_counts():
    """At a width where the matrix products are nearly all there is."""
    case = cases(tiny=True, batch_size=2)[0]
    config = LanguageModelConfig(vocab_size=11, max_seq_length=8, d_model=192, num_heads=2, num_layers=2)
    case = type(case)(case.name, config, 64, case.loss, case.optimizer, "")
    state, steps = start(build(config), build_optimizer(case.optimizer, 10), case.loss, seed=0)
    counted = steps.train.lower(state, case.batch()).compile().cost_analysis()["flops"]
    assert case.operations(state.params) == pytest.approx(counted, rel=0.2)


def test_gpt2_has_the_weights_that_its_name_says():
    D, V, layers = GPT2.d_model, GPT2.token_count(), GPT2.num_layers
    assert pytest.approx(124e6, rel=0.01) == 12 * layers * D * D + V * D


def test_kinds_of_operations():
    names = ["loop_add_fusion.12", "loop_add_fusion_3", "loop_add_fusion", "dot_general.1.2", "gemm_fusion_dot_4_0"]
    assert [kind(name) for name in names] == [*["loop_add_fusion"] * 3, "dot_general", "gemm_fusion_dot"]
