"""Text to text with a sequence-to-sequence model: lines in, as many translations out."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from tokenizers import Tokenizer

from flax_tf.config import RNNConfig, TransformerConfig
from flax_tf.data.tokenizer import encode, vocabulary_size
from flax_tf.decoding import Model, beam_search, greedy_search
from flax_tf.errors import InputError

_MULTIPLE = 16  # of the lengths of sources, where padding is not read: few shapes to compile


class Hypothesis(NamedTuple):
    """A text of one line, and its score (`decoding.beam_search`; of greedy search the log probability)."""

    text: str
    score: float


class Translation(NamedTuple):
    """The hypotheses for a line, the best first, or none and what is wrong with the line."""

    hypotheses: list[Hypothesis]
    problem: str | None = None


def translate(
    model: Model,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    lines: Sequence[str],
    *,
    greedy: bool = False,
    beam_size: int = 5,
    length_penalty: float = 0.6,
    n_best: int = 1,
    max_tokens: int | None = None,
    batch_size: int = 32,
    report: Callable[[int], None] = lambda done: None,
) -> list[Translation]:
    """A translation of every line, in the order of the lines, by beam search or greedily.

    Lines are decoded together with those of their padded length, which depends on the line alone, so what else is
    translated has no influence. A model that passes over padding (the Transformer, and recurrent ones with
    `mask_source`) gets sources filled up to a multiple of 16. To a model that reads it, padding would be a part of the
    sentence, so lines of exactly one length go together, and each is what it is by itself.

    Every line gets `n_best` hypotheses (greedily: one), fewer where fewer exist. Line breaks in them become spaces. A
    line that can't be translated (`encode_source`) gets none, and the reason.

    Args:
        model: decodes as in evaluation mode; its own mode stays.
        max_tokens: the most target tokens; None is all that the model allows.
        batch_size: lines at a time.
        report: called with the number of lines that are done.

    Raises InputError if a tokenizer has more ids than the model, or for options out of range.
    """
    config = model.config
    check_tokenizers(config, source_tokenizer, target_tokenizer)
    limit = config.max_seq_length if isinstance(config, TransformerConfig) else None
    if max_tokens is not None and (max_tokens < 1 or (limit is not None and max_tokens > limit)):
        raise InputError(f"max_tokens must be {'at least 1' if limit is None else f'1 to {limit}'}, not {max_tokens}")
    translations: list[Translation] = []
    sources: dict[int, Int[np.ndarray, S]] = {}
    groups: dict[int, list[int]] = defaultdict(list)  # the numbers of the lines of each padded length
    for number, line in enumerate(lines):
        translations.append(Translation([]))
        try:
            sources[number] = encode_source(config, source_tokenizer, line)
        except InputError as error:
            translations[number] = Translation([], str(error))
        else:
            groups[_padded_length(config, len(sources[number]))].append(number)

    done = 0
    for length, numbers in sorted(groups.items()):
        rows = min(batch_size, len(numbers))  # always as many, so that there is one shape for the length
        for start in range(0, len(numbers), rows):
            batch = numbers[start : start + rows]
            src = np.full((rows, length), config.pad_id)
            for row in range(rows):
                ids = sources[batch[min(row, len(batch) - 1)]]
                src[row, : len(ids)] = ids
            tokens, scores = search(model, src, greedy, beam_size, length_penalty, n_best, max_tokens)
            for number, rows_of_tokens, row_of_scores in zip(batch, tokens, scores, strict=False):
                translations[number] = Translation(
                    [
                        Hypothesis(decode_target(config, target_tokenizer, each), float(score))
                        for each, score in zip(rows_of_tokens, row_of_scores, strict=True)
                        if score > -np.inf
                    ]
                )
            done += len(batch)
            report(done)
    return translations


def translate_ids(
    model: Model,
    ids: Sequence[int],
    *,
    greedy: bool = False,
    beam_size: int = 5,
    length_penalty: float = 0.6,
    n_best: int = 1,
    max_tokens: int | None = None,
) -> Translation:
    """The translation of source ids, as lists of target ids without the end id in place of texts.

    Args and errors as of `translate`; also InputError for ids or a length outside the model's tables.
    """
    tokens, scores = search(model, id_array(ids)[None], greedy, beam_size, length_penalty, n_best, max_tokens)
    return Translation(
        [
            Hypothesis(str(_until_end(model.config, row).tolist()), float(score))
            for row, score in zip(tokens[0], scores[0], strict=True)
            if score > -np.inf
        ]
    )


def search(
    model: Model,
    src: Int[np.ndarray, "B S"],
    greedy: bool,
    beam_size: int,
    length_penalty: float,
    n_best: int,
    max_tokens: int | None,
) -> tuple[Int[np.ndarray, "B n T"], Float[np.ndarray, "B n"]]:
    """The n best hypotheses for each source and their scores; greedily one. Errors are those of `decoding`."""
    if greedy:
        tokens, scores = (np.asarray(array)[:, None] for array in greedy_search(model, src, max_tokens))
    else:
        found = beam_search(model, src, beam_size, max_tokens, length_penalty, n_best)
        tokens, scores = (np.asarray(array) for array in found)
    return tokens, scores


def id_array(ids: Sequence[int]) -> Int[np.ndarray, "T"]:
    """The ids in an array. Raises InputError for one that no integer type holds."""
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        raise InputError(f"a token id of {list(ids)} is outside every vocabulary") from None


def check_tokenizers(config: TransformerConfig | RNNConfig, source: Tokenizer, target: Tokenizer) -> None:
    """Raises InputError if a tokenizer has more ids than the model."""
    for side, tokenizer, rows in (
        ("source", source, config.src_token_count()),
        ("target", target, config.tgt_token_count()),
    ):
        tokens = vocabulary_size(tokenizer)
        if tokens > rows:
            raise InputError(
                f"the {side} tokenizer has ids up to {tokens - 1}, but the model is for {rows} {side} tokens: give its "
                "own tokenizer.json and, if the sides differ, target_tokenizer.json"
            )


def encode_source(config: TransformerConfig | RNNConfig, tokenizer: Tokenizer, text: str) -> Int[np.ndarray, "S"]:
    """The ids of a source, without space at its ends.

    Raises InputError, with a reason that does not repeat the text, if it is blank, has characters that the tokenizer
    doesn't know, has the text of a special token, or is longer than the model's table of positions.
    """
    text = text.strip()
    if not text:
        raise InputError("blank")
    ids = encode(tokenizer, text).astype(np.int64)
    if not len(ids):
        raise InputError("no tokens in it that the tokenizer knows")
    special = np.isin(ids, [config.pad_id, config.start_id, config.end_id])
    if special.any():
        raise InputError(f"the text of a special token in it: {tokenizer.id_to_token(int(ids[special.argmax()]))}")
    if isinstance(config, TransformerConfig) and len(ids) > config.max_seq_length:
        raise InputError(f"longer than the {config.max_seq_length} tokens that the model takes")
    return ids


def decode_target(config: TransformerConfig | RNNConfig, tokenizer: Tokenizer, tokens: Int[np.ndarray, "T"]) -> str:
    """The text, on one line, of a hypothesis up to its end id."""
    ids = _until_end(config, tokens)
    text = tokenizer.decode([i for i in ids.tolist() if i not in (config.pad_id, config.start_id)])
    return text.replace("\n", " ").replace("\r", " ")


def _until_end(config: TransformerConfig | RNNConfig, tokens: Int[np.ndarray, "T"]) -> Int[np.ndarray, "n"]:
    """The tokens before the first end id, or all."""
    ends = np.flatnonzero(tokens == config.end_id)
    return tokens[: ends[0]] if len(ends) else tokens


def _padded_length(config: TransformerConfig | RNNConfig, length: int) -> int:
    if isinstance(config, TransformerConfig):
        return min(-(-length // _MULTIPLE) * _MULTIPLE, config.max_seq_length)
    if config.mask_source:
        return -(-length // _MULTIPLE) * _MULTIPLE
    return length
