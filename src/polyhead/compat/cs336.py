"""Stanford CS336, assignment 1: its state dict, and its names and signatures over our functions.

    load / save     a state dict of the course  <->  polyhead.Transformer
    TransformerLM   and its parts: modules with the course's signatures and keys, computed by polyhead.ops.textbook

The course's conventions: no biases; rows of q, k and v are head by head; rotary positions count from 0 and rotate pairs
(2j, 2j + 1); a mask is True where a query may attend; RMSNorm has eps 1e-5 inside the root; blocks are pre-norm;
attention is causal; the output table is not tied to the input table.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead.compat.mapping import TensorMapping, check_functions, fill, of_linear, tensor_of, uncompiled
from polyhead.config import Logits, Rotary, Softmax, Swiglu, Tokens, TransformerConfig, total_heads
from polyhead.layers.device import Device, Placement
from polyhead.layers.feedforward import swiglu_width
from polyhead.models.transformer import Transformer
from polyhead.ops import textbook
from polyhead.ops.readable import is_cheap_to_read
from polyhead.ops.rope import check_even, check_range, check_shape
from polyhead.ops.textbook import scaled_dot_product_attention, silu, softmax  # noqa: F401 (the course's names)
from polyhead.spec.shapes import check_number, shaped

Dtype = torch.dtype | None
TABLE, UP = "token_embeddings.weight", "layers.0.ffn.w1.weight"


# ---------------------------------------------------------------------------------------------------------- checkpoints
def load(state_dict: Mapping[str, Any], *, heads: int, theta: float, context: int) -> Transformer:
    """Return the course's state dict as a `polyhead.Transformer`, on the device and in the dtype of its token table.

    Layers, widths and vocabulary are read from the shapes.  The number of heads, the rotary theta and the context
    length are arguments, because no tensor has them.

    Args:
        state_dict: Tensors, or arrays of NumPy.  Prefixes of torch.compile (`_orig_mod.`) and of
            DistributedDataParallel (`module.`) are removed.

    Raises:
        ValueError: For missing or unknown keys and for shapes that do not match, which the message names, and for a
            whole checkpoint.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"cs336.load: a state dict must come, got a {type(state_dict).__name__}")
    for name, value in state_dict.items():
        if isinstance(value, Mapping) and any(str(key).endswith(TABLE) for key in value):
            raise ValueError(f"cs336.load: a state dict must come, got a whole checkpoint; give its entry {name!r}")
    named = uncompiled(state_dict)
    if all(key.startswith("module.") for key in named):
        named = {key.removeprefix("module."): value for key, value in named.items()}
    state = {}
    for key, value in named.items():
        if not isinstance(value, Tensor):
            value = tensor_of(f"cs336.load: {key}", value)
        state[key] = value.detach()
    for key in (TABLE, UP):
        if key not in state:
            raise ValueError(f"cs336.load: missing {key}")
        if state[key].ndim != 2 or not state[key].is_floating_point():
            raise ValueError(f"cs336.load: {key} must be a floating matrix, got {state[key].dtype} {state[key].shape}")

    # "layers.3.attn.q_proj.weight": the second part is the number of the layer.
    layers = set()
    for key in state:
        if key.startswith("layers.") and key.count(".") > 1:
            layers.add(key.split(".")[1])
    table = state[TABLE]
    vocabulary, dim = table.shape
    settings = course_config(vocabulary, dim, len(state[UP]), len(layers), heads, theta=theta, context=context)
    model = Transformer(settings, device="meta", dtype=table.dtype).to_empty(device=table.device)
    fill("cs336.load", model, _mappings(len(layers), dim), state)
    return model


def save(model: Transformer) -> dict[str, Tensor]:
    """Return the course's state dict, copied: the inverse of `load`.

    Raises:
        ValueError: For a field that differs from the course's architecture, which the message names, and for heads that
            compute a user's function.
    """
    check_functions("cs336.save", model)
    config = model.config
    course = course_config(
        getattr(config.inputs, "count", 1),
        config.dim,
        getattr(config.feedforward, "hidden", None),
        config.layers,
        total_heads(config.layer_heads(0)),
        theta=getattr(config.positions, "theta", 1e4),
        context=config.max_length,
    )
    expected, settings = _of_the_format(course), _of_the_format(config)
    for field in dataclasses.fields(expected):
        value, setting = getattr(expected, field.name), getattr(settings, field.name)
        if setting != value:
            raise ValueError(f"cs336.save: {field.name} must be {value} but is {setting}")
    parameters = uncompiled(model.state_dict())
    state = {}
    for mapping in _mappings(config.layers, config.dim):
        state[mapping.keys[0]] = parameters[mapping.names[0]][mapping.index].clone()
    return state


def _of_the_format(settings: TransformerConfig) -> TransformerConfig:
    """The settings with heads by layer, and with defaults for fields that do not belong to the format."""
    heads = []
    for layer in range(settings.layers):
        heads.append(tuple(dataclasses.replace(group, impl="auto") for group in settings.layer_heads(layer)))
    training: dict[str, Any] = {"dropout": 0.0, "dropout_shared": False, "residual_dropout": 0.0, "checkpoint": False}
    return dataclasses.replace(settings, heads=tuple(heads), init="cs336", **training)


def course_config(
    count: int, dim: int, hidden: int | None, layers: int, heads: int, *, theta: float, context: int
) -> TransformerConfig:
    """Return our configuration of the course's model."""
    if not isinstance(heads, int) or heads < 1 or dim % heads:
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


def _mappings(layers: int, dim: int) -> list[TensorMapping]:
    """The course's tensors as parts of ours: those of q, k and v are rows of one matrix."""
    names = {"token_embeddings": "inputs.table", "ln_final": "norm", "lm_head": "outputs.linear"}
    mappings: list[TensorMapping] = []
    for i in range(layers):
        block, course = f"blocks.{i}", f"layers.{i}"
        for j, part in enumerate("qkv"):
            key, rows = f"{course}.attn.{part}_proj", slice(j * dim, (j + 1) * dim)
            mappings.extend(of_linear(key, name=f"{block}.attention.qkv", bias=False, rows=rows))
        names[f"{course}.attn.output_proj"] = f"{block}.attention.out"
        for n in "12":
            names[f"{course}.ln{n}"] = f"{block}.norm{n}"
        for n in "123":
            names[f"{course}.ffn.w{n}"] = f"{block}.feedforward.w{n}"
    for key, name in names.items():
        mappings.extend(of_linear(key, name=name, bias=False))
    return mappings


# ---------------------------------------------------------------------------------------------------------------- parts
class Linear(nn.Module):
    """`x W^T`, no bias; N(0, 2 / (in + out)) truncated at three standard deviations."""

    def __init__(self, in_features: int, out_features: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        std = (2.0 / (in_features + out_features)) ** 0.5
        nn.init.trunc_normal_(self.weight, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... f"]:
        return x @ self.weight.T


class Embedding(nn.Module):
    """A row of the table for each token; N(0, 1) truncated at three."""

    def __init__(self, num_embeddings: int, embedding_dim: int, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        nn.init.trunc_normal_(self.weight, a=-3.0, b=3.0)

    @shaped
    def forward(self, token_ids: Int[Tensor, "..."]) -> Float[Tensor, "... m"]:
        if is_cheap_to_read(token_ids) and token_ids.numel():
            for token in map(int, token_ids.aminmax()):
                if not 0 <= token < len(self.weight):
                    raise ValueError(f"Embedding: tokens must be in [0, {len(self.weight)}), got {token}")
        return self.weight[token_ids]


class RMSNorm(nn.Module):
    """`textbook.rms_norm` and its gain."""

    def __init__(self, d_model: int, eps: float = 1e-5, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        check_number("RMSNorm", "eps", eps, 0)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return textbook.rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """`w2(silu(w1 x) * w3 x)`; `d_ff` defaults to the multiple of 64 nearest to 8/3 d_model."""

    def __init__(self, d_model: int, d_ff: int | None = None, device: Device = None, dtype: Dtype = None) -> None:
        super().__init__()
        if d_ff is None:
            d_ff = swiglu_width(d_model)
        self.w1 = Linear(d_model, d_ff, device, dtype)
        self.w2 = Linear(d_ff, d_model, device, dtype)
        self.w3 = Linear(d_model, d_ff, device, dtype)

    def forward(self, x: Float[Tensor, "... m"]) -> Float[Tensor, "... m"]:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class RotaryPositionalEmbedding(nn.Module):
    """Rotates x (..., t, d_k) by `token_positions` (..., t), which broadcast; interleaved pairs, no parameters.

    Angles are computed at each call.  No table is stored, so `device` has no effect.
    """

    def __init__(self, theta: float, d_k: int, max_seq_len: int, device: Device = None) -> None:
        super().__init__()
        check_even("RotaryPositionalEmbedding", d_k)
        check_number("RotaryPositionalEmbedding", "theta", theta, 0, above=True)
        self.theta = theta
        self.d_k = d_k
        self.max_seq_len = max_seq_len

    def forward(self, x: Float[Tensor, "... d"], token_positions: Int[Tensor, "..."]) -> Float[Tensor, "... d"]:
        if x.shape[-1] != self.d_k:
            raise ValueError(f"RotaryPositionalEmbedding: x must be (..., t, {self.d_k}) but is {tuple(x.shape)}")
        check_shape("RotaryPositionalEmbedding", token_positions, tuple(x.shape[:-1]))
        check_range("RotaryPositionalEmbedding", token_positions, self.max_seq_len, "max_seq_len")
        return textbook.rotary(x, token_positions, self.theta)


class MultiHeadSelfAttention(nn.Module):
    """Causal self-attention over x (..., t, d_model); rotary when `max_seq_len` and `theta` are given."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_seq_len: int | None = None,
        theta: float | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        if not isinstance(num_heads, int) or num_heads < 1 or d_model % num_heads:
            raise ValueError(f"MultiHeadSelfAttention: num_heads must divide d_model = {d_model} but is {num_heads}")
        if (max_seq_len is None) != (theta is None):
            raise ValueError("MultiHeadSelfAttention: rotary positions need both max_seq_len and theta")
        if theta is not None:
            check_even("MultiHeadSelfAttention", d_model // num_heads)
            check_number("MultiHeadSelfAttention", "theta", theta, 0, above=True)
        self.num_heads = num_heads
        self.max_seq_len = max_seq_len
        self.theta = theta
        self.q_proj = Linear(d_model, d_model, device, dtype)
        self.k_proj = Linear(d_model, d_model, device, dtype)
        self.v_proj = Linear(d_model, d_model, device, dtype)
        self.output_proj = Linear(d_model, d_model, device, dtype)

    def forward(
        self, x: Float[Tensor, "... t m"], token_positions: Int[Tensor, "... t"] | None = None
    ) -> Float[Tensor, "... t m"]:
        if self.theta is None and token_positions is not None:
            raise ValueError("MultiHeadSelfAttention: token_positions need max_seq_len and theta")
        rotation: tuple[Any, ...] = ()
        if self.theta is not None:
            if token_positions is None:
                token_positions = torch.arange(x.shape[-2], device=x.device)
            if token_positions.shape[-1:] != x.shape[-2:-1]:
                raise ValueError(
                    f"MultiHeadSelfAttention: token_positions must be (..., {x.shape[-2]}) "
                    f"but are {tuple(token_positions.shape)}"
                )
            check_shape("MultiHeadSelfAttention", token_positions, tuple(x.shape[:-1]))
            check_range("MultiHeadSelfAttention", token_positions, self.max_seq_len, "max_seq_len")
            rotation = (token_positions, self.theta)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.output_proj(textbook.causal_heads(q, k, v, self.num_heads, *rotation))


class TransformerBlock(nn.Module):
    """`x + attn(ln1(x))`, then `x + ffn(ln2(x))`."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        max_seq_len: int | None = None,
        theta: float | None = None,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.attn = MultiHeadSelfAttention(d_model, num_heads, max_seq_len, theta, **placement)
        self.ffn = SwiGLU(d_model, d_ff, **placement)
        self.ln1 = RMSNorm(d_model, **placement)
        self.ln2 = RMSNorm(d_model, **placement)

    def forward(
        self, x: Float[Tensor, "... t m"], token_positions: Int[Tensor, "... t"] | None = None
    ) -> Float[Tensor, "... t m"]:
        x = x + self.attn(self.ln1(x), token_positions)
        return x + self.ffn(self.ln2(x))


class TransformerLM(nn.Module):
    """Tokens (..., t) to logits (..., t, vocab_size)."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        d_model: int,
        num_layers: int,
        num_heads: int,
        d_ff: int,
        rope_theta: float = 1e4,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.context_length = context_length
        self.token_embeddings = Embedding(vocab_size, d_model, **placement)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            block = TransformerBlock(d_model, num_heads, d_ff, context_length, rope_theta, **placement)
            self.layers.append(block)
        self.ln_final = RMSNorm(d_model, **placement)
        self.lm_head = Linear(d_model, vocab_size, **placement)

    def forward(self, in_indices: Int[Tensor, "... t"]) -> Float[Tensor, "... t c"]:
        x = self.token_embeddings(in_indices)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.ln_final(x))
