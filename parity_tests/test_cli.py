"""The command line: what it prints, its exit codes, and one line for wrong input with nothing left behind."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from directories import listing
from models import BACKBONE, BLOCK, reference, state_arrays, twin
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

import flax_tf
import torch_ref.saving
from flax_tf.cli import main
from flax_tf.config import LanguageModelConfig
from flax_tf.data.tokenizer import CHARACTERS as CHARACTERWISE
from flax_tf.data.tokenizer import bpe_tokenizer, char_tokenizer
from flax_tf.porting import read_weights
from flax_tf.saving import save_pretrained
from flax_tf.text_commands import Shown
from torch_ref.generation import generate

# Small, because a check compiles it four times.
MODEL = LanguageModelConfig(vocab_size=37, max_seq_length=13, d_model=14, num_heads=2, num_layers=1)
CHARACTERS = "".join(chr(ord("A") + i) for i in range(37))  # as many as the model has ids
PROGRAM = Path(sys.executable).with_name("flax-tf")


@pytest.fixture(autouse=True)
def x64_as_it_was() -> Generator[None]:
    """The command turns JAX's 64-bit types on for a checkpoint that has any; a process runs one command."""
    before = jax.config.read("jax_enable_x64")
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model as a PyTorch file and as a directory with a tokenizer, and a block."""
    here = tmp_path_factory.mktemp("files")
    torch.save(reference(MODEL).state_dict(), here / "lm.pt")
    save_pretrained(twin(reference(MODEL)), here / "lm", char_tokenizer([CHARACTERS]))
    save_file(reference(BLOCK).state_dict(), here / "block.safetensors")
    (here / "block.yaml").write_text("num_heads: 3\n")
    return here


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    """The lines that a successful command prints."""
    assert main([str(argument) for argument in arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def test_inspect_prints_tensors_and_architecture(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "inspect", files / "lm.pt")
    tensors = reference(MODEL).state_dict()
    rows = [line.split(maxsplit=1) for line in lines[1 : len(tensors) + 1]]
    assert [name for name, _ in rows] == list(tensors)
    for name, row in rows:
        assert row.split() == [*str(tuple(tensors[name].shape)).split(), "float32"]
    count = sum(tensor.numel() for tensor in tensors.values())
    assert lines[-2] == f"{len(tensors)} tensors, {count:,} numbers, {4 * count:,} bytes"
    assert lines[-1] == (
        "architecture: language_model (vocab_size 37, max_seq_length 13, d_model 14, num_heads 2, num_layers 1, "
        "dropout 0.0, layer_norm_eps 1e-05, mask True)"
    )
    assert run(capsys, "inspect", files / "lm")[-1] == lines[-1]


def test_inspect_says_what_it_cannot_tell(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "do not tell num_heads" in run(capsys, "inspect", files / "block.safetensors")[-1]
    save_file({"model.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    lines = run(capsys, "inspect", tmp_path)
    assert lines[1].split() == ["weight", "(3,)", "float32"]
    assert lines[-1].startswith("architecture: no known architecture has these keys (the first: weight)")


def test_port_makes_a_directory_that_pytorch_loads(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = run(capsys, "port", files / "block.safetensors", tmp_path / "out", "--config", files / "block.yaml")
    assert line == (f"ported 12 tensors to {tmp_path}/out: block (d_model 15, num_heads 3, layer_norm_eps 1e-05)")
    loaded = torch_ref.saving.from_pretrained(tmp_path / "out")
    assert loaded.config == BLOCK
    for name, tensor in reference(BLOCK).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_port_keeps_the_precision_and_strips_wrappers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    module = reference(BACKBONE)
    module.embeddings.double()
    module.transformer_layers[1].bfloat16()
    checkpoint = {"state_dict": {f"model.{name}": tensor for name, tensor in module.state_dict().items()}, "epoch": 3}
    torch.save(checkpoint, tmp_path / "last.ckpt.pt")
    (tmp_path / "config.json").write_text('{"mask": false}')
    run(capsys, "port", tmp_path / "last.ckpt.pt", tmp_path / "out", "--config", tmp_path / "config.json")
    assert caplog.messages == [
        "took the state dict under 'state_dict', and nothing else of the checkpoint",
        f"stripped the wrapper prefix 'model.' from {len(module.state_dict())} of {len(module.state_dict())} keys",
    ]
    loaded = torch_ref.saving.from_pretrained(tmp_path / "out")
    assert loaded.config == BACKBONE
    for name, tensor in module.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_check_of_a_language_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "check", files / "lm.pt")
    assert lines[-1].startswith("the same model: ")
    called = {path for path, module in reference(MODEL).named_modules() if hasattr(module, "forward")}
    for path in called:
        assert any((path or "(model)") in line.split() for line in lines) or path.endswith(("layers", "heads")), path


def test_check_names_the_layer_of_one_changed_weight(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = reference(MODEL).state_dict()
    layer = "transformer.transformer_layers.0.mha.attention_heads.1.key"
    tensors[f"{layer}.weight"][3, 7] += 1e-3
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "other.safetensors")
    assert main(["check", str(files / "lm.pt"), "--against", str(tmp_path / "other.safetensors")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"NOT the same model: the first difference is in {layer} (")


def test_check_of_a_block_asks_for_the_heads(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", files / "block.safetensors", "--config", files / "block.yaml"]
    assert run(capsys, *command)[-1].startswith("the same model: ")


@pytest.mark.parametrize("prompt", [[5], [3, 1, 4, 1, 5], list(range(17))], ids=["one", "five", "past the window"])
def test_greedy_generation_is_the_references(
    files: Path, prompt: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = generate(reference(MODEL), torch.tensor([prompt]), 19, greedy=True)[0].tolist()
    command = ["generate", files / "lm", "--prompt_ids", prompt, "--max_tokens", 19, "--greedy"]
    assert run(capsys, *command) == [str(expected)]


def test_generation_continues_a_text(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = generate(reference(MODEL), torch.tensor([[2, 0, 1]]), 5, greedy=True)[0].tolist()
    command = ["generate", files / "lm", "--prompt", "CAB", "--max_tokens", 5]
    assert run(capsys, *command, "--greedy") == ["".join(CHARACTERS[i] for i in ids)]
    sampled = run(capsys, *command, "--seed", 7, "--top_k", 5, "--top_p", 0.9, "--temperature", 0.8)
    assert sampled == run(capsys, *command, "--seed", 7, "--top_k", 5, "--top_p", 0.9, "--temperature", 0.8)
    assert sampled[0].startswith("CAB") and len(sampled[0]) == 8
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "export").symlink_to(files / "lm")
    assert run(capsys, "generate", tmp_path / "run", *command[2:], "--greedy")[0].startswith("CAB")


def test_generation_ends_with_the_tokenizers_end_of_text(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = generate(reference(MODEL), torch.tensor([[2, 0, 1]]), 9, greedy=True)[0].tolist()
    end = ids[6]
    names = [*CHARACTERS[:end], "<|endoftext|>", *CHARACTERS[end + 1 :]]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer, tokenizer.decoder = CHARACTERWISE, decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    command = ["generate", files / "lm", "--prompt", "CAB", "--max_tokens", 9, "--greedy", "--tokenizer", tmp_path]
    assert run(capsys, *command) == ["".join(CHARACTERS[i] for i in ids[: ids.index(end, 3)])]


@pytest.mark.parametrize("options", [["--greedy"], ["--seed", 3], ["--seed", 4]], ids=str)
def test_on_a_terminal_the_text_comes_in_parts_that_are_the_text(
    tmp_path: Path, options: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = bpe_tokenizer(["né à 東京 🙂🙃"], 256)  # 256 bytes: most of what is drawn is no whole character
    config = LanguageModelConfig(vocab_size=256, max_seq_length=13, d_model=14, num_heads=2, num_layers=1)
    save_pretrained(twin(reference(config)), tmp_path / "lm", tokenizer)
    command = ["generate", str(tmp_path / "lm"), "--prompt", "é🙂", "--max_tokens", "41", *map(str, options)]
    assert main(command) == 0
    piped = capsys.readouterr().out
    written: list[str] = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "write", written.append)
    assert main(command) == 0
    assert "".join(written) == piped
    assert sum(len(part) > 0 for part in written) > 5


def test_a_character_is_shown_when_its_bytes_are_complete(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = bpe_tokenizer(["abc"], 256)
    ids = tokenizer.encode("a🙂é").ids
    assert len(ids) == 7
    shown, parts = Shown(tokenizer.decode), []
    for end in range(1, 8):
        shown.grow(ids[:end])
        parts.append(capsys.readouterr().out)
    assert parts == ["a", "", "", "", "🙂", "", "é"]
    broken = Shown(tokenizer.decode)
    broken.grow(ids[:3])
    broken.end(ids[:3])  # half a character, where the text ends with it
    assert capsys.readouterr().out == tokenizer.decode(ids[:3]) + "\n"


def test_a_text_that_a_later_token_changes_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["do", "do n", "don't", "don't go"]  # as word pieces are joined
    shown = Shown(lambda ids: texts[len(ids) - 1])
    for count in (1, 2, 3):
        shown.grow([0] * count)
    shown.end([0] * 4)
    assert capsys.readouterr().out == "do n\ndon't go\n"


def wrong_inputs() -> list[Any]:
    """(what is prepared in the directory, the command, what the line must hold)."""

    def truncate(here: Path) -> None:
        save_file(reference(MODEL).state_dict(), here / "model.safetensors")
        os.truncate(here / "model.safetensors", 20_000)

    def pickle_an_object(here: Path) -> None:
        torch.save(reference(MODEL), here / "model.pt")

    def write(name: str, content: str) -> Any:
        return lambda here: (here / name).write_text(content)

    def nothing(here: Path) -> None:
        del here

    return [
        pytest.param(*case, id=case[2])
        for case in [
            (truncate, ["inspect", "model.safetensors"], "is not a whole safetensors file"),
            (truncate, ["port", "model.safetensors", "out"], "model.safetensors is not a whole"),
            (truncate, ["check", "model.safetensors"], "copy or save it again"),
            (pickle_an_object, ["inspect", "model.pt"], "(torch_ref.language_model.LanguageModel)"),
            (pickle_an_object, ["port", "model.pt", "out"], "holds pickled Python objects"),
            (nothing, ["inspect", "nowhere.pt"], "nowhere.pt does not exist"),
            (nothing, ["port", "nowhere.pt", "out"], "give a weight file or a directory"),
            (nothing, ["generate", "nowhere", "--prompt", "A"], "nowhere does not exist"),
            (nothing, ["inspect", "."], "holds no weights"),
            (lambda here: save_file({"weight": torch.zeros(3)}, here / "w.safetensors"), ["check", "w.safetensors"],
             "; for a pair of your own: --torch, --flax and --config"),
            (lambda here: save_file({"weight": torch.zeros(3)}, here / "w.safetensors"),
             ["check", "w.safetensors", "--json", "w.safetensors"], "is the file of CKPT too: name another"),
            (nothing, ["port", "{files}/lm.pt", "out", "--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
            (nothing, ["port", "{files}/block.safetensors", "out"], "its shapes do not tell num_heads"),
            (nothing, ["check", "{files}/block.safetensors"], "`num_heads: N` into a YAML file"),
            (write("c.yaml", "num_head: 3"), ["port", "{files}/block.safetensors", "out", "--config", "c.yaml"],
             "did you mean 'num_heads'?"),
            (write("c.yaml", "num_heads: 4"), ["port", "{files}/block.safetensors", "out", "--config", "c.yaml"],
             "choose num_heads from 1, 3, 5, 15"),
            (write("c.yaml", "num_heads: [3"), ["port", "{files}/block.safetensors", "out", "--config", "c.yaml"],
             "c.yaml, line 1: not YAML"),
            (write("c.yaml", "3"), ["port", "{files}/block.safetensors", "out", "--config", "c.yaml"],
             "c.yaml: it must hold settings"),
            (nothing, ["port", "{files}/lm.pt", "out", "--config", "."], "Is a directory"),
            (write("out", "mine"), ["port", "{files}/lm.pt", "out"], "out is a file"),
            (write("out", "mine"), ["port", "{files}/lm.pt", "out/below"], "out/below cannot be written"),
            (write("mine.txt", "mine"), ["port", "{files}/lm.pt", "."], "holds other files (such as mine.txt)"),
            (nothing, ["port", "{files}/lm.pt", "."], "holds the current directory"),
            (nothing, ["port", "{files}/lm.pt"], "out"),
            (nothing, ["inspect", "{files}/lm.pt", "--flag"], "unrecognized arguments: --flag"),
            (nothing, ["inspec", "{files}/lm.pt"], "invalid choice: 'inspec'"),
            (nothing, [], "{inspect,port,check,generate,attention"),
            (nothing, ["generate", "{files}/lm", "--prompt_ids", "[5,37]"], "token id 37 is outside the"),
            (nothing, ["generate", "{files}/lm", "--prompt_ids", "[-1]"], "token id -1 is outside"),
            (nothing, ["generate", "{files}/lm", "--prompt_ids", f"[{2**70}]"], "is outside every vocabulary"),
            (nothing, ["generate", "{files}/lm", "--prompt_ids", "[]"], "the prompt is empty"),
            (nothing, ["generate", "{files}/lm", "--prompt_ids", "five"], "prompt_ids"),
            (nothing, ["generate", "{files}/lm", "--prompt", ""], "give the text to continue as --prompt"),
            (nothing, ["generate", "{files}/lm", "--prompt", "Aß"], "doesn't know 'ß'"),
            (nothing, ["generate", "{files}/lm"], "as --prompt, or token ids as --prompt_ids"),
            (nothing, ["generate", "{files}/lm", "--prompt", "A", "--prompt_ids", "[0]"], "give the text to continue"),
            (nothing, ["generate", "{files}/lm", "--prompt", "A", "--top_p", "1.5"], "top_p must be from"),
            (nothing, ["generate", "{files}/lm", "--prompt", "A", "--temperature", "0"], "temperature must be"),
            (nothing, ["generate", "{files}/lm", "--prompt", "A", "--max_tokens", "0"], "max_tokens must be at least"),
            (nothing, ["generate", "{files}/lm", "--prompt", "A", "--max_tokens", "few"], "max_tokens"),
            (nothing, ["generate", "{files}/lm.pt", "--prompt", "A"], "lm.pt is not a saved model"),
            (nothing, ["generate", "{files}/lm", "--prompt", "A", "--tokenizer", "{files}/lm.pt"],
             "lm.pt: not a tokenizer.json"),
        ]
    ]  # fmt: skip


@pytest.mark.parametrize(("prepare", "command", "message"), wrong_inputs())
def test_wrong_input_is_one_line_and_leaves_nothing(
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prepare,
    command: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    before = listing(tmp_path), listing(files)
    assert main([argument.replace("{files}", str(files)) for argument in command]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("flax-tf: error: ") and message in line
    assert (listing(tmp_path), listing(files)) == before


def test_a_prompt_needs_a_tokenizer(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "port", files / "lm.pt", tmp_path / "bare")
    assert main(["generate", str(tmp_path / "bare"), "--prompt", "CAB"]) == 2
    assert "bare has no tokenizer.json: name one with --tokenizer, or give --prompt_ids" in capsys.readouterr().err
    command = ["generate", tmp_path / "bare", "--prompt", "CAB", "--max_tokens", 5, "--greedy"]
    (text,) = run(capsys, *command, "--tokenizer", files / "lm")
    assert text.startswith("CAB") and len(text) == 8


def test_a_checkpoint_that_does_not_fit_is_listed_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = reference(MODEL).state_dict()
    tensors["module.classifier.bias"] = tensors["classifier.bias"].clone()
    del tensors["transformer.embeddings.layer_norm.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    for command in (["check", "{}"], ["port", "{}", str(tmp_path / "out")]):
        assert main([argument.format(tmp_path / "model.safetensors") for argument in command]) == 2
        captured = capsys.readouterr()
        assert captured.err.splitlines() == [
            "flax-tf: error: the checkpoint does not fit the model:",
            "  missing from the checkpoint (1):",
            "    transformer.embeddings.layer_norm.bias (14,)",
            "  duplicate in the checkpoint (1):",
            "    classifier.bias, from classifier.bias, module.classifier.bias",
        ]
    assert list(listing(tmp_path)) == ["model.safetensors"]


def test_a_name_sends_nothing_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {**reference(MODEL).state_dict(), "extra\n\x1b[31mred": torch.ones(2)}
    torch.save(tensors, tmp_path / "model.pt")
    assert main(["port", str(tmp_path / "model.pt"), str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "\\x1b[31mred" in err and "\x1b" not in err


def test_the_installed_program(files: Path, tmp_path: Path) -> None:
    """As a user starts it: wrappers are said on stderr, wrong input is exit code 2, a closed pipe is no error."""
    tensors = {f"module.{name}": tensor for name, tensor in reference(MODEL).state_dict().items()}
    torch.save(tensors, tmp_path / "model.pt")
    done = subprocess.run([PROGRAM, "port", "model.pt", "out"], cwd=tmp_path, capture_output=True, text=True)
    n = len(tensors)
    assert done.returncode == 0
    assert done.stderr == f"flax-tf: stripped the wrapper prefix 'module.' from {n} of {n} keys\n"
    assert done.stdout.startswith(f"ported {n} tensors to out: language_model (")
    np.testing.assert_equal(dict(read_weights(tmp_path / "out")), state_arrays(reference(MODEL)))

    done = subprocess.run([PROGRAM, "inspect", "nowhere"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("flax-tf: error: nowhere does not exist: give a weight file or a directory that holds one\n")

    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([PROGRAM, "port", files / "lm", tmp_path / "out"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_port_keeps_the_tokenizer(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "port", files / "lm", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (files / "lm" / "tokenizer.json").read_text()


def test_what_the_package_gives_is_listed() -> None:
    assert {"from_pretrained", "save_pretrained"} <= set(dir(flax_tf))


def test_numbers_in_a_config_may_have_exponents(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text("num_heads: 3\nlayer_norm_eps: 1e-6\n")
    (line,) = run(capsys, "port", files / "block.safetensors", tmp_path / "out", "--config", tmp_path / "c.yaml")
    assert line.endswith("block (d_model 15, num_heads 3, layer_norm_eps 1e-06)")
