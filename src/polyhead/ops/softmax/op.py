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

    Query head i reads group i // (h / g) of keys and values. A query without a visible key gets exactly 0.
    `window`: only keys less than `window` positions away; the last query is aligned with the last key. `cu_seqlens`:
    the single sample is several packed sequences, masked from one another. `softcap`: scores x become
    softcap tanh(x / softcap), before the bias. `sinks`: each head's score of a further key, which has no value.
    Raises ValueError if an explicit impl cannot take the inputs. Vaswani et al. 2017, eq. 1.

    >>> softmax_attention(q, k, v, causal=True)      # (b t h e)
    """
    check_scale("softmax_attention", scale, softcap)
    if softcap is not None:
        check_number("softmax_attention", "softcap", softcap, 0, above=True)
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, v, bias, masks, keep, scale, impl, softcap=softcap, sinks=sinks)
    return run(SOFTMAX, call)


register_op_check("attention", OpCheck("softmax", NATIVE.forward, reference, native.examples))
