"""Pieces that several backends share: refusals, masks of keys, tiles of biases, derivatives of activations."""

from torch import Tensor

from polyhead.ops.code import Inputs


def refuse(who: str, impl: str, reason: str | None) -> None:
    """ValueError in one line if there is a reason why an explicit impl cannot take the inputs."""
    if reason is not None:
        raise ValueError(f"{who}: impl {impl!r} {reason}; use impl='auto' or 'reference'")


def is_key_mask(mask: Tensor) -> bool:
    """Does the mask say the same for every head and query: (b|1, 1, 1, s) or fewer dimensions?"""
    return all(size == 1 for size in mask.shape[-3:-1])


def stateless(inputs: Inputs) -> str | None:
    """Why the keys cannot be summed into a state that knows nothing of the query, or None if they can."""
    if inputs.normalise != "identity":
        return f"takes normalise='identity' only, not {inputs.normalise!r}"
    if inputs.bias is not None:
        return "takes no bias"
    if inputs.keep is not None:
        return "takes no keep"
    if inputs.mask is not None and not is_key_mask(inputs.mask):
        return f"takes masks of keys (b|1, 1, 1, s) only, not {tuple(inputs.mask.shape)}"
    return None


def look_at_keys(k: Tensor, mask: Tensor | None) -> Tensor:
    """Keys (b s g d) with those that nobody may look at set to 0: their scores are 0."""
    if mask is None:
        return k
    keys = mask.reshape(-1, mask.shape[-1])
    return k.masked_fill(~keys[:, :, None, None], 0)
