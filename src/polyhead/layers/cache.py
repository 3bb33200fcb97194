"""What layers remember of the tokens they have seen, so that decoding computes the new ones only.

Keys, values, relation keys and symbols of earlier tokens are kept as they entered the equation (normalised, turned by
their positions, projected), so that a cached step is the uncached one: nothing is approximated.  Of linear heads whose
scores are used as they are, the sum over all tokens is kept in their place: it does not grow with their number.  Nor
does what a layer with a window keeps: it drops the keys that no later token can see (positions, where they are given,
grow from token to token).
"""

from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor


class LayerCache:
    """The memory of one layer: of its self-attention and, in `.cross`, of its attention to another sequence.

    >>> cache = LayerCache()
    >>> cache.extend("k", torch.zeros(1, 3, 2)).shape, cache.extend("k", torch.zeros(1, 1, 2)).shape
    (torch.Size([1, 3, 2]), torch.Size([1, 4, 2]))

    `length`: tokens it has seen; in `.cross`, tokens that have asked.  `gone`: how many of them, the first, it holds no
    longer.  `real`: which of those it holds are no padding (b s), or None if all are.
    """

    def __init__(self) -> None:
        self.length = self.gone = 0
        self.real: Tensor | None = None
        self._gaps: bool | None = None
        self._kept: dict[Hashable, Tensor] = {}
        self._made: dict[Hashable, dict[str, Tensor]] = {}
        self._cross: LayerCache | None = None

    @property
    def cross(self) -> "LayerCache":
        """The memory of the layer's cross-attention."""
        if self._cross is None:
            self._cross = LayerCache()
        return self._cross

    def __contains__(self, name: Hashable) -> bool:
        return name in self._kept

    def extend(self, name: Hashable, new: Tensor) -> Tensor:
        """`new` (b t ...) after all that came under that name before: (b s ...).  ValueError if they do not fit."""
        old = self._kept.get(name)
        if old is not None and (old.shape[0], *old.shape[2:]) != (new.shape[0], *new.shape[2:]):
            was, came = tuple(old.shape), tuple(new.shape)
            raise ValueError(f"LayerCache: what is kept of {name} is (b s ...) = {was} but what is new {came}")
        self._kept[name] = new if old is None else torch.cat((old, new), dim=1)
        return self._kept[name]

    def state(self, name: Hashable) -> Tensor | None:
        """What was `put` under that name last."""
        return self._kept.get(name)

    def put(self, name: Hashable, state: Tensor) -> None:
        """Keep `state` in place of what was under that name."""
        self._kept[name] = state

    @property
    def nbytes(self) -> int:
        """Memory of what is kept, of the cross-attention, too."""
        kept = [*self._kept.values(), *(tensor for made in self._made.values() for tensor in made.values())]
        kept += [] if self.real is None else [self.real]
        return sum(tensor.nbytes for tensor in kept) + (0 if self._cross is None else self._cross.nbytes)

    def last(self, name: Hashable, new: Tensor, count: int | None) -> Tensor:
        """`new` (b t ...) after what is kept of the tokens before; of all these the last `count` (None: all) stay."""
        seen = self.extend(name, new)
        if count is not None:
            self._kept[name] = _end(seen, count)
        return seen

    def expect(self, mask: Tensor | None, like: Tensor) -> None:
        """What `Cache.expect` says, for one layer."""
        if mask is None and self.real is None:
            return
        b, t = like.shape[:2]
        if self.real is not None and self.real.shape[0] != b:
            raise ValueError(f"Cache: {self.real.shape[0]} sequences were wanted but {b} came")
        held = self.length - self.gone
        new, old = (torch.ones(b, n, dtype=torch.bool, device=like.device) for n in (t, held))
        old = old if self.real is None else self.real[:, :held]
        self.real = torch.cat((old, new if mask is None else mask), dim=1)
        self._gaps = self._gaps if mask is None else None

    @property
    def gaps(self) -> bool:
        """Whether padding follows a real token somewhere.  Looked up once (on a GPU, a wait)."""
        if self._gaps is None:
            self._gaps = self.real is not None and bool((self.real[:, :-1] & ~self.real[:, 1:]).any())
        return self._gaps

    def advance(self, t: int, count: int | None) -> None:
        """`t` tokens more have been seen; the last `count` of all are held (None: all that were, and these)."""
        self.length += t
        if count is not None and self.length - self.gone > count:
            self.gone = self.length - count
            self.real = None if self.real is None else _end(self.real, count)

    def once(self, name: Hashable, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What `make` gave when it was asked for first."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def _end(kept: Tensor, count: int) -> Tensor:
    """The last `count` of (b s ...); a copy, for a part would keep the memory of the whole."""
    first = max(0, kept.shape[1] - count)
    return kept[:, first:].clone() if first else kept


class Cache:
    """One `LayerCache` for each of `layers` layers.

    >>> cache, layer = Cache(2), MultiHeadAttention(8, Softmax(2), causal=True)
    >>> layer(torch.zeros(1, 3, 8), cache=cache[0]).shape, cache.length      # fills it
    (torch.Size([1, 3, 8]), 3)
    >>> layer(torch.zeros(1, 1, 8), cache=cache[0]).shape, cache.length      # reads and extends it
    (torch.Size([1, 1, 8]), 4)
    """

    def __init__(self, layers: int) -> None:
        if layers < 1:
            raise ValueError(f"Cache: layers must be at least 1 but is {layers}")
        self.layers = tuple(LayerCache() for _ in range(layers))

    @property
    def length(self) -> int:
        """Tokens it has seen."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Memory of all it keeps."""
        return sum(layer.nbytes for layer in self.layers)

    def expect(self, mask: Tensor | None, like: Tensor) -> None:
        """Take note of which tokens of a coming call (b t ...) are real: True in `mask` (b t), or all of them.

        Padding stays hidden in all calls to come.  ValueError for another number of sequences than before.
        """
        for layer in self.layers:
            layer.expect(mask, like)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)
