"""The op `softmax_attention`: its signature and its implementations."""

from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Masks, Packed, check_scale
from polyhead.ops.dispatch import Op, run
from polyhead.ops.kernel import Kernel
from polyhead.ops.native import attention
from polyhead.ops.native.check import OpCheck, register_op_check
from polyhead.ops.softmax import native, sdpa
from polyhead.ops.softmax.reference import reference
from polyhead.ops.tiling import tiled
from polyhead.spec import mechanism
from polyhead.spec.shapes import check_number, shaped

NATIVE = Kernel(
    op="softmax_attention",
    impl="native",
    forward_pass=attention.forward_pass,
    backward_pass=attention.backward_pass,
    unsupported_reason=native.unsupported_reason,
    preferred=native.is_preferred,
    empty_outputs=attention.empty_outputs,
    saves_outputs=True,
    device_types="cpu",
)

SOFTMAX = Op(
    row=mechanism("softmax_attention"),
    reference=reference,
    backends={"native": NATIVE, "sdpa": sdpa, "blocked": tiled("softmax_attention", reference)},
)


@shaped
def softmax_attention(
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
    softcap: float | None = None,
    sinks: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "b t h e"]:
    """Softmax attention, `out = softmax(q k^T / sqrt(d) + bias) v` per head.

    Query head i reads group i // (h / g) of keys and values.  The last query is aligned with the last key.  A query
    without a visible key gets exactly 0.  Vaswani et al. 2017, eq. 1.

    >>> softmax_attention(q, k, v, causal=True)      # (b t h e)

    Args:
        bias: Dense, or by offset: column j - i + t - 1 is for query i and key j.
        mask: True where a query may attend to a key.
        window: Only keys less than `window` positions away are visible.
        cu_seqlens: Edges, from 0 on, of sequences packed into the single sample; the sequences do not see one another.
        scale: The factor of `q k^T`; None means `d ** -0.5`.
        keep: A dropout mask, which multiplies the code: each entry is 0 or `1 / (1 - rate)`.
        impl: "auto", or an implementation of `polyhead list implementations`.
        softcap: Scores x become `softcap tanh(x / softcap)`, before the bias.
        sinks: The score of each head for a further key, which has no value.

    Raises:
        ValueError: For arguments that do not match or are out of range, or if an explicit impl cannot take the inputs.
    """
    check_scale("softmax_attention", scale, softcap)
    if softcap is not None:
        check_number("softmax_attention", "softcap", softcap, 0, above=True)
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, v, bias, masks, keep, scale, impl, softcap=softcap, sinks=sinks)
    return run(SOFTMAX, call)


register_op_check("attention", OpCheck("softmax", NATIVE.forward, reference, native.examples))
