"""Examples for training and validation, in an order that is a function of the seed and the step alone."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np
from jaxtyping import Int, Int32
from tokenizers import Tokenizer

from flax_tf.data.cache import cache_directory, cached
from flax_tf.data.config import TextDataConfig
from flax_tf.data.progress import watched
from flax_tf.data.text import Documents, load_documents, log
from flax_tf.data.tokenizer import bpe_tokenizer, char_tokenizer, load_tokenizer, vocabulary_size
from flax_tf.errors import InputError
