"""One call of an op: its checks, and the choice between its reference and tiles.

The op's name fixes the meaning; `impl` picks the implementation.  "auto" takes tiles where they were measured to be no
slower.  The choice is a function of shapes and options, so it is made while JAX traces.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from polyhead.jaxside.call import AttentionCall
from polyhead.jaxside.latent_code import check_call, zero_hidden_keys
from polyhead.jaxside.tiles import Reference, is_large, run_in_tiles
from polyhead.spec import mechanism
from polyhead.spec.shapes import check_heads, one_of


def compute(op: str, reference: Reference, impl: str, call: AttentionCall) -> jax.Array:
    """The output of a call of the op `op`: by its reference, or by the reference on tiles.

    Raises:
        ValueError: For an unknown option or impl, more than one dtype, and invalid limits.
    """
    row = mechanism(op)
    for option, choices in row.choices.items():
        field = "act" if option == "relation_act" else option
        one_of(op, option, getattr(call, field), choices)
    one_of(op, "impl", impl, ("auto", "blocked", "reference"))
    # NumPy arrays become those of JAX, so that all of them have dtypes and rules of JAX.
    call = jax.tree.map(jnp.asarray, call)

    # The checks beyond those of `@shaped`.
    arrays = {}
    for name in (*row.tensors, *row.optional):
        array = call.v if name == "symbols" else getattr(call, name)
        if array is not None:
            arrays[name] = array
    names = list(arrays)
    dtypes = [str(array.dtype) for array in arrays.values()]
    if len(set(dtypes)) > 1:
        listed = f"{', '.join(names[:-1])} and {names[-1]}"
        raise ValueError(f"{op}: {listed} must have one dtype but have {', '.join(dtypes)}")
    check_heads(op, {name: array.shape for name, array in arrays.items()})
    check_call(op, call)

    # Keys that no query reads become 0: NaN there would be multiplied by a code of 0, which gives NaN.
    call = replace(call, k=zero_hidden_keys(call.masks.mask, call.k), v=zero_hidden_keys(call.masks.mask, call.v))
    if call.k_rel is not None:
        call = replace(call, k_rel=zero_hidden_keys(call.masks.mask, call.k_rel))
    if call.scale is not None:
        call = replace(call, scale=call.score_scale)  # an integer has no gradient
    if call.network == "sequence":
        if impl == "blocked":
            reason = "has some queries in a tile, but network='sequence' reads all of them at once"
            raise ValueError(f"{op}: impl 'blocked' {reason}; use impl='auto' or 'reference'")
        return reference(call)
    uses_tiles = impl == "blocked" or (impl == "auto" and is_large(call))
    if uses_tiles and 0 not in call.lengths:  # without queries or keys there is no tile
        return run_in_tiles(reference, call)
    return reference(call)
