"""The task of the sequence-to-sequence models: a target sentence for a source sentence."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np
from tokenizers import Tokenizer

from flax_tf.data.batches import check_ids
from flax_tf.data.pair_batches import example_batches, make_buckets, steps_per_epoch, train_batches, valid_batches
from flax_tf.data.pair_tokens import PairData, SpecialIds, prepare_pairs
from flax_tf.data.pairs import RANDOM
from flax_tf.data.random_pairs import random_batch
from flax_tf.errors import InputError
from flax_tf.loss import sequence_loss
from flax_tf.training.config import AttnRNNRun, DecodingConfig, RNNRun, TransformerRun
from flax_tf.training.scores import SCORES
from flax_tf.training.task import HostBatch, Task
from flax_tf.translation import decode_target, search


def translation(config: TransformerRun | RNNRun | AttnRNNRun, devices: int) -> Task:
    """Prepares the pairs, in batches that so many devices can share.

    Raises InputError if the pairs can't be had, don't fit the model, or can't be scored.
    """
    if config.data.source == RANDOM:
        return _memorising(config)
    decoding, model = config.decoding, config.model
    score = None if decoding.metric == "none" else SCORES[decoding.metric]()
    data = prepare_pairs(config.data, SpecialIds(model.pad_id, model.start_id, model.end_id))
    config = dataclasses.replace(config, model=_with_vocabularies(model, data))
    buckets = make_buckets(data, config.data, config.batch_size, devices)
    batches = train_batches(data.train, buckets["train"], config.seed)
    splits = data.splits()
    held_out = {split: valid_batches(splits[split], buckets[split]) for split in splits if split != "train"}
    joint = data.source_tokenizer.to_str() == data.target_tokenizer.to_str()

    def measure(model: Any, over: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        if score is None:
            return found  # nothing is decoded
        beam_size = decoding.beam_size if over else 1
        for split, batches in held_out.items():
            if split == "valid" or over:
                texts = translate_batches(model, batches, data.target_tokenizer, decoding, beam_size)
                values = score(texts, [target for _, target in splits[split].text()])
                found |= {name if split == "valid" else f"{split}_{name}": value for name, value in values.items()}
        return found

    def show(model: Any) -> str:
        count = min(decoding.samples, len(data.valid))
        if score is None or not count:
            return score.signature if score else ""
        shown = dataclasses.replace(data.valid, lines=data.valid.lines[:count])
        longest = dataclasses.replace(buckets["valid"][-1], pairs=np.arange(count))
        texts = translate_batches(
            model, valid_batches(shown, [longest]), data.target_tokenizer, decoding, decoding.beam_size
        )
        lines = [score.signature] if score.signature else []
        for text, (source, target) in zip(texts, shown.text(), strict=True):
            lines += ["---", f"source:      {source}", f"translation: {text}", f"target:      {target}"]
        return "\n".join([*lines, "---"])

    return Task(
        config=config,
        name=Path(config.data.source).name,
        about=f"{config.data.source}: {len(data.train):,} pairs to train on, {len(data.valid):,} held out",
        key=data.key,
        loss=partial(sequence_loss, label_smoothing=config.label_smoothing),
        valid_loss=sequence_loss,
        train_batches=batches,
        steps_per_epoch=steps_per_epoch(buckets["train"]),
        shapes=example_batches(data.train, buckets["train"]),
        valid_batches=held_out["valid"],
        tokenizers=[data.source_tokenizer, *([] if joint else [data.target_tokenizer])],
        measure=measure,
        show=show,
    )


def _memorising(config: TransformerRun | RNNRun | AttnRNNRun) -> Task:
    """The task of seed 002's random data, where nothing can be held out: it is validated on what it learns."""
    for name in ("src_vocab_size", "tgt_vocab_size"):
        if getattr(config.model, name) is None:
            raise InputError(f"data.source is {RANDOM}: set model.{name}, for there is no text to take it from")
    batch = random_batch(config.model, config.batch_size, config.data.max_length, config.seed)
    batches = grain.MapDataset.source([batch])
    return Task(
        config=config,
        name="random ids",
        about=f"one batch of random ids, {config.batch_size} x {config.data.max_length} on each side",
        key=RANDOM,
        loss=partial(sequence_loss, label_smoothing=config.label_smoothing),
        valid_loss=sequence_loss,
        train_batches=batches.repeat(),
        steps_per_epoch=1,
        shapes=[batch],
        valid_batches=batches,
        tokenizers=[],
        measure=lambda model, over: {},
        show=lambda model: "",
    )


def _with_vocabularies(model: Any, data: PairData) -> Any:
    """The model's config with the tokenizers' vocabularies where it has none. Raises InputError if ids don't fit it."""
    sizes = {"src_vocab_size": data.source_vocab_size, "tgt_vocab_size": data.target_vocab_size}
    for name, size in sizes.items():
        sizes[name] = size if getattr(model, name) is None else getattr(model, name)
    for pairs in data.splits().values():
        check_ids(pairs.source.max_id, sizes["src_vocab_size"], "model.src_vocab_size")
        check_ids(pairs.target.max_id, sizes["tgt_vocab_size"], "model.tgt_vocab_size")
    return dataclasses.replace(model, **sizes)


def translate_batches(
    model: Any, batches: Iterable[HostBatch], tokenizer: Tokenizer, decoding: DecodingConfig, beam_size: int
) -> list[str]:
    """The translation of each pair of a split, whose `valid_batches` are given, in the split's order."""
    texts: dict[int, str] = {}
    for batch in batches:
        tokens, _ = search(
            model, batch["source"], beam_size == 1, beam_size, decoding.length_penalty, 1, decoding.max_length
        )
        for pair, row in zip(batch["pair"].tolist(), tokens[:, 0], strict=True):
            if pair >= 0:
                texts[pair] = decode_target(model.config, tokenizer, row)
    return [texts[pair] for pair in sorted(texts)]
