"""The op `relational_attention`: its signature and its implementations."""

from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Masks, Packed, Symbols
from polyhead.ops.dispatch import Op, run
from polyhead.ops.kernel import Kernel
from polyhead.ops.native import attention
from polyhead.ops.native.check import OpCheck, register_op_check
from polyhead.ops.relational import native, sdpa
from polyhead.ops.relational.reference import reference
from polyhead.ops.tiling import tiled
from polyhead.spec import mechanism
from polyhead.spec.shapes import shaped

NATIVE = Kernel(
    op="relational_attention",
    impl="native",
    forward_pass=attention.forward_pass,
    backward_pass=attention.backward_pass,
    unsupported_reason=native.unsupported_reason,
    preferred=native.is_preferred,
    combine=native.combine,
    empty_outputs=attention.empty_outputs,
    saves_outputs=True,
    device_types="cpu",
)

RELATIONAL = Op(
    row=mechanism("relational_attention"),
    reference=reference,
    backends={"native": NATIVE, "sdpa": sdpa, "blocked": tiled("relational_attention", reference)},
)


@shaped
def relational_attention(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    q_rel: Float[Tensor, "b t r p"],
    k_rel: Float[Tensor, "b s r p"],
    symbols: Symbols,
    relation_weight: Float[Tensor, "h e r"],
    *,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: float | None = None,
    keep: Keep | None = None,
    impl: str = "auto",
    relation_act: str = "identity",
) -> Float[Tensor, "b t h e"]:
    """Relational attention, `out_h = sum_s a_h symbols_h + W_h sum_s a_h act(q_rel k_rel)`.

    `bias` and `mask` act on the scores.  A query without a visible key gets exactly 0.  Altabaa and Lafferty 2024.
    Other arguments and errors are those of `softmax_attention`.

    >>> relational_attention(q, k, q_rel, k_rel, symbols, relation_weight, causal=True)      # (b t h e)

    Args:
        symbols: Values by key, or by offset: row j - i + t - 1 is for query i and key j.
        keep: Multiplies the code at both uses.
        relation_act: A name of `spec.RELATION_ACTS`; a softmax runs over the visible keys.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(
        q, k, symbols, bias, masks, keep, scale, impl,
        q_rel=q_rel, k_rel=k_rel, relation_weight=relation_weight, act=relation_act,
    )  # fmt: skip
    return run(RELATIONAL, call)


register_op_check("attention", OpCheck("relational", NATIVE.forward, reference, native.examples))
