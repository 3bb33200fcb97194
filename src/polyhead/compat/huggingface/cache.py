"""Our cache with the interface that `GenerationMixin` of transformers needs."""

import transformers
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from polyhead.layers.cache import Cache

CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name of the cache among arguments and outputs of transformers' models: it changed in version 5.24."""


class PolyheadCache(transformers.Cache):
    """`memory`, a `polyhead.layers.cache.Cache` with `layers` layers, for `cache=` or, in 5.23, `past_key_values=`.

    >>> cache = PolyheadCache(2)
    >>> len(cache), cache.get_seq_length()
    (2, 0)

    It has no `layers` of the library.  So an inherited method that is not defined here is an AttributeError.
    """

    is_compileable = False
    is_croppable = False
    __repr__ = object.__repr__

    def __init__(self, layers: int) -> None:
        self.memory = Cache(layers)

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer: `generate` slices the tokens that a cache holds off the prompt."""
        return [False] * len(self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens, padding included."""
        return self.memory[layer_idx].length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows `beam_idx`, in that order.  Raises ValueError as `Cache.reorder` does."""
        self.memory.reorder(beam_idx)

    def activate_past_recording(self) -> None:
        """Raise ValueError: prompt lookup and assistants guess tokens, and no cached token can be removed."""
        raise ValueError("PolyheadCache: tokens stay in the cache, so there is no prompt lookup and no assistant")

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError, too."""
        self.activate_past_recording()


def select_cache(model: str, *caches: object) -> PolyheadCache | None:
    """The cache among `cache` and `past_key_values`, its names of today and of before; at most one may be given.

    Raises ValueError for two, and for a cache of another kind.
    """
    present = [cache for cache in caches if cache is not None]
    if not present:
        return None
    if len(present) > 1 or not isinstance(present[0], PolyheadCache):
        kinds = " and ".join(type(cache).__name__ for cache in present)
        raise ValueError(f"{model}: one PolyheadCache is taken, as cache or as past_key_values, but {kinds} came")
    return present[0]
