"""PyTorch's weight files mapped into memory, as safetensors are.

`torch.load(mmap=True)` maps them too, but keeps what was read in memory for as long as it keeps one tensor.
"""

import mmap
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from flax_tf.porting.memory import FileMap

_LOCAL_HEADER = 30  # bytes of it before the name; the last two numbers in it are the lengths of the name and the rest


class TorchMap:
    """A file in PyTorch's zip format. Raises an exception of any kind for one that isn't, or is damaged."""

    def __init__(self, path: Path):
        with zipfile.ZipFile(path) as archive, path.open("rb", buffering=0) as file:
            self._records: dict[int, int] = {}  # {where its bytes begin: how many they are}
            for record in archive.infolist():
                if record.filename.endswith("/byteorder") and archive.read(record).decode() != sys.byteorder:
                    raise ValueError("written on a machine with another order of bytes")
                if record.compress_type == zipfile.ZIP_STORED:
                    file.seek(record.header_offset + _LOCAL_HEADER - 4)
                    start = record.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", file.read(4)))
                    self._records[start] = record.file_size
            self._map = FileMap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def array(self, tensor: Any, dtype: np.dtype) -> np.ndarray:
        """A view of the file for a tensor that `torch.load(map_location="meta")` gave, which has no data but a place.

        Raises ValueError for a tensor that is more than a strided view of a record of the file.
        """
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_neg() or tensor.is_conj():
            raise ValueError(f"not a plain tensor: {type(tensor).__name__}")
        storage = tensor.untyped_storage()
        start = storage._checkpoint_offset
        if self._records.get(start) != storage.nbytes():
            raise ValueError("its storage is no record of the file")
        start += tensor.storage_offset() * dtype.itemsize
        strides = [step * dtype.itemsize for step in tensor.stride()]
        return np.ndarray(tuple(tensor.shape), dtype, self._map, start, strides)
