"""One call of an op as one value, a pytree: its arrays, its masks and its options.  The twin of `polyhead.ops.call`."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32

Array = jax.Array | np.ndarray
"""The type of arguments; results are jax.Array."""

# As in polyhead/ops/call.py, which says what each is.
Bias = Float[Array, "#b #h t s"] | Float[Array, "h t+s-1"]
Symbols = Float[Array, "b s g e"] | Float[Array, "t+s-1 g e"]
Mask = Bool[Array, "#b #h #t #s"] | Bool[Array, "#h #t #s"] | Bool[Array, "#t #s"] | Bool[Array, "#s"]
Packed = Int32[Array, "_"]
Keep = Float[Array, "#b #h t s"]

Scale = float | Array | None
"""A number or a scalar array, which may be traced and learned; None means d ** -0.5."""


def _static(default: Any) -> Any:
    return field(default=default, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Masks:
    """What hides keys from queries, as in polyhead/ops/call.py."""

    mask: Any = None
    causal: bool = _static(False)
    window: int | None = _static(None)
    cu_seqlens: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one call as a pytree: arrays are leaves, options are static.  Every implementation takes it.

    `v` holds the symbols of relational mechanisms.
    """

    # Leaves of the pytree are `Any`: under a transformation JAX puts tracers or markers in their place.
    q: Any
    k: Any
    v: Any = None
    bias: Any = None
    masks: Masks = Masks()
    keep: Any = None
    scale: Any = None
    value_weight: Any = None
    q_rel: Any = None
    k_rel: Any = None
    relation_weight: Any = None
    normalise: str = _static("softmax")
    act: str = _static("identity")
    pool: str = _static("")
    network: str = _static("")

    @property
    def lengths(self) -> tuple[int, int]:
        """(t, s)."""
        return self.q.shape[1], self.k.shape[1]

    @property
    def score_scale(self) -> float | jax.Array:
        """The factor of the products of queries and keys, in at least float32."""
        if self.scale is None:
            return self.q.shape[-1] ** -0.5
        return jnp.asarray(self.scale, jnp.promote_types(self.q.dtype, jnp.float32))
