"""Scores, the latent code and relations: what mechanisms compute before they mix values.

    s_hij   = q_ih . k_jh / sqrt(d) + bias_hij                        scores
    a_hij   = softmax over keys j, or rms over heads h, or one after the other, or softmax over heads h, or s itself
                                                                      the code of the pair (i, j): one number per head
    rel_rij = act(q_rel_ir . k_rel_jr / sqrt(p))                      the relations of the pair: r numbers

Vaswani et al. 2017, eq. 1 (softmax); Schug et al. 2024, "Attention as a hypernetwork", eq. 3 to 6 (the code, rms over
heads); Altabaa and Lafferty 2024, "Disentangling and integrating relational and sensory information in transformer
architectures" (relations).  The softmax over heads is ours.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from polyhead.ops.call import AttentionCall, Bias, Mask, Masks, Packed, both, check_same_kind, check_scale
from polyhead.ops.precision import casting
from polyhead.ops.readable import is_cheap_to_read
from polyhead.spec import ACTS, NORMALISE, RELATION_ACTS, RMS_HEADS_EPS, SOFTMAX_AXIS
from polyhead.spec.shapes import check_masks, one_of, shaped


# -------------------------------------------------------------------------------------------------- activations, dtypes
def _identity(x: Tensor) -> Tensor:
    return x


_ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": _identity,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def act(name: str) -> Callable[[Tensor], Tensor]:
    """The pointwise activation of that name (spec.ACTS)."""
    return _ACTS[one_of("polyhead.ops", "act", name, ACTS)]


def relate(scores: Tensor, act: str, visible: Tensor | None) -> Tensor:
    """Apply a relation's activation (spec.RELATION_ACTS) to (b r t s) inner products.

    A softmax runs over the visible keys.
    """
    if act == "softmax":
        return softmax_visible(wide(scores), visible, 3).to(scores.dtype)
    return _ACTS[act](scores)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to take statistics in: float32 for float16 and bfloat16, otherwise `dtype` itself."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32."""
    return x.to(at_least_float32(x.dtype))


# ----------------------------------------------------------------------------------------------- keys, masks and biases
def share(x: Tensor, heads: int) -> Tensor:
    """Grouped keys or values (b s g d), repeated for h query heads: head i reads group i // (h / g)."""
    groups = x.shape[2]
    if groups == heads:
        return x
    return x.repeat_interleave(heads // groups, dim=2, output_size=heads)


def dense(bias: Tensor, t: int, s: int) -> Tensor:
    """A bias by offset (h t+s-1), expanded to (h t s); a dense bias is returned unchanged."""
    if bias.ndim != 2:
        return bias
    if t == 0:
        return bias[:, :0].reshape(len(bias), 0, s)
    if t == 1:
        return bias.unsqueeze(1)
    if torch.compiler.is_exporting():  # rows of one number more: for 2 queries they would be no longer than s
        bias = F.pad(bias, (0, 1))
    h, n = bias.shape
    # Viewing rows of n numbers as rows of n - 1 shifts each query by one key.  Lengths stay dynamic under
    # torch.compile.
    rows = bias.unsqueeze(1).expand(h, t, n).flatten(1)
    return rows[:, t - 1 : t * n - 1].unflatten(1, (t, n - 1))[:, :, :s]


def of_pairs(x: Tensor) -> Tensor:
    """A mask or a keep of at most four dimensions as (b|1 h|1 t|1 s|1)."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def harmless_keys(mask: Tensor | None, x: Tensor) -> Tensor:
    """Keys or values (b s g _) whose product with a code of 0 is 0: what `mask` hides from every query becomes 0.

    Symbols by offset belong to no key and stay unchanged.  Small numbers stay unchanged where data may be read:
    copying them would cost a training step of small models 7 %.
    """
    if mask is None or x.ndim != 4 or is_known_small(x):
        return x
    return zero_hidden_keys(mask, x)


def is_known_small(x: Tensor) -> bool:
    """Whether all numbers are seen to be too small for a score to overflow; False where data may not be read."""
    if not is_cheap_to_read(x) or not x.numel():
        return False
    low, high = x.detach().aminmax()
    limit = torch.finfo(x.dtype).max ** 0.5 / 16
    return bool((low > -limit) & (high < limit))


def zero_hidden_keys(mask: Tensor | None, x: Tensor) -> Tensor:
    """Keys or values (b s g _), set to 0 at keys that `mask` hides from every query in all heads."""
    if mask is None:
        return x
    return x.masked_fill(~of_pairs(mask).any(2).any(1)[:, :, None, None], 0)


def hidden_by(bias: Tensor) -> Tensor | None:
    """Where a bias is -inf.  None if data may be read and no entry is -inf.

    The mask costs a training step of 128 x 32 tokens 7 to 19 % on a CPU; the check has no measurable cost.
    """
    hidden = bias == -torch.inf
    if is_cheap_to_read(bias) and not hidden.any():
        return None
    return hidden


def visible_pairs(call: AttentionCall) -> Tensor | None:
    """`call.visible()` without the pairs whose bias is -inf."""
    hidden = None if call.bias is None else hidden_by(call.bias)
    if hidden is None:
        return call.visible()
    return both(call.visible(), dense(~hidden, *call.lengths))


def any_head(visible: Tensor | None) -> Tensor | None:
    """The mask of what heads share: True where it is True for any head."""
    if visible is None or visible.ndim < 3:
        return visible
    return visible.any(-3, keepdim=True)


def relation_mask(call: AttentionCall) -> Tensor | None:
    """The visible pairs for a softmax over relations; None for other activations, which need no mask."""
    return visible_pairs(call) if call.act == "softmax" else None


# -------------------------------------------------------------------------------------------------- scores and the code
def products(call: AttentionCall) -> Tensor:
    """(b h t s) scores without the bias, in at least float32."""
    return inner(call.q, share(call.k, call.q.shape[2]), call.score_scale)


def inner(q: Tensor, k: Tensor, factor: float) -> Tensor:
    """`factor q . k` (b h t s), in at least float32."""
    # In bfloat16 a score of 60 is off by 0.1, so its exponential by 10 %.  On a CPU float32 is no slower.
    if q.device.type == "cpu":
        q, k = wide(q), wide(k)
    # Queries of bfloat16 times a factor would be rounded again, and rms over few heads amplifies that where all scores
    # are near 0.  In float16 products without the factor may overflow.
    if q.dtype == torch.bfloat16:
        return wide(torch.einsum("b t h d, b s h d -> b h t s", q, k)) * factor
    return wide(torch.einsum("b t h d, b s h d -> b h t s", q * factor, k))


def with_bias(scores: Tensor, bias: Tensor | None, visible: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(b h t s) scores plus bias in at least float32, and the mask; -inf in the bias masks the pair."""
    if bias is None:
        return wide(scores), visible
    t, s = scores.shape[2:]
    hidden = hidden_by(bias)
    if hidden is not None:
        bias, visible = bias.masked_fill(hidden, 0), both(visible, dense(~hidden, t, s))
    return wide(scores) + dense(bias, t, s), visible


def softmax_visible(scores: Tensor, visible: Tensor | None, dim: int) -> Tensor:
    """Softmax of (b h t s) scores over the visible keys (or over heads).

    A row in which nothing is visible gets zeros and no gradient.
    """
    if visible is None:
        return scores.softmax(dim)
    return hide(scores, visible, dim).softmax(dim).masked_fill(~visible, 0)


def hide(scores: Tensor, visible: Tensor, dim: int) -> Tensor:
    """(b h t s) scores, -inf at hidden pairs, as a bias may give visible ones the least number.

    A row along `dim` in which nothing is visible gets 0: there -inf alone would give NaN.
    """
    fill = torch.where(of_pairs(visible).any(dim, keepdim=True), -torch.inf, 0.0).to(scores.dtype)
    return torch.where(visible, scores, fill)


def softmax_with_sinks(scores: Tensor, visible: Tensor | None, sinks: Tensor) -> Tensor:
    """Softmax of (b h t s) scores over the visible keys and a sink with the score `sinks` (h), whose weight is dropped.

    A row in which nothing is visible gets zeros: all its weight is the sink's.
    """
    if visible is not None:
        scores = hide(scores, visible, 3)  # a sink may be -inf, too
    sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)  # (b h t 1), as of one more key
    weights = torch.cat((scores, sink), dim=3).softmax(3)[..., :-1]
    return weights if visible is None else weights.masked_fill(~visible, 0)


def rms_heads(scores: Tensor) -> Tensor:
    """s / sqrt(mean over heads of s^2 + eps), for (b h t s) scores; zero where all heads are zero.

    Tiles compute it by hand, with its gradient: hyla/triton/tiles.py (`rms_root`; gradient in
    hyla/triton/code.py), native/pairs.h (`normalise`, `through_heads`).  For JAX: jaxside/latent_code.py.
    """
    return scores * torch.rsqrt(scores.square().mean(1, keepdim=True) + RMS_HEADS_EPS)


def normalised(scores: Tensor, normalise: str, visible: Tensor | None) -> Tensor:
    """The code of (b h t s) scores.  Masked pairs are -inf before a softmax and 0 otherwise."""
    axis = SOFTMAX_AXIS.get(normalise)
    if axis is not None:
        code = softmax_visible(scores, visible, "bhts".index(axis))
    elif visible is not None:
        code = scores.masked_fill(~visible, 0)
    else:
        code = scores
    if normalise in ("rms_heads", "softmax_rms_heads"):
        return rms_heads(code)
    return code


def code(call: AttentionCall) -> Tensor:
    """The code (b h t s) of a call: its scores, capped and biased, normalised by `call.normalise` beside any sinks."""
    scores = products(call)
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores, visible = with_bias(scores, call.bias, call.visible())
    if call.sinks is not None:
        return softmax_with_sinks(scores, visible, call.sinks).to(call.q.dtype)
    return normalised(scores, call.normalise, visible).to(call.q.dtype)


def drop(code: Tensor, keep: Tensor | None) -> Tensor:
    """Apply dropout to the normalised code; bfloat16 would round 1 / (1 - 0.1) by 0.16 %, for all pairs alike."""
    if keep is None:
        return code
    return (wide(code) * keep.to(at_least_float32(code.dtype))).to(code.dtype)


# ------------------------------------------------------------------------------------------------ symbols and relations
def by_offset(code: Tensor) -> Tensor:
    """(b h t s) codes as (b h t t+s-1): the code of query i and key j in column j - i + t - 1, elsewhere 0."""
    t, s = code.shape[2:]
    # Viewing rows of n numbers as rows of n + 1 shifts each query back by one key.  Lengths stay dynamic under
    # torch.compile and torch.export.
    rows = F.pad(code, (t - 1, 0)).flatten(2)
    return F.pad(rows, (0, t)).unflatten(2, (t, t + s))[..., : t + s - 1]


def retrieve(code: Tensor, symbols: Tensor) -> Tensor:
    """(b t h e): the sum of symbols, by key or by offset, weighted by (b h t s) codes."""
    if symbols.ndim == 4:
        return torch.einsum("b h t s, b s h e -> b t h e", code, share(symbols, code.shape[1]))
    return torch.einsum("b h t n, n h e -> b t h e", by_offset(code), share(symbols[None], code.shape[1])[0])


# --------------------------------------------------------------------------------------------------------------- checks
def check_step(function: str, q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> None:
    """Raise ValueError unless the tensors of a step have one dtype and one device, and the state that of sums over
    such tokens."""
    check_same_kind(function, {"q": q, "k": k, "v": v})
    if state is not None and state.dtype != wide(q).dtype:
        raise ValueError(f"{function}: the state of {q.dtype} tokens must be {wide(q).dtype} but is {state.dtype}")


# ----------------------------------------------------------------------------------------------------- public functions
@shaped
def latent_code(
    q: Float[Tensor, "b t h d"],
    k: Float[Tensor, "b s g d"],
    *,
    normalise: str,
    bias: Bias | None = None,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
    scale: float | None = None,
) -> Float[Tensor, "b h t s"]:
    """The latent code of every query-key pair: one number per head, computed before any value is read.

    A masked pair has the code 0.  Normalisation runs in at least float32; the result has the dtype of q.  Other
    arguments are those of `softmax_attention`.

    >>> latent_code(q, k, normalise="softmax", causal=True).sum(-1)      # all ones

    Args:
        normalise: "softmax" over keys, "rms_heads" over the heads of this call, "identity", "softmax_rms_heads" (over
            keys, then over heads), or "softmax_heads".  With "softmax_heads" the codes of a pair add up to 1 over the
            heads of this call, so a single head has the code 1.
    """
    with casting(q, k) as (q, k):
        one_of("latent_code", "normalise", normalise, NORMALISE)
        check_same_kind("latent_code", {"q": q, "k": k})
        check_scale("latent_code", scale)
        k = harmless_keys(mask, k)
        masks = Masks(mask, causal, window, cu_seqlens)
        call = AttentionCall(q, k, k, bias, masks, normalise=normalise, scale=scale)
        check_masks("latent_code", masks, q.shape[0], *call.lengths, is_cheap_to_read)
        return code(call)


@shaped
def relations(
    q_rel: Float[Tensor, "b t r p"],
    k_rel: Float[Tensor, "b s r p"],
    *,
    relation_act: str,
    mask: Mask | None = None,
    causal: bool = False,
    window: int | None = None,
    cu_seqlens: Packed | None = None,
) -> Float[Tensor, "b r t s"]:
    """The relations of every query-key pair, `act(q_rel . k_rel / sqrt(p))`.

    A mask that differs between heads masks a relation where it masks all heads.  Other arguments are those of
    `softmax_attention`.

    >>> relations(q_rel, k_rel, relation_act="softmax", causal=True).sum(-1)      # all ones

    Args:
        relation_act: A name of `spec.RELATION_ACTS`: a pointwise activation, which ignores the mask, or "softmax" over
            the keys that the query may attend to.
    """
    with casting(q_rel, k_rel) as (q_rel, k_rel):
        one_of("relations", "relation_act", relation_act, RELATION_ACTS)
        check_same_kind("relations", {"q_rel": q_rel, "k_rel": k_rel})
        masks = Masks(mask, causal, window, cu_seqlens)
        t, s = q_rel.shape[1], k_rel.shape[1]
        check_masks("relations", masks, q_rel.shape[0], t, s, is_cheap_to_read)
        if relation_act == "softmax":
            k_rel = harmless_keys(mask, k_rel)
        visible = any_head(masks.visible(t, s, q_rel.device))
        return relate(inner(q_rel, k_rel, q_rel.shape[-1] ** -0.5), relation_act, visible).to(q_rel.dtype)
