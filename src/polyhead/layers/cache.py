"""The KV cache: what layers store of earlier tokens, so that decoding computes only the new ones.

Keys, values, relation keys and symbols are stored as they enter the equation: normalised, rotated and projected.
Linear heads without normalisation store the sum over all tokens instead; a layer with a window drops the keys that no
later token can see.  If positions are given, they must increase from token to token.
"""

import contextlib
import copy
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from polyhead.ops.readable import is_cheap_to_read
from polyhead.spec.shapes import check_count

# The attribute by which a layer is known to caches. It gets one in its first call with a cache, not when it is made:
# layers are often deep copies of one that was never called.
NAME = "_name_in_caches"


class LayerCache:
    """The cache of one layer: of its self-attention and, in `.cross`, of its cross-attention.

    A cache belongs to the layer that first fills it, and a deep copy of that layer may continue it; any other layer is
    refused.  A cache that was copied or read from a file belongs to the layer that fills it next.

    >>> cache = LayerCache()
    >>> cache.extend("k", torch.zeros(1, 3, 2)).shape, cache.extend("k", torch.zeros(1, 1, 2)).shape
    (torch.Size([1, 3, 2]), torch.Size([1, 4, 2]))

    Attributes:
        length: Number of tokens so far; in `.cross`, of queries.
        gone: How many of the first tokens were dropped.
        real: Which of the stored tokens (b s) are not padding; None if there is no padding.
    """

    def __init__(self) -> None:
        self.length = self.gone = 0
        self.real: Tensor | None = None
        self._tensors_by_name: dict[Hashable, Tensor] = {}
        self._context_tensors: dict[Hashable, dict[str, Tensor]] = {}
        self._cross: LayerCache | None = None
        self._owner: str | None = None
        self._whole = False  # inside of `whole`, which is done once

    @property
    def cross(self) -> "LayerCache":
        """The cache of the layer's cross-attention."""
        if self._cross is None:
            self._cross = LayerCache()
        return self._cross

    def claim(self, kind: str, layer: nn.Module) -> None:
        """Make this the cache of `layer`, which the error calls `kind`; in compiled code do nothing.

        Raises:
            ValueError: If the cache holds the tokens of another layer.
        """
        if torch.compiler.is_compiling():
            return
        name = vars(layer).get(NAME)
        if name is None:
            name = vars(layer)[NAME] = uuid.uuid4().hex
        if self._owner is None or self.length == 0:
            self._owner = name
        elif self._owner != name:
            raise ValueError(f"{kind}: the cache must be this layer's, got that of another layer")

    def __contains__(self, name: Hashable) -> bool:
        return name in self._tensors_by_name

    def extend(self, name: Hashable, new: Tensor, limit: int | None = None) -> Tensor:
        """What is stored under `name`, followed by `new` (b t ...).

        New tokens are copied, because the caller may write the next tokens into the same memory.

        Args:
            limit: How many of the last tokens stay stored; None: all.

        Raises:
            ValueError: If the shapes do not match.
        """
        old = self._tensors_by_name.get(name)
        if old is None:
            joined = new.clone()
        elif (old.shape[0], *old.shape[2:]) == (new.shape[0], *new.shape[2:]):
            joined = torch.cat((old, new), dim=1)
        else:
            stored_shape, shape = tuple(old.shape), tuple(new.shape)
            raise ValueError(f"LayerCache: stored {name} is (b s ...) = {stored_shape} but new {name} is {shape}")
        self._tensors_by_name[name] = _end(joined, limit)
        return joined

    def state(self, name: Hashable) -> Tensor | None:
        """The tensor that is stored under that name, or None."""
        return self._tensors_by_name.get(name)

    def put(self, name: Hashable, state: Tensor) -> None:
        """Store `state` under that name, in place of an earlier one."""
        self._tensors_by_name[name] = state

    def computed_once(self, name: Hashable, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The result of the first call of `make` under this name."""
        if name not in self._context_tensors:
            self._context_tensors[name] = make()
        return self._context_tensors[name]

    def context_length(self, default: int) -> int:
        """The number of keys of a cached context; `default` if there is none yet."""
        for tensors in self._context_tensors.values():
            if "k" in tensors:
                return tensors["k"].shape[1]
        return default

    def _tensors(self, *, tables: bool = True) -> list[Tensor]:
        """All stored tensors, those of the cross-attention included; `tables`: and tables of relative symbols."""
        tensors = list(self._tensors_by_name.values())
        for group in self._context_tensors.values():
            tensors += [tensor for name, tensor in group.items() if tables or name != "table"]
        if self.real is not None:
            tensors.append(self.real)
        if self._cross is not None:
            tensors += self._cross._tensors(tables=tables)
        return tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors, those of the cross-attention included."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def batch(self) -> int:
        """The number of stored sequences; 0 while it is empty."""
        batch = 0
        for tensor in self._tensors(tables=False):  # not by max(): torch.compile cannot trace its default
            if tensor.shape[0] == 0:  # no sequence is left; what all share has one row
                return 0
            batch = max(batch, tensor.shape[0])
        return batch

    def reorder(self, rows: Tensor, batch: int) -> None:
        """What `Cache.reorder` says, for one layer of `batch` sequences."""

        def chosen(tensor: Tensor) -> Tensor:
            if tensor.shape[0] < batch:  # all sequences share it
                return tensor
            return tensor.index_select(0, rows.to(tensor.device))

        self._tensors_by_name = {name: chosen(tensor) for name, tensor in self._tensors_by_name.items()}
        for group, tensors in self._context_tensors.items():
            # The rows of a table are offsets.
            self._context_tensors[group] = {name: x if name == "table" else chosen(x) for name, x in tensors.items()}
        if self.real is not None:
            self.real = chosen(self.real)
        if self._cross is not None:
            self._cross.reorder(rows, batch)

    def copied(self) -> "LayerCache":
        """A copy that holds the same tensors."""
        new = LayerCache.__new__(LayerCache)  # copy.copy takes 2.5 times as long, and every call makes one
        new.__dict__ = dict(vars(self))
        new._tensors_by_name = self._tensors_by_name.copy()
        new._context_tensors = self._context_tensors.copy()
        if self._cross is not None:
            new._cross = self._cross.copied()
        return new

    def __copy__(self) -> "LayerCache":
        new = self.copied()
        new._whole, new._owner = False, None
        if new._cross is not None:
            new._cross = copy.copy(new._cross)
        return new

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_whole": False, "_owner": None}  # a cache from a file meets a model that was built anew

    def expect(self, mask: Tensor | None, like: Tensor) -> None:
        """`Cache.expect` for one layer."""
        if mask is None and self.real is None:
            return
        b, t = like.shape[:2]
        num_sequences = self.batch if self.length else b
        if num_sequences != b or (self.real is not None and self.real.shape[0] != b):
            raise ValueError(f"Cache: the number of sequences must be {num_sequences}, got {b}")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (b, t)):
            actual = f"{mask.dtype} {tuple(mask.shape)}"
            raise ValueError(f"Cache: the mask must be Boolean of shape {(b, t)}, True at real tokens, but is {actual}")
        # Which of the stored and new tokens (b s) are real: without a mask all of them are.
        num_held = self.length - self.gone
        real = torch.ones(b, num_held + t, dtype=torch.bool, device=like.device)
        if self.real is not None:
            real[:, :num_held] = self.real[:, :num_held]
        if mask is not None:
            real[:, num_held:] = mask
        self.real = real

    def advance(self, t: int, limit: int | None) -> None:
        """Record `t` new tokens, of which, with the earlier ones, the last `limit` (None: all) stay stored."""
        self.length += t
        if self.length == 0:  # a call without queries: the next one may have another context
            self._context_tensors = {}
        if limit is not None and self.length - self.gone > limit:
            self.gone = self.length - limit
            if self.real is not None:
                self.real = _end(self.real, limit)


def _end(tensor: Tensor, limit: int | None) -> Tensor:
    """The last `limit` (None: all) of (b s ...), copied: a view would keep the memory of the whole tensor."""
    if limit is None or tensor.shape[1] <= limit:
        return tensor
    return tensor[:, tensor.shape[1] - limit :].clone()


class Cache:
    """One `LayerCache` for each of `layers` layers.

    >>> cache, layer = Cache(2), MultiHeadAttention(8, Softmax(2), causal=True)
    >>> layer(torch.zeros(1, 3, 8), cache=cache[0]).shape, cache.length      # fills it
    (torch.Size([1, 3, 8]), 3)
    >>> layer(torch.zeros(1, 1, 8), cache=cache[0]).shape, cache.length      # reads and extends it
    (torch.Size([1, 1, 8]), 4)
    """

    def __init__(self, layers: int) -> None:
        check_count("Cache", "layers", layers)
        self.layers = tuple(LayerCache() for _ in range(layers))

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(layer.nbytes for layer in self.layers)

    def expect(self, mask: Tensor | None, like: Tensor) -> None:
        """Announce the tokens of the next call; padding stays masked in all later calls.

        Args:
            mask: True at real tokens (b t); None: all are real.
            like: The tokens, or a tensor (b t ...) with an entry for each.

        Raises:
            ValueError: If the number of sequences changes, or the mask is not Boolean (b t).
        """
        for layer in self.layers:
            layer.expect(mask, like)

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i by sequence `rows[i]`.

        Args:
            rows: The sequences to keep (n,), such as the beams of a search.

        Raises:
            ValueError: For rows that are not indices, and if one sequence would become several: what all sequences
                share looks like one of them.
        """
        rows = torch.as_tensor(rows)
        if rows.ndim != 1 or (len(rows) and (rows.dtype == torch.bool or rows.is_floating_point())):
            raise ValueError(f"Cache: rows must be indices of sequences but are {rows.dtype} {tuple(rows.shape)}")
        rows = rows.long()  # an empty list is one of floats
        batch = max(layer.batch for layer in self.layers)
        if batch == 1 and len(rows) > 1:
            raise ValueError(
                f"Cache: the cache of one sequence cannot become that of {len(rows)}: repeat the inputs instead"
            )
        if batch and is_cheap_to_read(rows) and any(row not in range(batch) for row in rows.tolist()):
            raise ValueError(f"Cache: rows must be indices of its {batch} sequences but are {rows.tolist()!r:.40}")
        for layer in self.layers:
            layer.reorder(rows, batch)

    def __copy__(self) -> "Cache":
        """A snapshot for going back: it shares tensors, which later calls replace and never change."""
        new = type(self).__new__(type(self))
        new.__dict__ = {**vars(self), "layers": type(self.layers)(map(copy.copy, self.layers))}
        return new

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCache:
        if layer >= len(self.layers):
            raise IndexError(f"Cache: layer must be below {len(self.layers)}, got {layer}: give Cache({layer + 1})")
        return self.layers[layer]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self.layers)


def whole(cache: Cache | LayerCache | None) -> contextlib.AbstractContextManager[None]:
    """Context manager: a call of a model or a layer inside adds all its tokens to the cache or, interrupted, none.

    Without a cache, inside of another such call, and in compiled code it does nothing.
    """
    if cache is None or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    if isinstance(cache, Cache):
        return _all_or_none(cache.layers)
    if cache._whole:
        return contextlib.nullcontext()
    return _all_or_none((cache,))


@contextlib.contextmanager
def _all_or_none(layers: Sequence[LayerCache]) -> Iterator[None]:
    # Calls replace stored tensors and write into none, so copies of the dictionaries are enough to go back.
    before = [layer.copied() for layer in layers]
    for layer in layers:
        layer._whole = True
    try:
        yield
    except BaseException:
        for layer, copy_before in zip(layers, before, strict=True):
            vars(layer).update(vars(copy_before))
        raise
    finally:
        for layer in layers:
            layer._whole = False
