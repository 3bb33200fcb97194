"""Our cache with the interface that `GenerationMixin` of transformers needs: it has a length, its rows can be reordered
(beam search), and it can be cropped (assisted generation)."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor

from polyhead.layers.cache import Cache, LayerCache

WHO = "PolyheadCache"


class PolyheadCache(transformers.Cache):
    """`memory`, a `polyhead.layers.cache.Cache` with `layers` layers, for `past_key_values=`.

    >>> cache = PolyheadCache(2)
    >>> len(cache), cache.get_seq_length()
    (2, 0)
    """

    _is_user_defined = False  # the library's mark of a cache that the caller of `generate` gave

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self.memory = Cache(layers)

    def __len__(self) -> int:
        return len(self.memory)

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.memory)

    @property
    def is_croppable(self) -> bool:
        """Whether every layer stores each token separately, and all of them."""
        for layer in self:
            for name, tensor in layer._kept.items():
                is_sum = isinstance(name, tuple) and name[-1] == "state"
                if is_sum or tensor.ndim < 2 or tensor.shape[1] != layer.length:
                    return False
        return True

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer: `generate` slices the tokens that a cache holds off the prompt."""
        return [False] * len(self)

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 while the cache is empty."""
        return max(layer.batch for layer in self) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens, padding included."""
        return self.memory[layer_idx].length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit of its own."""
        return -1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Length and offset of the mask for `query_length` new tokens."""
        return self.memory.length + int(query_length), 0

    def reset(self) -> None:
        """Empty the cache."""
        self.memory = Cache(len(self.memory))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in that order.  Raises ValueError as `Cache.reorder` does."""
        self.memory.reorder(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The same, for beams."""
        self.memory.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, adjacent to each other."""
        self.memory.reorder(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; their number is given as a negative number.

        Raises ValueError if a layer stores a sum over tokens (linear heads) or only the last tokens (a window).
        """
        if tokens_to_remove > 0:
            raise ValueError(f"{WHO}: crop takes minus the number of tokens to forget but {tokens_to_remove} came")
        if tokens_to_remove == 0 or not self.memory.length:
            return
        if not self.is_croppable:
            raise ValueError(f"{WHO}: some heads keep a sum of earlier tokens, or only the last: none can be removed")
        length = self.memory.length + tokens_to_remove
        for layer in self:
            layer._kept = {name: tensor[:, :length] for name, tensor in layer._kept.items()}
            if layer.real is not None:
                layer.real = layer.real[:, :length]
            layer.length = length
