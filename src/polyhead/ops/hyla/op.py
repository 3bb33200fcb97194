"""The op `hyla`: its signature and its implementations."""

from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Keep, Mask, Masks, Packed
from polyhead.ops.dispatch import Op, run
from polyhead.ops.hyla import native, triton
from polyhead.ops.hyla.reference import reference
from polyhead.ops.kernel import Kernel
from polyhead.ops.native.check import OpCheck, register_op_check
from polyhead.ops.tiling import tiled
from polyhead.spec import mechanism
from polyhead.spec.shapes import shaped


def prefers_tiles(call: AttentionCall) -> bool:
    """Whether tiles take the place of the equation.

    They were measured to be no slower from 2^18 pairs of one sample on.  For smaller samples they save memory: a tensor
    of the equation has e numbers for each pair of the batch, 256 MB in float32 from 2^26 on.
    """
    t, s = call.lengths
    return t * s >= 1 << 18 or call.q.shape[0] * t * s * call.v.shape[-1] >= 1 << 26


TRITON = Kernel(
    op="hyla",
    impl="triton",
    forward_pass=triton.forward_pass,
    backward_pass=triton.backward_pass,
    unsupported_reason=triton.unsupported_reason,
    preferred=triton.is_preferred,
)
NATIVE = Kernel(
    op="hyla",
    impl="native",
    forward_pass=native.forward_pass,
    backward_pass=native.backward_pass,
    unsupported_reason=native.unsupported_reason,
    preferred=native.is_preferred,
    device_types="cpu",
)
HYLA = Op(
    row=mechanism("hyla"),
    reference=reference,
    backends={"native": NATIVE, "triton": TRITON, "blocked": tiled("hyla", reference, prefers_tiles)},
)


@shaped
def hyla(
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
    normalise: str = "rms_heads",
    act: str = "relu",
    value_weight: Float[Tensor, "h e e"] | None = None,
) -> Float[Tensor, "b t h e"]:
    """HYLA, `out_h = sum_s a_h act(sum_h a_h v_h)`: the code of a pair configures the value network of the pair.

    A query without a visible key gets exactly 0.  Schug et al., eq. 6; eq. 10 with `value_weight`.  Other arguments and
    errors are those of `softmax_attention`.

    >>> hyla(q, k, v, causal=True)      # (b t h e)

    Args:
        keep: Multiplies the code at every use.
        normalise: How scores become the code: a name of `spec.NORMALISE`.
        act: Activation in the value network: a name of `spec.ACTS`.
        value_weight: One more layer, [head, out, in]: `act(sum_h a_h W_h z)`.
    """
    masks = Masks(mask, causal, window, cu_seqlens)
    call = AttentionCall(q, k, v, bias, masks, keep, scale, impl, normalise, value_weight, act=act)
    return run(HYLA, call)


register_op_check("hyla", OpCheck("hyla", NATIVE.forward, reference, native.examples))
