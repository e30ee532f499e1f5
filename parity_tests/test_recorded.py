"""References recorded to a file: the report without PyTorch is the report with it, and a bad file or disk is told."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from directories import listing
from flax import nnx
from models import BLOCK, LANGUAGE_MODEL, TRANSFORMER, ids, reference, state_arrays, twin
from own_models import HIDDEN, IMAGES, RENAME, ImageNet, TorchImageNet
from safetensors.numpy import save_file

from flax_tf.errors import InputError
from flax_tf.parity import Report, compare, compare_recorded, record, recorded_weights
from flax_tf.porting import torch_to_flax

SMALL = replace(LANGUAGE_MODEL, num_layers=1)
STREAM = np.random.default_rng(0).standard_normal((2, 7, 15))


def image_nets() -> tuple[TorchImageNet, ImageNet]:
    torch.manual_seed(0)
    module = TorchImageNet()
    return module, torch_to_flax(state_arrays(module), ImageNet(nnx.Rngs(0)), RENAME)


def both(
    path: Path, module: torch.nn.Module, model: nnx.Module, *inputs: Any, rename: Any = None, **options: Any
) -> Report:
    """The report of `compare_recorded`, which is that of `compare`."""
    record(module, inputs, path, **options)
    recorded = compare_recorded(path, model, rename=rename)
    assert recorded == compare(module, model, *inputs, rename=rename, **options)
    return recorded


@pytest.mark.parametrize(
    ("config", "options"),
    [(SMALL, {"precisions": ("float32", "bfloat16")}), (TRANSFORMER, {"train": True, "precisions": ()})],
    ids=["language_model", "transformer-train"],
)
def test_the_report_on_a_system_is_that_of_compare(config: Any, options: dict[str, Any], tmp_path: Path) -> None:
    module = reference(config)
    inputs = [ids(2, 7) % 31] if config is SMALL else [ids(2, 7) % 31, ids(2, 5, seed=1) % 31]
    report = both(tmp_path / "reference.safetensors", module, twin(module), *inputs, **options)
    assert report.ok, report.summary()
    assert report.precisions == list(options["precisions"])


def test_the_report_on_a_users_pair_is_that_of_compare(tmp_path: Path) -> None:
    """With a keyword argument, a mask, names that differ, dropout and running statistics."""
    file = tmp_path / "reference.safetensors"
    report = both(file, *image_nets(), IMAGES, mask=HIDDEN, rename=RENAME, train=True)
    assert report.ok, report.summary()
    # The file fills a model too.
    fresh = torch_to_flax(recorded_weights(file), ImageNet(nnx.Rngs(5)), RENAME)
    assert compare_recorded(file, fresh, rename=RENAME) == report
    assert compare_recorded(file, ImageNet(nnx.Rngs(5)), rename=RENAME).culprit == "stem.0"


def wrong_epsilon(model: Any) -> None:
    model.mlp_layer_norm.epsilon = 1e-6


def moved_weight(model: Any) -> None:
    model.kqv_projection.kernel[...] = model.kqv_projection.kernel[...].at[3, 5].add(1e-3)


def nan(model: Any) -> None:
    model.mlp_layer_norm.bias[...] = model.mlp_layer_norm.bias[...].at[2].set(jnp.nan)


def one_more_weight(model: Any) -> None:
    model.extra = nnx.Param(jnp.ones(3))


@pytest.mark.parametrize(
    ("fault", "summary"),
    [
        (wrong_epsilon, "the first difference is in mlp_layer_norm "),
        (moved_weight, "the first difference is in kqv_projection "),
        (nan, "the first difference is in mlp_layer_norm "),
        (one_more_weight, "parameter extra is in Flax alone "),
    ],
)
def test_a_fault_is_named_as_by_compare(fault: Any, summary: str, tmp_path: Path) -> None:
    module = reference(BLOCK)
    fault(model := twin(module))
    report = both(tmp_path / "reference.safetensors", module, model, STREAM)
    assert report.summary().startswith(f"NOT the same model: {summary}")


def test_arguments_of_all_kinds_come_back(tmp_path: Path) -> None:
    class Torch(torch.nn.Module):
        def forward(self, pair, *, scale, names, flag=None):
            assert names == ["a", "b"] and flag is None
            return pair[0] * scale["by"] + pair[1]["shift"] * scale["times"]

    class Flax(nnx.Module):
        def __call__(self, pair, *, scale, names, flag=None):
            assert names == ["a", "b"] and flag is None
            return pair[0] * scale["by"] + pair[1]["shift"] * scale["times"]

    file = tmp_path / "reference.safetensors"
    pair = (np.ones((2, 3), np.float32), {"shift": torch.arange(3.0)[None]})
    options: Any = {"scale": {"by": jnp.full((), 0.5), "times": 3}, "names": ["a", "b"], "flag": None}
    report = both(file, Torch(), Flax(), pair, **options)
    assert report.ok, report.summary()
    before = listing(tmp_path)
    with pytest.raises(InputError, match="type builtin_function_or_method can't be recorded: give arrays"):
        record(Torch(), (pair,), file, **{**options, "scale": {"by": 1, "times": 2, "f": print}})
    assert listing(tmp_path) == before


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails, as if it were not installed
from flax_tf.parity import compare_recorded, recorded_weights
from flax_tf.porting import torch_to_flax
from flax_tf.saving import build
from flax_tf.config import LanguageModelConfig
fields = dict(vocab_size=37, max_seq_length=13, d_model=15, num_heads=3, num_layers=1)
model = torch_to_flax(recorded_weights(sys.argv[1]), build(LanguageModelConfig(**fields)))
report = compare_recorded(sys.argv[1], model)
report.print()
model.classifier.bias[...] += 1e-3
print(compare_recorded(sys.argv[1], model).summary())
"""


def test_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "reference.safetensors"
    module = reference(SMALL)
    record(module, ids(2, 7), file)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, file], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    *_, same, different = done.stdout.splitlines()
    assert same == compare(module, twin(module), ids(2, 7)).summary()
    assert same.startswith("the same model: ")
    assert different.startswith("NOT the same model: the first difference is in classifier (")


# What can't be read


@pytest.mark.parametrize("size", [100, -8])
def test_half_a_file_is_refused(size: int, tmp_path: Path) -> None:
    file = tmp_path / "reference.safetensors"
    module = reference(BLOCK)
    record(module, STREAM, file)
    file.write_bytes(file.read_bytes()[:size])
    for read in (lambda: compare_recorded(file, twin(module)), lambda: recorded_weights(file)):
        with pytest.raises(InputError, match="not a whole safetensors file") as caught:
            read()
        assert "\n" not in str(caught.value)


def test_another_file_is_refused(tmp_path: Path) -> None:
    module = reference(BLOCK)
    save_file(state_arrays(module), tmp_path / "weights.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    for name, message in (
        ("weights.safetensors", "was not recorded by parity.record: it holds other tensors"),
        ("text.safetensors", "not a whole safetensors file"),
        ("weights.pt", "is no place for what parity.record writes: name a .safetensors file"),
        ("none.safetensors", "does not exist"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            compare_recorded(tmp_path / name, twin(module))
        assert "\n" not in str(caught.value)


# What can't be written


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file/reference.safetensors", "cannot be written"),
        ("directory.safetensors", "name a .safetensors file"),
        ("reference.bin", "name a .safetensors file"),
    ],
)
def test_a_place_that_cannot_be_written(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "directory.safetensors").mkdir()
    before = listing(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        record(reference(BLOCK), STREAM, tmp_path / path)
    assert "\n" not in str(caught.value)
    assert listing(tmp_path) == before


FILL_THE_DISK = """
import resource, sys
import numpy as np
from models import BLOCK, reference
from flax_tf.errors import InputError
from flax_tf.parity import record
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
module, stream = reference(BLOCK), np.ones((2, 7, 15))
record(module, stream, sys.argv[1] + "/whole.safetensors")
whole = len(open(sys.argv[1] + "/whole.safetensors", "rb").read())
for size in (20_000, whole - 1000):  # less than the spooled results; those, but not all of the file
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        record(module, stream, sys.argv[1] + "/reference.safetensors")
    except (InputError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "reference.safetensors").write_bytes(b"older")
    # A limit on the size of files fails as a full disk does, in mid-file.
    run = [sys.executable, "-c", FILL_THE_DISK, tmp_path]
    done = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all("File too large" in line for line in lines)
    (tmp_path / "whole.safetensors").unlink()
    assert listing(tmp_path) == {"reference.safetensors": b"older"}
