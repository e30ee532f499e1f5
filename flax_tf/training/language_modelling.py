"""The task of a language model: the next token of a text."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Int

from flax_tf.data.batches import TextData, check_ids, prepare, steps_per_epoch, train_batches, valid_batches
from flax_tf.data.tokenizer import encode
from flax_tf.errors import InputError
from flax_tf.generation import generate
from flax_tf.loss import language_model_loss
from flax_tf.training.config import LanguageModelRun
from flax_tf.training.task import Task


def language_modelling(config: LanguageModelRun) -> Task:
    """Prepares the text. Raises InputError if it can't be had, or doesn't fit the model."""
    data = prepare(config.data, config.model.max_seq_length)
    vocab_size = data.vocab_size if config.model.vocab_size is None else config.model.vocab_size
    check_ids(data.max_id, vocab_size)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    prompt = _prompt_ids(config, data)
    batches = train_batches(data, config.batch_size, config.seed)
    example: Any = batches[0]

    def show(model: nnx.Module) -> str:
        sample = config.sample
        if not sample.tokens:
            return ""
        ids = generate(
            model, prompt[None], sample.tokens, temperature=sample.temperature, top_k=sample.top_k, seed=config.seed
        )
        return f"--- sample ---\n{data.tokenizer.decode(ids[0].tolist())}\n---"

    return Task(
        config=config,
        name=Path(config.data.path).name,
        about=f"{config.data.path}: {data.train_tokens:,} tokens to train on, {data.valid_tokens:,} held out",
        key=data.key,
        loss=language_model_loss,
        valid_loss=language_model_loss,
        train_batches=batches,
        steps_per_epoch=steps_per_epoch(data, config.batch_size),
        shapes=[example],
        valid_batches=valid_batches(data, config.batch_size),
        tokenizers=[data.tokenizer],
        measure=lambda model, over: {},
        show=show,
    )


def _prompt_ids(config: LanguageModelRun, data: TextData) -> Int[np.ndarray, "P"]:
    """The ids that the sample begins with: of the prompt, or the first of the held-out text."""
    if config.sample.prompt is None:
        return data.tokens[data.valid_starts[:1]].astype(np.int32)
    try:
        ids = encode(data.tokenizer, config.sample.prompt).astype(np.int32)
    except InputError as error:
        raise InputError(f"sample.prompt: {error}") from None
    if not ids.size:
        raise InputError(f"sample.prompt {config.sample.prompt!r} makes no tokens: give other text")
    check_ids(int(ids.max()), config.model.token_count())
    return ids
