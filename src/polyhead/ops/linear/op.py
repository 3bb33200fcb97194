"""The op `linear_attention` and its step: their signatures and implementations."""

from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Masks, Packed, check_scale
from polyhead.ops.dispatch import Op, run
from polyhead.ops.latent_code import act as activation, check_step, harmless_keys, zero_hidden_keys
from polyhead.ops.linear import chunked
from polyhead.ops.linear.reference import reference
from polyhead.ops.precision import casting
from polyhead.ops.tiling import tiled
from polyhead.spec import ACTS, mechanism
from polyhead.spec.shapes import one_of, shaped

LINEAR = Op(
    row=mechanism("linear_attention"),
    reference=reference,
    backends={"chunked": chunked, "blocked": tiled("linear_attention", reference)},
)


@shaped
def linear_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    v: Float[Tensor, "b s g e"],
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: float | None = None,
    keep: Keep | None = None,
    impl: str = "auto",
    normalise: str = "identity",
    act: str = "identity",
) -> Float[Tensor, "b t h e"]:
    """Linear attention, `out = (q k^T / sqrt(d) + bias) act(v)` per head: no feature map, no division.

    Time and memory are O(t) if `normalise` is "identity", without bias, window and `keep`, and with at most a key mask.
    A query without a visible key gets exactly 0.  Schug et al., eq. 3 without the softmax.  Other arguments and errors
    are those of `softmax_attention`.

    >>> linear_attention(q, k, v, causal=True)      # (b t h e)

    Args:
        normalise: How scores become the code: a name of `spec.NORMALISE`.
        act: Activation of the values: a name of `spec.ACTS`.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, v, bias, masks, keep, scale, impl, normalise, act=act)
    return run(LINEAR, call)


@shaped
def linear_step(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b t g d"],
    v: Float[Tensor, "b t g e"],
    state: Float[Tensor, "b g d e"] | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    act: str = "identity",
) -> tuple[Float[Tensor, "b t h e"], Float[Tensor, "b g d e"]]:
    """Causal linear attention of t new tokens, given the state of all earlier tokens: outputs and the next state.

    The cost of a step does not depend on the number of earlier tokens.  Steps of any sizes give the same result as one
    causal call.

    >>> torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 5, 2, 4, dtype=torch.float64)      # b = 1, t = 5, h = 2, d = 4
    >>> out, state = linear_step(q[:, :3], k[:, :3], v[:, :3])
    >>> last, state = linear_step(q[:, 3:], k[:, 3:], v[:, 3:], state)
    >>> torch.allclose(torch.cat((out, last), 1), linear_attention(q, k, v, causal=True))
    True

    Args:
        state: The state after all earlier tokens, in at least float32; None means that there are no earlier tokens.
        mask: A mask of the new keys, (b|1, 1, 1, t).
        act: Activation of the values: a name of `spec.ACTS`.

    Raises:
        ValueError: For any other mask, and for dtypes that do not match.
    """
    with casting(q, k, v) as (q, k, v):
        one_of("linear_step", "act", act, ACTS)
        check_step("linear_step", q, k, v, state)
        check_scale("linear_step", scale)
        if mask is not None and (not Masks(mask).is_of_keys or mask.shape[-1] not in (1, k.shape[1])):
            raise ValueError(f"linear_step: mask must be one of keys (b|1, 1, 1, t) but is {tuple(mask.shape)}")
        # Hidden keys are always 0, as nothing else keeps them out of the state; their values matter only if not finite.
        k, v = zero_hidden_keys(mask, k), harmless_keys(mask, v)
        if state is None:
            q = chunked.zero_blind_queries(Masks(mask), q, q.shape[1], causal=True)
        return chunked.step(q, k, activation(act)(v), state, scale)
