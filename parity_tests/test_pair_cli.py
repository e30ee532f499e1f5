"""`flax-tf check` on a pair of the user's own, and its reports as files."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import listing
from safetensors.torch import save_file

from flax_tf.cli import main
from flax_tf.parity.pair import check_pair

MODELS = """
import torch
from flax import nnx


class Net(torch.nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.norm = torch.nn.LayerNorm(width)
        self.model = torch.nn.Linear(width, vocab)  # called as a wrapper is

    def forward(self, ids, scale, keep=None):
        hidden = self.embed(ids) * scale
        if keep is not None:
            hidden = hidden * keep
        return self.model(self.norm(hidden))


class Twin(nnx.Module):
    def __init__(self, vocab, width, epsilon=1e-5, *, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, epsilon=epsilon, rngs=rngs)
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, ids, scale, keep=None):
        hidden = self.embed(ids) * scale
        if keep is not None:
            hidden = hidden * keep
        return self.head(self.norm(hidden))


class Failing(Twin):
    def __call__(self, ids, scale, keep=None):
        raise KeyError("no such thing\\nin here")


class FailingNet(Net):
    def forward(self, ids, scale, keep=None):
        return super().forward(ids, scale.nothing)


def make_twin(vocab, width):
    return Twin(vocab, width, rngs=nnx.Rngs(5))


def on_meta(vocab, width):
    return Net(vocab, width).to("meta")


def lazy(vocab, width):
    net = Net(vocab, width)
    net.model = torch.nn.LazyLinear(vocab)
    return net


def nothing(**kwargs):
    return None


NUMBER = 3
"""

CONFIG: dict[str, Any] = {
    "init": {"vocab": 37, "width": 13},
    "inputs": [{"shape": [2, 7], "dtype": "int64", "high": 37}, {"shape": [2, 7, 1], "name": "scale"}],
    "rename": {"model": "head"},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with models and a config that fit."""
    (tmp_path / "user_pair.py").write_text(MODELS)
    (tmp_path / "user_broken.py").write_text("1 / 0\n")
    (tmp_path / "user_needy.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "pair.yaml").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("user_pair", "user_broken", "user_needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


PAIR = ["check", "--torch", "user_pair:Net", "--flax", "user_pair:Twin", "--config", "pair.yaml"]


def test_a_pair_of_the_users_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.path)
    command = [*PAIR, "--precisions", "float32,bfloat16", "--html", "pages/out.html", "--json", "out.json"]
    assert main(command) == 0
    captured = capsys.readouterr()
    last = captured.out.splitlines()[-1]
    assert captured.err == "" and last.startswith("the same model: 4 submodules")
    assert last.endswith("float32 and bfloat16 as accurate as PyTorch")
    content = json.loads((here / "out.json").read_text())
    assert content["same"] is True and content["summary"] == last
    assert {row["name"]: row["flax"] for row in content["rows"] if row["kind"] == "output"} == {
        "embed": "embed",
        "norm": "norm",
        "model": "head",
        "(model)": "(model)",
    }
    assert all(row["low"].keys() == {"float32", "bfloat16"} for row in content["rows"] if row["kind"] == "output")
    page = (here / "pages" / "out.html").read_text()
    assert last in page and "Twin: Flax against PyTorch" in page
    assert sys.path == before


def test_a_difference_is_exit_code_1_and_is_written_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pair.yaml").write_text(json.dumps({**CONFIG, "flax": {"epsilon": 1e-6}}))
    assert main([*PAIR, "--precisions", "float64", "--html", "out.html"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("NOT the same model: the first difference is in norm")
    assert "float32" not in out
    assert "The first difference: <code>norm</code>" in (here / "out.html").read_text()


def test_a_function_values_and_weights(here: Path) -> None:
    """Everything a config may say that the other tests do not."""
    net = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(37, 13), "norm": torch.nn.LayerNorm(13), "model": torch.nn.Linear(13, 37)}
    )
    state = {name: tensor + 0.25 for name, tensor in net.state_dict().items()}
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, here / "weights.safetensors")
    inputs = [
        {"value": [[1, 2, 36]]},
        {"shape": [1, 3, 1]},
        {"shape": [1, 3, 13], "dtype": "bool", "name": "keep"},
    ]
    config = {**CONFIG, "inputs": inputs, "train": True, "channels_last": False, "seed": 3}
    report = check_pair("user_pair:Net", "user_pair:make_twin", config, here / "weights.safetensors", precisions=())
    assert report.ok, report.summary()
    assert report.precisions == []
    assert {row.name for row in report.rows if row.kind == "tensor"} == state.keys()


def test_the_seed_decides_the_inputs_and_weights(here: Path) -> None:
    def errors(seed: int) -> list[float]:
        config = {**CONFIG, "seed": seed}
        return [row.float64 for row in check_pair("user_pair:Net", "user_pair:Twin", config, precisions=()).rows]

    first = errors(0)
    assert first == errors(0)
    assert first != errors(1)


def wrong_pairs() -> list[Any]:
    """(changes of the config, arguments after `check`, what the line must hold)."""

    def pair(torch: str = "user_pair:Net", flax: str = "user_pair:Twin", *more: str) -> list[str]:
        return ["--torch", torch, "--flax", flax, "--config", "pair.yaml", *more]

    def with_input(**fields: Any) -> dict[str, Any]:
        return {"inputs": [fields]}

    cases = [
        ({}, [], "give a checkpoint as CKPT"),
        ({}, ["--torch", "user_pair:Net", "--config", "pair.yaml"], "own pair as --torch and --flax"),
        ({}, ["--flax", "user_pair:Twin", "--config", "pair.yaml"], "own pair as --torch and --flax"),
        ({}, ["model.pt", *pair()], "give them, or CKPT, not both"),
        ({}, ["model.pt", "--weights", "other.pt"], "give them, or CKPT, not both"),
        ({}, pair()[:4], "need --config FILE"),
        ({}, [*pair(), "--against", "x.pt"], "CKPT (and --against)"),
        ({}, pair("user_pair"), "--torch user_pair: write it as package.module:Class"),
        ({}, pair("nowhere_models:Net"), "there is no module nowhere_models"),
        ({}, pair("user_pair.below:Net"), "there is no module user_pair.below"),
        ({}, pair("user_needy:Net"), "importing it raised ModuleNotFoundError: No module named 'nowhere_to"),
        ({}, pair("user_broken:Net"), "importing it raised ZeroDivisionError: division by zero (user_broken.py"),
        ({}, pair("user_pair:Nett"), "user_pair has no Nett: did you mean Net?"),
        ({}, pair("user_pair:NUMBER"), "neither a class nor a function"),
        ({}, pair("user_pair:Twin"), "--torch user_pair:Twin: making it with (vocab=37, width=13) raised TypeError"),
        ({}, pair("user_pair:make_twin"), "it makes a Twin, not a torch.nn.Module"),
        ({}, pair(flax="user_pair:Net"), "it makes a Net, not a flax.nnx.Module"),
        ({}, pair(flax="user_pair:nothing"), "it makes a NoneType, not a flax.nnx.Module"),
        ({"torch": {"depth": 3}}, pair(), "unexpected keyword argument 'depth'"),
        ({"flax": {"depth": 3}}, pair(), "--flax user_pair:Twin: making it with"),
        ({"input": []}, pair(), "unknown field 'input': did you mean 'inputs'?"),
        ({"init": 3}, pair(), "init must be dict, not 3"),
        ({"train": 1}, pair(), "train must be bool, not 1"),
        ({"inputs": []}, pair(), "say what to feed the models"),
        ({"inputs": [3]}, pair(), "input 1 must hold settings"),
        ({"rename": {"model": 3}}, pair(), "rename must map"),
        ({"rename": {"model": "heads"}}, pair(), "the Flax model has no 'heads'"),
        (with_input(shape=[2, 7], dtype="int64"), pair(), "integers need `high`"),
        (with_input(shape=[2, 7], dtype="int32", high=2**31 + 1), pair(), "high must be at most 2147483648 for int32"),
        (with_input(value=[[1, 2], [3]]), pair(), "numbers, in rows of one length, not [[1, 2], [3]]"),
        (with_input(value=["one"]), pair(), "a list as value must hold numbers"),
        ({"seed": -1}, pair(), "seed must be from 0 to 4294967295, not -1"),
        ({"seed": 10**30}, pair(), "seed must be from 0 to 4294967295"),
        ({}, pair("user_pair:on_meta"), "embed.weight of the PyTorch model is on the meta device"),
        ({}, pair("user_pair:lazy"), "model.weight of the PyTorch model is lazy and has no shape yet"),
        ({}, [*pair(), "--html", "pair.yaml"], "--html pair.yaml is the file of --config too: name another"),
        ({}, [*pair(), "--html", "out", "--json", "./out"], "--json ./out is the file of --html too"),
        ({}, [*pair(), "--weights", "short.safetensors", "--json", "short.safetensors"], "the file of --weights too"),
        (with_input(shape=[2, 7], dtype="int8"), pair(), "dtype 'int8': choose from float32, int32, int64, bool"),
        (with_input(shape=[10**30, 7]), pair(), "is of more numbers than any memory holds"),
        (with_input(shape=[2, 0]), pair(), "sizes of at least 1, not [2, 0]"),
        (with_input(shape="2, 7"), pair(), "shape must be list or null, not '2, 7'"),
        (with_input(name="ids"), pair(), "input 1: give a shape or a value"),
        (with_input(shape=[2, 7], dtype="int64", high=37), pair(),
         "--torch user_pair:Net: running it raised TypeError"),
        ({}, pair("user_pair:FailingNet"), "object has no attribute 'nothing' (user_pair.py, line "),
        ({}, pair(flax="user_pair:Failing"),
         "--flax user_pair:Failing: running it raised KeyError: 'no such thing\\nin here' (user_pair.py, line "),
        ({}, [*pair(), "--precisions", "float16"], "precision 'float16': besides float64, choose from"),
        ({}, [*pair(), "--html", "."], ". is a directory: name a file to write"),
        ({}, [*pair(), "--weights", "nowhere.pt"], "nowhere.pt does not exist"),
        ({}, [*pair(), "--weights", "short.safetensors"], "short.safetensors does not fit the PyTorch model: "),
        ({}, [*pair(), "--weights", "double.safetensors"], "holds one tensor under two names"),
        ({}, ["--torch", "user_pair:Net", "--flax", "user_pair:Twin", "--config", "nowhere.yaml"], "No such file"),
    ]  # fmt: skip
    return [pytest.param(*case, id=case[2]) for case in cases]


@pytest.mark.parametrize(("changes", "arguments", "message"), wrong_pairs())
def test_wrong_input_is_one_line_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], arguments: list[str], message: str
) -> None:
    (here / "pair.yaml").write_text(json.dumps({**CONFIG, **changes}))
    save_file({"norm.bias": torch.zeros(13)}, here / "short.safetensors")
    save_file({"norm.bias": torch.zeros(13), "module.norm.bias": torch.ones(13)}, here / "double.safetensors")
    before = listing(here)
    assert main(["check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("flax-tf: error: ") and message in line
    assert listing(here) == before


def test_a_rename_that_is_missing_lists_the_keys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pair.yaml").write_text(json.dumps({**CONFIG, "rename": {}}))
    assert main(PAIR) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "flax-tf: error: the checkpoint does not fit the model:"
    assert "  missing from the checkpoint (2):" in lines and "    head.bias (37,)" in lines
