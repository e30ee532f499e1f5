"""PyTorch's side of every row: the reference, as one runs it who knows PyTorch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import torch_cache
from benchmarks.work import Work
from benchmarks.workloads import LANGUAGE_MODEL_OPTIMIZER, TRANSFORMER_OPTIMIZER, Sizes
from torch_ref.saving import build


def compiled(function: Any, compile: bool) -> Any:
    return torch.compile(function) if compile else function


def block_forward(sizes: Sizes, compile: bool) -> Work:
    model = compiled(build(sizes.block).eval(), compile)
    x = torch.randn(*sizes.block_batch, sizes.block.d_model)

    @torch.inference_mode()
    def run() -> Tensor:
        return model(x)

    return Work(run)


def block_forward_backward(sizes: Sizes, compile: bool) -> Work:
    module = build(sizes.block)
    model = compiled(module, compile)
    x, weights = torch.randn(2, *sizes.block_batch, sizes.block.d_model)
    x.requires_grad_()

    def run() -> Tensor:
        module.zero_grad(set_to_none=True)
        x.grad = None
        loss = (model(x) * weights).sum()
        loss.backward()
        return loss.detach()

    return Work(run)


def training(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], compile: bool) -> Work:
    loss = compiled(loss, compile)

    def run() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return Work(run)


def language_model_step(batch_size: int, sizes: Sizes, compile: bool) -> Work:
    config, settings = sizes.language_model, LANGUAGE_MODEL_OPTIMIZER
    model = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    ids = torch.randint(config.token_count(), (batch_size, config.max_seq_length + 1))
    inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    return training(optimizer, lambda: F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()), compile)


def transformer_step(batch_size: int, sizes: Sizes, compile: bool) -> Work:
    config, settings = sizes.transformer, TRANSFORMER_OPTIMIZER
    model = build(config)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True
    )
    source = torch.randint(1, config.src_token_count(), (batch_size, config.max_seq_length))
    target = torch.randint(1, config.tgt_token_count(), (batch_size, config.max_seq_length))

    def loss() -> Tensor:
        logits = model(source, target[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, target[:, 1:].flatten(), ignore_index=config.pad_id)

    return training(optimizer, loss, compile)


def generation(batch_size: int, sizes: Sizes, compile: bool) -> Work:
    model: Any = build(sizes.language_model).eval()
    prompt = torch.randint(sizes.language_model.token_count(), (batch_size, sizes.prompt))
    next_logits = compiled(torch_cache.next_logits, compile)
    return Work(lambda: torch_cache.generate(model, prompt, sizes.new_tokens, next_logits=next_logits))


def load(checkpoint: Path, mmap: bool, sizes: Sizes) -> Work:
    """No tensor is made but those of the file: the model is built without any, and takes them as they are."""

    def run() -> float:
        with torch.device("meta"):
            model = build(sizes.checkpoint)
        model.load_state_dict(torch.load(checkpoint, weights_only=True, mmap=mmap), assign=True)
        # A page of 4 KiB is read by its first number: what is mapped and not yet read is not loaded.
        return sum(tensor.detach().flatten()[::1024].sum().item() for tensor in model.state_dict().values())

    return Work(run, once=True)


def write_checkpoint(checkpoint: Path, sizes: Sizes) -> None:
    torch.save(build(sizes.checkpoint).state_dict(), checkpoint)


def works(checkpoint: Path) -> dict[tuple[str, str], Callable[[Sizes], Work]]:
    """{(what is run, side): what prepares it}."""
    prepare = {
        "block-forward": block_forward,
        "block-forward-backward": block_forward_backward,
        "lm-step-32": partial(language_model_step, 32),
        "lm-step-256": partial(language_model_step, 256),
        "transformer-step-8": partial(transformer_step, 8),
        "transformer-step-64": partial(transformer_step, 64),
        "generate-1": partial(generation, 1),
        "generate-32": partial(generation, 32),
    }
    sides = {"torch_eager": False, "torch_compile": True}
    return {
        **{(name, side): partial(work, compile=on) for name, work in prepare.items() for side, on in sides.items()},
        ("port-1gb", "torch_eager"): partial(load, checkpoint, False),
        ("port-1gb", "torch_mmap"): partial(load, checkpoint, True),
    }
