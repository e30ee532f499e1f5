"""The commands that run a saved model on text: `flax-tf generate` and `flax-tf attention`."""

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from flax_tf.attention_maps import attention_weights, draw_attention, token_labels
from flax_tf.command import OK, enable_wide
from flax_tf.config import AttnRNNConfig, Config, RNNConfig, TransformerConfig
from flax_tf.data.pairs import read_lines
from flax_tf.data.progress import waiting
from flax_tf.data.tokenizer import encode, load_tokenizer
from flax_tf.decoding import Model, greedy_search
from flax_tf.errors import InputError
from flax_tf.generation import generate as generate_tokens
from flax_tf.porting import read_weights
from flax_tf.saving import from_pretrained, model_directory, read_config
from flax_tf.translation import (
    Translation,
    check_tokenizers,
    decode_target,
    encode_source,
    id_array,
    translate,
    translate_ids,
)

log = logging.getLogger(__name__)

# What tokenizers call the token that ends a text: GPT-2's, Llama's, T5's, Llama 3's, Gemma's.
_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


def generate(
    directory: str,
    prompt: str = "",
    prompt_ids: list[int] | None = None,
    source: str = "",
    source_file: str = "",
    source_ids: list[int] | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    beam_size: int | None = None,
    length_penalty: float | None = None,
    n_best: int | None = None,
    greedy: bool = False,
    tokenizer: str | None = None,
) -> int:
    """Continues a prompt with a language model, and prints the whole text; or translates a source.

    On a terminal the text appears as it is made. It ends early with the tokenizer's token for that, if it has one.

    Args:
        directory: What training exports or `flax-tf port` makes; also the directory of a training run.
        prompt: Language models: the text to continue.
        prompt_ids: Language models: token ids to continue, such as '[5, 3]', in place of a prompt; prints ids.
        source: Translators: the sentence to translate.
        source_file: Translators: a text file (perhaps .gz) of sentences, a line each; prints a line for each.
        source_ids: Translators: token ids to translate, such as '[5, 3]', in place of a sentence; prints ids.
        max_tokens: Language models: number of tokens to generate, by default 100. Translators: the most tokens of a
            translation, by default all that the model allows.
        temperature: Language models: divides the logits; below 1 closer to greedy, above 1 more varied; by default 1.
        top_k: Language models: sample from the k most probable tokens.
        top_p: Language models: sample from the most probable tokens that together reach this probability.
        seed: Language models: the same seed gives the same text; by default 0.
        beam_size: Translators: hypotheses that the search keeps, by default 5.
        length_penalty: Translators: above 0, the higher the longer the translations are; by default 0.6.
        n_best: Translators: how many hypotheses to print, by default 1. More are printed a line each: the number of the
            source line, a tab, the score, a tab, the text.
        tokenizer: A tokenizer.json, a directory with one, or a hub name; by default the model's own.
    """
    room, config = _open(directory)
    prompting = {"prompt": prompt or None, "prompt_ids": prompt_ids}
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    sources = {"source": source or None, "source_file": source_file or None, "source_ids": source_ids}
    searching = {"beam_size": beam_size, "length_penalty": length_penalty, "n_best": n_best}
    if not isinstance(config, TransformerConfig | RNNConfig):
        _refuse(sources | searching, f"for translators only, and {room} holds a {config.arch}")
        return _continue(
            room, prompt, prompt_ids, tokenizer, 100 if max_tokens is None else max_tokens, greedy, sampling
        )
    _refuse(prompting | sampling, f"for language models only, and {room} holds a {config.arch}")
    if greedy:
        _refuse(searching, "for beam search only: leave out --greedy")
    options: dict[str, Any] = {name: value for name, value in searching.items() if value is not None}
    if sum(value is not None for value in sources.values()) > 1:
        raise InputError("give only one of --source, --source_file and --source_ids")
    if not (source.strip() or source_file or source_ids is not None):
        raise InputError("give a sentence, not empty, as --source, or a file of them as --source_file, or --source_ids")
    if source_ids is not None:
        _print(
            [translate_ids(from_pretrained(room), source_ids, greedy=greedy, max_tokens=max_tokens, **options)],
            n_best or 1,
        )
        return OK
    lines = list(read_lines(Path(source_file))) if source_file else [source]
    model, source_tokenizer, target_tokenizer = _translator(room, tokenizer)
    with waiting(f"translating {len(lines):,} lines") as status:
        translations = translate(
            model,
            source_tokenizer,
            target_tokenizer,
            lines,
            greedy=greedy,
            max_tokens=max_tokens,
            report=lambda done: status.update(f"translating: {done:,} of {len(lines):,} lines"),
            **options,
        )
    if not source_file and translations[0].problem:
        raise InputError(f"--source: {translations[0].problem}")
    _print(translations, n_best or 1)
    _report(source_file, translations)
    return OK


def attention(
    directory: str,
    source: str = "",
    target: str = "",
    out: str = "attention.png",
    tokenizer: str | None = None,
    heads: bool = False,
) -> int:
    """Draws the source tokens that a translator attends to for each token of its translation, and prints that.

    Args:
        directory: What training exports or `flax-tf port` makes; also the directory of a training run.
        source: The sentence to translate.
        target: A translation to draw in place of the model's own, which is the greedy one.
        out: The PNG file to write.
        tokenizer: A tokenizer.json, a directory with one, or a hub name; by default the model's own.
    """
    room, config = _open(directory)
    if not isinstance(config, TransformerConfig | AttnRNNConfig):
        raise InputError(f"{room} holds a {config.arch}, which has no attention over a source: name another model")
    if not source.strip():
        raise InputError("give the sentence to translate, not empty, as --source")
    if not out.lower().endswith(".png"):
        raise InputError(f"--out {out}: the picture is a PNG, so end the name in .png")
    if not Path(out).parent.is_dir():
        raise InputError(f"--out {out}: there is no directory {Path(out).parent}")
    model, source_tokenizer, target_tokenizer = _translator(room, tokenizer)
    check_tokenizers(config, source_tokenizer, target_tokenizer)
    try:
        src = encode_source(config, source_tokenizer, source)[None]
    except InputError as error:
        raise InputError(f"--source: {error}") from None
    if target.strip():
        tokens = np.append(encode(target_tokenizer, target.strip()).astype(np.int64), config.end_id)
    else:
        tokens = np.asarray(greedy_search(model, src).tokens[0])
        ends = np.flatnonzero(tokens == config.end_id)
        tokens = tokens[: ends[0] + 1] if len(ends) else tokens
    weights = np.asarray(attention_weights(model, src, tokens[None])[:, 0])  # (L, N, T, S)
    labels = token_labels(source_tokenizer, src[0].tolist()), token_labels(target_tokenizer, tokens.tolist())
    draw_attention(weights, *labels, out, heads=heads)
    print(f"{out}: {decode_target(config, target_tokenizer, tokens)}")
    return OK


def _open(directory: str) -> tuple[Path, Config]:
    """The directory of the model (of a training run: its export) and the model's config."""
    room = model_directory(directory)
    enable_wide(read_weights(room))
    return room, read_config(room)


def _refuse(options: dict[str, Any], reason: str) -> None:
    """Raises InputError if one of the options was given."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise InputError(f"{', '.join(given)}: {reason}")


def _continue(
    room: Path,
    prompt: str,
    prompt_ids: list[int] | None,
    tokenizer: str | None,
    max_tokens: int,
    greedy: bool,
    sampling: dict[str, Any],
) -> int:
    if bool(prompt) == (prompt_ids is not None):
        raise InputError("give the text to continue as --prompt, or token ids as --prompt_ids")
    model = from_pretrained(room)
    encoder = None
    if prompt:
        encoder = load_tokenizer(_tokenizer_place(room, tokenizer, ", or give --prompt_ids"))
        prompt_ids = encode(encoder, prompt).tolist()
    options: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    stop_ids = [i for i in map(encoder.token_to_id, _ENDS) if i is not None] if encoder else []
    prompt_array = id_array(prompt_ids or [])
    shown = Shown(encoder.decode if encoder else str)
    ids = prompt_array.tolist()

    def grow(new: list[np.ndarray]) -> None:
        ids.extend(i for i in new[0].tolist() if i not in stop_ids)
        shown.grow(ids)

    if encoder and sys.stdout.isatty():
        options["on_tokens"] = grow  # in small parts, which take longer
    (text,) = generate_tokens(model, [prompt_array], max_tokens, greedy=greedy, stop_ids=stop_ids, **options)
    shown.end(prompt_array.tolist() + [i for i in text[len(prompt_array) :].tolist() if i not in stop_ids])
    return OK


class Shown:
    """A text on stdout that grows with its tokens; in all, what printing it once at the end would print.

    Where a later token changes what stands there, the text begins again on a new line.

    The whole text is decoded every time, because what a token stands for depends on those before it (a space before a
    word, bytes of one character). A character whose bytes are not all there decodes to U+FFFD, and waits.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self.decode = decode
        self.printed = ""

    def grow(self, ids: list[int]) -> None:
        """Prints what is new and complete."""
        self._print(self.decode(ids).rstrip("\ufffd"))

    def end(self, ids: list[int]) -> None:
        """Prints the rest, and ends the line."""
        self._print(self.decode(ids))
        print()

    def _print(self, text: str) -> None:
        if not text.startswith(self.printed):  # what follows changed it, as some tokenizers join "do n ' t"
            print()
            self.printed = ""
        print(text[len(self.printed) :], end="", flush=True)
        self.printed = text


def _tokenizer_place(room: Path, tokenizer: str | None, otherwise: str = "") -> str:
    if tokenizer is None and not (room / "tokenizer.json").is_file():
        raise InputError(f"{room} has no tokenizer.json: name one with --tokenizer{otherwise}")
    return tokenizer or str(room)


def _translator(room: Path, tokenizer: str | None) -> tuple[Model, Tokenizer, Tokenizer]:
    """The model, and the tokenizers of source and target, which are one if there is no target_tokenizer.json."""
    place = _tokenizer_place(room, tokenizer)
    source_tokenizer = load_tokenizer(place)
    own = Path(place) / "target_tokenizer.json"
    return from_pretrained(room), source_tokenizer, load_tokenizer(str(own)) if own.is_file() else source_tokenizer


def _print(translations: Sequence[Translation], n_best: int) -> None:
    """As many lines for every translation, empty ones where there are no hypotheses."""
    for number, (hypotheses, _) in enumerate(translations, start=1):
        for i in range(n_best):
            text, score = hypotheses[i] if i < len(hypotheses) else ("", -np.inf)
            print(text if n_best == 1 else f"{number}\t{score:.6f}\t{text}")


def _report(file: str, translations: Sequence[Translation]) -> None:
    """Logs the lines that were not translated, by what is wrong with them."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, (_, problem) in enumerate(translations, start=1):
        if problem:
            numbers[problem].append(number)
    if numbers:
        count = sum(map(len, numbers.values()))
        log.warning("%s: %d of %d lines not translated, and empty in the output", file, count, len(translations))
    for problem, those in numbers.items():
        log.warning("%s: %s: line %s", file, problem, ", ".join(map(str, those)))
