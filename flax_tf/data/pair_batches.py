"""Batches of translation pairs in a few fixed shapes, in an order that is a function of the seed and the step alone."""

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import grain
import numpy as np
from jaxtyping import Int

from flax_tf.data.batches import check_seed
from flax_tf.data.cache import TokenizedText
from flax_tf.data.pair_tokens import PairData, Pairs
from flax_tf.data.pairs import PairDataConfig, Split


@dataclass(frozen=True)
class Bucket:
    """Pairs of about one length, whose batches have one shape."""

    pairs: Int[np.ndarray, "pairs"]
    """Their numbers in the split."""
    batch_size: int
    """B, the rows of a batch."""
    source_length: int
    """S, the longest source of all splits."""
    target_length: int
    """T, the longest target of all splits, with its end token."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, S, T): a batch has sources [B, S] and targets [B, T + 1]."""
        return self.batch_size, self.source_length, self.target_length


def make_buckets(
    data: PairData, config: PairDataConfig, batch_size: int, devices: int = 1
) -> dict[Split, list[Bucket]]:
    """The pairs of each split by length, the longer side's, the shortest first: at most `config.buckets`.

    All splits have the same shapes, so that held-out pairs need no further ones. Their bounds are those with the least
    padding of the training pairs; the last reaches to the longest of all splits. A bucket's batches have as many rows
    as make `config.tokens_per_batch` tokens of the longest, rounded down to a multiple of `devices`, and at least
    `devices`. Without `tokens_per_batch` there is one bucket, with batches of `batch_size`. A split has no bucket of a
    length that it has no pairs of.
    """
    splits = data.splits()
    lengths = {split: np.maximum(pairs.source_lengths, pairs.target_lengths) for split, pairs in splits.items()}
    longest = max(int(each.max()) for each in lengths.values())
    if config.tokens_per_batch is None:
        bounds, rows = [longest], [batch_size]
    else:
        bounds = [*least_padding(lengths["train"], config.buckets)[:-1], longest]
        rows = [max(1, config.tokens_per_batch // bound // devices) * devices for bound in bounds]
    found: dict[Split, list[Bucket]] = {split: [] for split in splits}
    for number, size in enumerate(rows):
        members = {split: np.flatnonzero(np.searchsorted(bounds, each) == number) for split, each in lengths.items()}
        source, target = (
            max(int(getattr(splits[split], side)[those].max(initial=0)) for split, those in members.items())
            for side in ("source_lengths", "target_lengths")
        )
        for split, those in members.items():
            if len(those):
                found[split].append(Bucket(those, size, source, target))
    return found


def least_padding(lengths: Int[np.ndarray, "pairs"], count: int) -> list[int]:
    """At most `count` bounds, rising to the greatest length, for which lengths raised to the next bound sum to least.

    By dynamic programming over the lengths that occur.
    """
    distinct, pairs = np.unique(lengths, return_counts=True)
    up_to = np.concatenate([[0], pairs.cumsum()])
    # [lo, hi]: the sum over the lengths from number lo to before number hi, all raised to number hi - 1.
    raised = np.triu(up_to[None, :] - up_to[:, None]) * np.concatenate([[0], distinct])[None, :]
    raised = np.where(np.tri(*raised.shape, -1, dtype=bool), np.iinfo(np.int64).max >> 1, raised)
    least, choices = raised[0], []
    for _ in range(count - 1):
        sums = least[:, None] + raised
        choices.append(sums.argmin(axis=0))
        least = sums.min(axis=0)
    ends = [len(distinct)]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return [int(distinct[end - 1]) for end in sorted(set(ends) - {0})]


def steps_per_epoch(buckets: Sequence[Bucket]) -> int:
    """The batches that have each pair at least once."""
    return sum(math.ceil(len(bucket.pairs) / bucket.batch_size) for bucket in buckets)


def train_batches(pairs: Pairs, buckets: Sequence[Bucket], seed: int) -> grain.MapDataset:
    """An endless data set whose k-th element depends on `seed` and k alone, so a run's data position is k.

    An element is {"source": int32 [B, S], "target": int32 [B, T + 1]}, with (B, S, T) the shape of one of the buckets.
    A row of "target" is the start id, the tokens, the end id; rows are filled with the pad id.

    In each epoch of `steps_per_epoch` batches every pair comes once, in an order of its own within and across buckets;
    but a bucket's last batch, if its pairs don't fill it, is filled with the first pairs of its order again.

    Raises InputError for a seed outside 0 to 2**32 - 1.
    """
    check_seed(seed)
    steps = steps_per_epoch(buckets)

    @functools.lru_cache(maxsize=2)  # reading ahead passes from one epoch to the next
    def epoch(number: int) -> list[tuple[Bucket, np.ndarray]]:
        rng = np.random.default_rng([seed, number])
        batches = [
            (bucket, rows)
            for bucket in buckets
            for rows in np.resize(rng.permutation(bucket.pairs), (steps_per_epoch([bucket]), bucket.batch_size))
        ]
        return [batches[i] for i in rng.permutation(steps)]

    def batch(step: int) -> dict[str, np.ndarray]:
        bucket, rows = epoch(step // steps)[step % steps]
        return _examples(pairs, bucket, rows)

    return grain.MapDataset.range(sys.maxsize).map(batch)


def example_batches(pairs: Pairs, buckets: Sequence[Bucket]) -> list[dict[str, np.ndarray]]:
    """A batch of each shape, as in `train_batches`: what to compile for."""
    return [_examples(pairs, bucket, np.resize(bucket.pairs, bucket.batch_size)) for bucket in buckets]


def valid_batches(pairs: Pairs, buckets: Sequence[Bucket]) -> grain.MapDataset:
    """The whole split once, bucket by bucket, in order.

    An element is as in `train_batches`, with "pair": int32 [B], the number in the split of the pair in each row. Rows
    that fill up a bucket's last batch have -1 there; their target is all pad ids, so that they add to no loss, and
    their source is that of the last pair.
    """
    batches = []
    for bucket in buckets:
        missing = steps_per_epoch([bucket]) * bucket.batch_size - len(bucket.pairs)
        rows = np.pad(bucket.pairs, (0, missing), mode="edge").reshape(-1, bucket.batch_size)
        numbers = np.pad(bucket.pairs, (0, missing), constant_values=-1).reshape(-1, bucket.batch_size)
        batches += [(bucket, *both) for both in zip(rows, numbers.astype(np.int32), strict=True)]

    def batch(index: int) -> dict[str, np.ndarray]:
        bucket, rows, numbers = batches[index]
        examples = _examples(pairs, bucket, rows)
        examples["target"][numbers < 0] = pairs.special.pad
        return {**examples, "pair": numbers}

    return grain.MapDataset.range(len(batches)).map(batch)


def _examples(pairs: Pairs, bucket: Bucket, rows: Int[np.ndarray, "B"]) -> dict[str, np.ndarray]:
    special = pairs.special
    lines = pairs.lines[rows]
    source = _rows(pairs.source, lines, bucket.source_length, special.pad)
    tokens = _rows(pairs.target, lines, bucket.target_length, special.pad)
    target = np.insert(tokens, 0, special.start, axis=1)
    target[np.arange(len(rows)), pairs.target_lengths[rows]] = special.end
    return {"source": source, "target": target}


def _rows(text: TokenizedText, lines: Int[np.ndarray, "B"], length: int, pad_id: int) -> Int[np.ndarray, "B {length}"]:
    """The tokens of those lines, int32, filled up to `length`."""
    ends = text.ends[lines]
    starts = np.where(lines > 0, text.ends[lines - 1], 0)
    columns = np.arange(length)
    tokens = np.take(text.tokens, starts[:, None] + columns, mode="clip").astype(np.int32)
    return np.where(columns < (ends - starts)[:, None], tokens, np.int32(pad_id))
