"""Stanford CS336, assignment 1: its state dict, and its names and signatures over our parts.

    load / save     a state dict of the course  <->  polyhead.Transformer
    TransformerLM   and its parts: modules with the course's signatures and keys, computed by polyhead.ops

The course's conventions: no biases; rows of q, k and v are head by head; rotary positions count from 0 and rotate pairs
(2j, 2j + 1); a mask is True where a query may attend; RMSNorm has eps 1e-5 inside the root; blocks are pre-norm;
attention is causal; the output table is not tied to the input table.
"""

import dataclasses
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead import ops
from polyhead.compat.foreign import check_functions, uncompiled
from polyhead.config import Logits, Rotary, Softmax, Swiglu, Tokens, TransformerConfig
from polyhead.layers.device import Device
from polyhead.layers.positions import RotaryEmbedding
from polyhead.models.transformer import Transformer
from polyhead.ops.norms import rms_norm
from polyhead.spec.numbers import swiglu_width
from polyhead.spec.shapes import check_number


# ---------------------------------------------------------------------------------------------------------- checkpoints
def load(state_dict: Mapping[str, Tensor], *, heads: int, theta: float, context: int) -> Transformer:
    """The course's state dict as a `polyhead.Transformer`, on the device and in the dtype of its token table.

    Layers, widths and vocabulary are read from the shapes.  The number of heads, the rotary theta and the context
    length are arguments, because no tensor has them.  The prefix `_orig_mod.` of torch.compile is removed.

    Raises ValueError, which names them, for missing or unknown keys and for shapes that do not match.
    """
    state = uncompiled(state_dict)
    layers = len({key.split(".")[1] for key in state if key.startswith("layers.") and key.count(".") > 1})
    _compare_keys(set(state), layers)
    table, up = state["token_embeddings.weight"], state["layers.0.ffn.w1.weight"]
    if table.ndim != 2 or up.ndim != 2:
        came = f"{tuple(table.shape)} and {tuple(up.shape)}"
        raise ValueError(f"cs336.load: tables must be (c m) and (f m) but are {came}")
    (count, dim), hidden = table.shape, up.shape[0]
    settings = _course(count, dim, hidden, layers, heads, theta=theta, context=context)
    model = Transformer(settings, device="meta", dtype=table.dtype).to_empty(device=table.device)
    ours = model.state_dict()
    for name, keys in _names(layers).items():
        for key, part in zip(keys, ours[name].chunk(len(keys)), strict=True):
            if state[key].shape != part.shape:
                raise ValueError(f"cs336.load: {key} must be {tuple(part.shape)} but is {tuple(state[key].shape)}")
            part.copy_(state[key])
    return model


def save(model: Transformer) -> dict[str, Tensor]:
    """The inverse of `load`: the course's state dict, copied.

    Raises ValueError, which names the field, if the model does not have the course's architecture, and for heads that
    compute a user's function.
    """
    check_functions("cs336.save", model)
    given = model.config
    count = given.inputs.count if isinstance(given.inputs, Tokens) else 1
    swiglu = given.feedforward if isinstance(given.feedforward, Swiglu) else Swiglu()
    heads = sum(group.heads for group in given.layer_heads(0))
    theta = given.positions.theta if isinstance(given.positions, Rotary) else 1e4
    course = _course(count, given.dim, swiglu.hidden, given.layers, heads, theta=theta, context=given.max_length)
    wanted, own = _plain(course), _plain(given)
    for field in dataclasses.fields(wanted):
        want, came = getattr(wanted, field.name), getattr(own, field.name)
        if came != want:
            raise ValueError(f"cs336.save: {field.name} must be {want} but is {came}")
    state = uncompiled(model.state_dict())
    parts = [zip(keys, state[name].chunk(len(keys)), strict=True) for name, keys in _names(given.layers).items()]
    return {key: part.clone() for pairs in parts for key, part in pairs}


def _plain(settings: TransformerConfig) -> TransformerConfig:
    """The settings with heads by layer, and without fields that do not belong to the format."""
    layers = map(settings.layer_heads, range(settings.layers))
    return dataclasses.replace(
        settings,
        heads=tuple(tuple(dataclasses.replace(group, impl="auto") for group in heads) for heads in layers),
        init="cs336",
        dropout=0.0,
        dropout_shared=False,
        residual_dropout=0.0,
        checkpoint=False,
    )


def _course(
    count: int, dim: int, hidden: int | None, layers: int, heads: int, *, theta: float, context: int
) -> TransformerConfig:
    if heads < 1 or dim % heads:
        raise ValueError(f"cs336: the number of heads must divide the width {dim} but is {heads}")
    return TransformerConfig(
        inputs=Tokens(count),
        outputs=Logits(count),
        dim=dim,
        layers=layers,
        heads=(Softmax(heads),),
        feedforward=Swiglu(hidden),
        positions=Rotary(theta=float(theta)),
        max_length=context,
        causal=True,
        norm="rms",
        norm_eps=1e-5,
        norm_order="pre",
        init="cs336",
    )


def _names(layers: int) -> dict[str, tuple[str, ...]]:
    """Our names -> the course's keys whose rows they hold."""
    names: dict[str, tuple[str, ...]] = {"inputs.table.weight": ("token_embeddings.weight",)}
    for i in range(layers):
        ours, theirs = f"blocks.{i}", f"layers.{i}"
        names[f"{ours}.attention.qkv.weight"] = tuple(f"{theirs}.attn.{x}_proj.weight" for x in "qkv")
        names[f"{ours}.attention.out.weight"] = (f"{theirs}.attn.output_proj.weight",)
        for n in "12":
            names[f"{ours}.norm{n}.weight"] = (f"{theirs}.ln{n}.weight",)
        for n in "123":
            names[f"{ours}.feedforward.w{n}.weight"] = (f"{theirs}.ffn.w{n}.weight",)
    return {**names, "norm.weight": ("ln_final.weight",), "outputs.linear.weight": ("lm_head.weight",)}


def _compare_keys(keys: set[str], layers: int) -> None:
    wanted = {key for ours in _names(max(layers, 1)).values() for key in ours}
    pairs = (("missing", wanted - keys), ("unknown", keys - wanted))
    if problems := [f"{what} {', '.join(sorted(names))}" for what, names in pairs if names]:
        raise ValueError(f"cs336.load: {'; '.join(problems)}")


# ---------------------------------------------------------------------------------------------------------------- parts
softmax, silu, scaled_dot_product_attention = ops.softmax, ops.silu, ops.scaled_dot_product_attention


class Linear(nn.Module):
    """`x W^T`, no bias; N(0, 2 / (in + out)) truncated at three standard deviations."""

    def __init__(
        self, in_features: int, out_features: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        std = (2.0 / (in_features + out_features)) ** 0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... f"]:
        if x.shape[-1] != self.weight.shape[1]:
            raise ValueError(f"Linear: m = {self.weight.shape[1]} but x (... m) = {tuple(x.shape)}")
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """A row of the table for each token; N(0, 1) truncated at three."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        nn.init.trunc_normal_(self.weight, a=-3.0, b=3.0)

    def forward(self, token_ids: Int[Tensor, "..."]) -> Float[Tensor, "... m"]:
        return F.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """`ops.rms_norm` and its gain."""

    def __init__(
        self, d_model: int, eps: float = 1e-5, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_number("RMSNorm", "eps", eps, 0)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)`; `d_ff` defaults to floor(8/3 d_model) down to a multiple of 64."""

    def __init__(
        self, d_model: int, d_ff: int | None = None, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        d_ff = swiglu_width(d_model) if d_ff is None else d_ff
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return self.w2(ops.silu(self.w1(x)) * self.w3(x))


class RotaryPositionalEmbedding(nn.Module):
    """Rotates x (..., t, d_k) by `token_positions` (..., t), which broadcast; interleaved pairs, no parameters."""

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device: Device = None) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(d_k, theta, max_seq_len, device=device)

    def forward(self, x: Float[Tensor, "... d"], token_positions: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        return self.rotary(x, token_positions)


class MultiHeadSelfAttention(nn.Module):
    """Causal self-attention over x (..., t, d_model); rotary when `max_seq_len` and `theta` are given."""

    rope: RotaryPositionalEmbedding | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_seq_len: int | None = None,
        theta: float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or d_model % num_heads:
            raise ValueError(f"MultiHeadSelfAttention: num_heads must divide d_model = {d_model} but is {num_heads}")
        if (max_seq_len is None) != (theta is None):
            raise ValueError("MultiHeadSelfAttention: rotary positions need both max_seq_len and theta")
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            Linear(d_model, d_model, device, dtype) for _ in range(4)
        )
        self.rope = None
        if max_seq_len is not None and theta is not None:
            self.rope = RotaryPositionalEmbedding(theta, d_model // num_heads, max_seq_len, device)

    def forward(
        self, x: Float[Tensor, "... t m"], token_positions: Int[Tensor, "... t"] | None = None
    ) -> Float[Tensor, "... t m"]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (self.num_heads, -1)) for project in projections)  # (..., t, h, d)
        if self.rope is not None:
            where = torch.arange(x.shape[-2], device=x.device) if token_positions is None else token_positions
            q, k = self.rope(q, where[..., None]), self.rope(k, where[..., None])
        elif token_positions is not None:
            raise ValueError("MultiHeadSelfAttention: token_positions came, so max_seq_len and theta are needed")
        q, k, v = (a.reshape(a.shape[:-3].numel(), *a.shape[-3:]) for a in (q, k, v))
        return self.output_proj(ops.softmax_attention(q, k, v, causal=True).reshape(x.shape))


class TransformerBlock(nn.Module):
    """`x + attn(ln1(x))`, then `x + ffn(ln2(x))`."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        max_seq_len: int | None = None,
        theta: float | None = None,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attn = MultiHeadSelfAttention(d_model, num_heads, max_seq_len, theta, device, dtype)
        self.ffn = SwiGLU(d_model, d_ff, device, dtype)
        self.ln1 = RMSNorm(d_model, device=device, dtype=dtype)
        self.ln2 = RMSNorm(d_model, device=device, dtype=dtype)

    def forward(
        self, x: Float[Tensor, "... t m"], token_positions: Int[Tensor, "... t"] | None = None
    ) -> Float[Tensor, "... t m"]:
        x = x + self.attn(self.ln1(x), token_positions)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Tokens (..., t) to logits (..., t, vocab_size).  `rope_theta` may also be the seventh positional argument.

    Raises TypeError for an eighth one.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        *seventh: float,
        rope_theta: float = 1e4,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if len(seventh) > 1:
            raise TypeError("TransformerLM: only 7 arguments may be positional, the last is rope_theta")
        theta = seventh[0] if seventh else rope_theta
        self.context_length = context_length
        self.token_embeddings = Embedding(vocab_size, d_model, device, dtype)
        sizes = (d_model, num_heads, d_ff, context_length, theta)
        blocks = [TransformerBlock(*sizes, device=device, dtype=dtype) for _ in range(num_layers)]
        for block in blocks[1:]:
            block.attn.rope = blocks[0].attn.rope  # one table for all layers
        self.layers = nn.ModuleList(blocks)
        self.ln_final = RMSNorm(d_model, device=device, dtype=dtype)
        self.lm_head = Linear(d_model, vocab_size, device, dtype)

    def forward(self, in_indices: Int[Tensor, "... t"]) -> Float[Tensor, "... t c"]:
        if in_indices.shape[-1] > self.context_length:
            length = self.context_length
            raise ValueError(f"TransformerLM: at most {length} tokens (context_length) but {in_indices.shape[-1]} came")
        x = self.token_embeddings(in_indices)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.ln_final(x))
