"""Our cache with the interface that `GenerationMixin` of transformers needs."""

import torch
import transformers
from transformers.modeling_outputs import BaseModelOutputWithPast

from polyhead.layers.cache import Cache

CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache among arguments and outputs of transformers' models: it changed in version 5.24."""


class PolyheadCache(Cache, transformers.Cache):  # type: ignore[misc]  # both call their entries `layers`
    """A `polyhead.layers.cache.Cache` with `layers` layers, for `cache=` or, in 5.23, `past_key_values=`.

    >>> cache = PolyheadCache(2)
    >>> len(cache), cache.get_seq_length()
    (2, 0)
    """

    is_compileable = False
    reorder_cache = batch_select_indices = Cache.reorder  # type: ignore[assignment]  # rows of beams, and any others

    @property
    def is_croppable(self) -> bool:
        """Whether every layer stores each token separately, and all of them."""
        for layer in self:
            for name, tensor in layer._tensors_by_name.items():
                is_sum = isinstance(name, tuple) and name[-1] == "state"
                if is_sum or tensor.shape[1] != layer.length:
                    return False
        return True

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 while the cache is empty."""
        return max(layer.batch for layer in self) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens, padding included."""
        return self[layer_idx].length

    def reset(self) -> None:
        """Empty the cache."""
        self.layers = Cache(len(self)).layers

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, adjacent to each other."""
        self.reorder(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens, minus their number.  Raises ValueError if a layer stores sums (linear heads) or a window."""
        if tokens_to_remove > 0:
            raise ValueError(f"PolyheadCache: crop must get minus the number of tokens, got {tokens_to_remove}")
        if tokens_to_remove == 0 or not self.length:
            return
        if not self.is_croppable:
            raise ValueError("PolyheadCache: some heads keep a sum of earlier tokens, or only the last: none can go")
        length = max(self.length + tokens_to_remove, 0)
        for layer in self:
            layer._tensors_by_name = {name: tensor[:, :length] for name, tensor in layer._tensors_by_name.items()}
            if layer.real is not None:
                layer.real = layer.real[:, :length]
            layer.length = length


def select_cache(model: str, cache: object, past_key_values: object) -> PolyheadCache | None:
    """The cache, under its name of today or of before.  Raises ValueError for a cache of another kind."""
    if cache is not None and past_key_values is not None:
        raise ValueError(f"{model}: cache and past_key_values are the same argument, got both")
    if cache is None:
        cache = past_key_values
    if cache is not None and not isinstance(cache, PolyheadCache):
        raise ValueError(f"{model}: the cache must be a PolyheadCache but is a {type(cache).__name__}")
    return cache
