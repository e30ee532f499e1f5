"""Weight files: what is read comes whole and bit for bit, what is damaged or unsafe is refused in one line."""

import contextlib
import json
import os
import pickle
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from directories import listing
from models import ATTN_RNN, LANGUAGE_MODEL, reference, state_arrays
from safetensors.torch import load_file, save_file

from flax_tf.errors import InputError
from flax_tf.files import replacing
from flax_tf.porting import read_weights, write_weights
from flax_tf.porting.files import numpy_to_torch, torch_to_numpy
from flax_tf.porting.memory import file_of

TORCH_FORMATS = [("pt", True), ("pth", True), ("bin", True), ("pt", False), ("bin", False)]


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "float32": torch.randn(5, 3),
        "bfloat16": torch.randn(7, 2).bfloat16(),
        "float16": torch.randn(11).half(),
        "float8_e4m3fn": torch.randn(7).to(torch.float8_e4m3fn),
        "float8_e5m2": torch.randn(7).to(torch.float8_e5m2),
        "float64": torch.randn(2, 3, 5).double(),
        "int64": torch.arange(13),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(-0.0),
        "bfloat16 scalar": torch.tensor(1.5).bfloat16(),
        "empty": torch.zeros(0, 3),
    }


def assert_same(arrays: dict[str, np.ndarray], tensors: dict[str, torch.Tensor]) -> None:
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert arrays[name].dtype.name == str(tensor.dtype).removeprefix("torch."), name
        assert arrays[name].shape == tuple(tensor.shape), name
        assert arrays[name].tobytes() == bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()), name


def refused(path: Path) -> str:
    """The one line with which reading the path is refused."""
    with pytest.raises(InputError) as caught:
        read_weights(path)
    (line,) = str(caught.value).splitlines()
    assert str(path.parent) in line
    return line


@pytest.mark.parametrize(("suffix", "zipped"), TORCH_FORMATS)
def test_pytorchs_files_are_read_bit_for_bit(tmp_path: Path, suffix: str, zipped: bool) -> None:
    tensors = some_tensors()
    tied = torch.randn(5, 3)
    tensors |= {
        "tied": tied,
        "tied too": tied,
        "transposed": tied.T,
        "part": tied[1:, 1:],
        "repeated": tied[:1].expand(4, 3),
    }
    tensors["bfloat16 transposed"] = tied.bfloat16().T
    tensors["trained"] = torch.nn.Parameter(tied)
    if not zipped:  # the old format is older than float8, and PyTorch itself fails to read it back
        tensors = {name: tensor for name, tensor in tensors.items() if "float8" not in name}
    file = tmp_path / f"model.{suffix}"
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    arrays = read_weights(file)
    assert_same(arrays, {name: tensor.detach() for name, tensor in tensors.items()})


def test_pytorchs_files_are_mapped(tmp_path: Path) -> None:
    """Tensors of every kind that is common, and so all of the file."""
    tied = torch.randn(5, 3)
    tensors = some_tensors() | {
        "tied": tied,
        "tied too": tied,
        "part": tied[1:, 1:].T,
        "trained": torch.nn.Parameter(tied),
    }
    torch.save({"epoch": 3, "model": tensors}, tmp_path / "model.pt")
    arrays = read_weights(tmp_path / "model.pt")
    assert_same(arrays, {name: tensor.detach() for name, tensor in tensors.items()})
    assert all(file_of(array) is not None for array in arrays.values())
    assert arrays["tied"].__array_interface__ == arrays["tied too"].__array_interface__


def test_what_is_not_mapped_is_read_by_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    tensors = {"weight": torch.arange(15.0).reshape(3, 5)}
    torch.save(tensors, file)
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, b"big" if name.endswith("/byteorder") else content)
    assert_same(read_weights(file), {"weight": numpy_to_torch(torch_to_numpy(tensors["weight"]).byteswap())})
    for negative in (torch._neg_view(torch.ones(3)), torch.ones(3, dtype=torch.complex64).conj()):
        torch.save(tensors | {"odd": negative}, file)
        assert refused(file).startswith("odd in ")


def test_safetensors_are_read_bit_for_bit(tmp_path: Path) -> None:
    save_file(some_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(read_weights(tmp_path / "model.safetensors"), some_tensors())
    assert_same(read_weights(str(tmp_path)), some_tensors())


def test_what_is_written_is_read_by_pytorch_bit_for_bit(tmp_path: Path) -> None:
    arrays = {name: torch_to_numpy(tensor) for name, tensor in some_tensors().items()}
    arrays["transposed"] = np.arange(15, dtype=np.float32).reshape(3, 5).T
    write_weights(arrays, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert torch.equal(read.pop("transposed"), torch.arange(15.0).reshape(3, 5).T)
    assert_same({name: torch_to_numpy(tensor) for name, tensor in read.items()}, some_tensors())
    for name, tensor in some_tensors().items():
        again = numpy_to_torch(arrays[name])
        assert again.dtype == tensor.dtype and torch.equal(again.double(), tensor.double())
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1  # readable to whom any new file is


@pytest.mark.parametrize("container", ["state_dict", "model_state_dict", "model", "module"])
def test_a_training_checkpoints_state_dict_is_found(
    tmp_path: Path, container: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = reference(LANGUAGE_MODEL)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.tensor([[3, 5]])).sum().backward()
    optimizer.step()
    checkpoint = {"epoch": 3, "optimizer": optimizer.state_dict(), container: module.state_dict()}
    torch.save(checkpoint, tmp_path / "model.pt")
    assert_same(read_weights(tmp_path / "model.pt"), module.state_dict())
    assert caplog.messages == [f"took the state dict under '{container}', and nothing else of the checkpoint"]


@pytest.mark.parametrize("suffix", ["", "_state_dict"])
def test_an_encoder_and_a_decoder_saved_side_by_side_are_joined(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = reference(ATTN_RNN)
    checkpoint = {f"{half}{suffix}": getattr(module, half).state_dict() for half in ("encoder", "decoder")}
    torch.save({"epoch": 3, **checkpoint}, tmp_path / "model.pt")
    assert_same(read_weights(tmp_path / "model.pt"), module.state_dict())
    names = f"'encoder{suffix}' and 'decoder{suffix}'"
    assert caplog.messages == [f"joined the state dicts under {names}, and took nothing else of the checkpoint"]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails, as if it were not installed
import numpy as np
import flax_tf
from flax_tf.cli import main
from flax_tf.errors import InputError
from flax_tf.porting import read_weights, write_weights
here = sys.argv[1]
assert main(["inspect", f"{here}/model.safetensors"]) == 0
assert main(["port", f"{here}/model.safetensors", f"{here}/ported"]) == 0
model = flax_tf.from_pretrained(f"{here}/ported")
flax_tf.save_pretrained(model, f"{here}/saved")
assert np.isfinite(model(np.array([[3, 5]]))).all()
try:
    read_weights(f"{here}/model.pt")
except InputError as error:
    print(error)
assert main(["check", f"{here}/ported"]) == 2
"""


def test_all_but_pytorchs_files_works_without_torch(tmp_path: Path) -> None:
    tensors = reference(LANGUAGE_MODEL).state_dict()
    save_file(tensors, tmp_path / "model.safetensors")
    torch.save(tensors, tmp_path / "model.pt")
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        f"reading {tmp_path}/model.pt needs PyTorch: pip install 'flax-tf[torch]', or save the weights as .safetensors"
    )
    assert done.stderr.splitlines() == [
        "flax-tf: error: a check runs both frameworks and needs PyTorch: pip install 'flax-tf[torch]'"
    ]
    for name, tensor in load_file(tmp_path / "saved" / "model.safetensors").items():
        assert torch.equal(tensor, tensors.pop(name)), name
    assert not tensors


def write_shards(directory: Path) -> Path:
    """Several shards of a few tensors each; the path of their index."""
    write_weights({name: torch_to_numpy(tensor) for name, tensor in some_tensors().items()}, directory, 150)
    return directory / "model.safetensors.index.json"


def test_shards_are_written_and_read(tmp_path: Path) -> None:
    index = write_shards(tmp_path)
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert set(weight_map.values()) == files and len(files) > 2
    assert weight_map.keys() == some_tensors().keys()
    for name, tensor in some_tensors().items():  # each is where the index says, for any other reader
        assert torch.equal(load_file(tmp_path / weight_map[name])[name].double(), tensor.double())
    assert_same(dict(sorted(read_weights(index).items())), dict(sorted(some_tensors().items())))
    assert read_weights(tmp_path).keys() == some_tensors().keys()


def test_pytorchs_own_shards_are_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    weight_map = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    arrays = read_weights(tmp_path)
    assert_same({name: arrays[name] for name in tensors}, tensors)
    assert len(arrays) == len(tensors)


def rewrite_map(change: Any) -> Any:
    def spoil(index: Path) -> None:
        content = json.loads(index.read_text())
        change(content["weight_map"])
        index.write_text(json.dumps(content))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda index: next(index.parent.glob("model-00002*")).unlink(), "model-00002-of-.* does not exist"),
        (
            rewrite_map(lambda names: names.update(more=names["int64"])),
            r"1 tensors that its shards lack \(first: more\)",
        ),
        (rewrite_map(lambda names: names.pop("scalar")), "holds scalar, which .* does not place there"),
        (rewrite_map(lambda names: names.update(scalar=names["float64"])), "does not place there"),
        (rewrite_map(lambda names: names.update(int64=3)), "is not an index of shards"),
        (rewrite_map(lambda names: names.update(dict.fromkeys(names, 3))), "is not an index of shards"),
        (rewrite_map(lambda names: names.update(more="model.safetensors.index.json")), "is of an unknown kind"),
        (lambda index: index.write_text("{"), "is not an index of shards"),
        (lambda index: index.write_text("[]"), "is not an index of shards"),
        (lambda index: index.write_text('{"weight_map": [3]}'), "is not an index of shards"),
        (lambda index: index.write_bytes(b"\xff"), "is not an index of shards"),
    ],
)
def test_shards_that_contradict_their_index_are_refused(tmp_path: Path, spoil, message: str) -> None:
    spoil(index := write_shards(tmp_path))
    assert re.search(message, refused(index))
    with pytest.raises(InputError, match=message):
        read_weights(tmp_path)


def test_a_directory_prefers_safetensors(tmp_path: Path) -> None:
    torch.save({"from": torch.tensor(3.0)}, tmp_path / "pytorch_model.bin")
    assert read_weights(tmp_path)["from"] == 3
    save_file({"from": torch.tensor(5.0)}, tmp_path / "model.safetensors")
    assert read_weights(tmp_path)["from"] == 5


def whole_file(directory: Path, kind: str) -> Path:
    if kind == "safetensors":
        file = directory / "model.safetensors"
        save_file(some_tensors(), file)
    else:
        file = directory / "model.pt"
        torch.save(some_tensors(), file, _use_new_zipfile_serialization=kind == "zip")
    return file


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_a_truncated_file_is_refused(tmp_path: Path, kind: str) -> None:
    file = whole_file(tmp_path, kind)
    data = file.read_bytes()
    for length in [*range(0, len(data), len(data) // 50), len(data) - 1]:
        file.write_bytes(data[:length])
        refused(file)


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_a_damaged_file_is_refused_or_read(tmp_path: Path, kind: str) -> None:
    file = whole_file(tmp_path, kind)
    whole, rng, refusals = file.read_bytes(), random.Random(0), 0
    for _ in range(200):
        data = bytearray(whole)
        data[rng.randrange(500)] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        with contextlib.suppress(InputError):  # flipped in a value or a name, it goes unnoticed
            read_weights(file)
            continue
        refused(file)
        refusals += 1
    assert refusals > 20


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pth", "bin"])
@pytest.mark.parametrize("content", [b"", b"Lorem ipsum dolor sit amet, consectetur\n"], ids=["empty", "text"])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, suffix: str, content: bytes) -> None:
    file = tmp_path / f"model.{suffix}"
    file.write_bytes(content)
    assert "is not a whole" in refused(file)


class Trap:
    """Unpickling this runs code."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_object_is_refused_by_name_and_not_run(tmp_path: Path, zipped: bool) -> None:
    file, marker = tmp_path / "model.pt", tmp_path / "marker"
    torch.save({"weight": torch.zeros(3), "trap": Trap(marker)}, file, _use_new_zipfile_serialization=zipped)
    assert "holds pickled Python objects (posix.mkdir)" in refused(file)
    torch.save(torch.nn.Linear(3, 5), file, _use_new_zipfile_serialization=zipped)
    assert "(torch.nn.modules.linear.Linear), which could run code when opened" in refused(file)
    file.write_bytes(pickle.dumps(Trap(marker), protocol=2))  # torch.save's protocol, without its container
    assert "holds pickled Python objects" in refused(file)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [[torch.zeros(3)], torch.zeros(3), {}, {"epoch": 3}, {"model": {}}, {3: torch.zeros(3)}, {"weight": [1.0, 2.0]}],
    ids=str,
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "model.pt")
    assert refused(tmp_path / "model.pt").endswith("holds no state dict: save model.state_dict()")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, device="meta"), torch.ones(3, 5).to_sparse()],
    ids=["without data", "sparse"],
)
def test_a_tensor_that_numpy_cannot_hold_is_refused_by_name(tmp_path: Path, tensor: torch.Tensor) -> None:
    torch.save({"fine": torch.zeros(3), "odd": tensor}, tmp_path / "model.pt")
    assert refused(tmp_path / "model.pt").startswith("odd in ")


def test_a_path_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no weights: expected one of model.safetensors, " in refused(tmp_path / "empty")
    assert "does not exist" in refused(tmp_path / "nowhere.pt")
    (tmp_path / "model.npz").touch()
    assert refused(tmp_path / "model.npz").endswith("expected .safetensors, .pt, .pth, .bin, .ckpt")


def test_replacing_swaps_files_and_directories_whole(tmp_path: Path) -> None:
    with replacing(tmp_path / "new" / "file") as fresh:
        fresh.write_text("one")
        assert not (tmp_path / "new" / "file").exists()
    with replacing(tmp_path / "new" / "file") as fresh:
        fresh.write_text("two")
        assert (tmp_path / "new" / "file").read_text() == "one"
    assert listing(tmp_path) == {"new": None, "new/file": b"two"}
    with replacing(tmp_path / "new") as fresh:
        fresh.mkdir()
        (fresh / "other").write_text("three")
    assert listing(tmp_path) == {"new": None, "new/other": b"three"}


def test_replacing_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replacing(tmp_path / "link") as fresh:
        fresh.mkdir()
        (fresh / "file").write_text("one")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "one"


@pytest.mark.parametrize("error", [InputError, KeyboardInterrupt, OSError(28, "No space left on device")])
def test_replacing_changes_nothing_when_the_block_fails(tmp_path: Path, error) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("old")
    before = listing(tmp_path)

    def fail() -> None:
        with replacing(tmp_path / "out") as fresh:
            fresh.mkdir()
            (fresh / "file").write_text("new")
            raise error

    if isinstance(error, OSError):
        with pytest.raises(InputError) as caught:
            fail()
        assert str(caught.value) == (f"{tmp_path}/out cannot be written (No space left on device): nothing was changed")
    else:
        with pytest.raises(error):
            fail()
    assert listing(tmp_path) == before


def test_replacing_refuses_a_place_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = listing(tmp_path)
    for path, message in (
        (tmp_path / "file" / "out", "cannot be written"),
        (".", "holds the current directory"),
        (tmp_path, "holds the current directory"),
    ):
        with pytest.raises(InputError, match=message), replacing(path) as fresh:
            fresh.mkdir()
    (tmp_path / "full").mkdir()
    before = listing(tmp_path)
    with pytest.raises(InputError, match="full is a directory: name a file"), replacing(tmp_path / "full") as fresh:
        fresh.write_text("new")
    assert listing(tmp_path) == before


FILL_THE_DISK = """
import resource, sys
from models import LANGUAGE_MODEL, reference, twin
from tokenizers import Tokenizer, models
from flax_tf.errors import InputError
from flax_tf.saving import save_pretrained
model, tokenizer = twin(reference(LANGUAGE_MODEL)), Tokenizer(models.WordLevel({str(i): i for i in range(9001)}))
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for size in (20_000, 60_000):  # less than the weights; more than those, less than the tokenizer
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        save_pretrained(model, sys.argv[1], tokenizer)
    except InputError as error:
        print(error)
"""


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"arch": "block"}')
    before = listing(tmp_path)
    # A limit on the size of files fails as a full disk does, in mid-file.
    run = [sys.executable, "-c", FILL_THE_DISK, tmp_path / "out"]
    done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(f"{tmp_path}/out cannot be written (") and "File too large" in line
    assert listing(tmp_path) == before
    assert sum(array.nbytes for array in state_arrays(reference(LANGUAGE_MODEL)).values()) > 20_000
