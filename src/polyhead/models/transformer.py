"""The one transformer: encoder or causal decoder, any list of heads in every layer.

x = inputs(tokens or vectors) (+ positions);   x = block_1(x) ... block_l(x);   outputs(norm(x))
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead import config
from polyhead.config import TransformerConfig
from polyhead.layers import Device
from polyhead.layers.attention import MultiHeadAttention, Positions, rotary_tables
from polyhead.layers.block import TransformerBlock, build_norm
from polyhead.layers.feedforward import MLP, MixtureOfExperts, SwiGLU
from polyhead.layers.positions import LearnedPositions, SinusoidalPositions
from polyhead.layers.taps import Taps
from polyhead.models.ends import build_input, build_output
from polyhead.models.initialise import initialise
from polyhead.shapes import shaped


class Transformer(nn.Module):
    """Blocks between two ends; encoder or causal decoder, any list of heads in every layer.

    >>> model = Transformer(TransformerConfig(Tokens(100), Logits(100), dim=64, heads=[Softmax(4), Hyla(4)]))
    >>> model(torch.randint(100, (2, 16))).shape
    torch.Size([2, 16, 100])
    """

    def __init__(
        self,
        settings: TransformerConfig,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = settings
        self.inputs = build_input(settings.inputs, settings.dim, device=device, dtype=dtype)
        self.positions = _input_positions(settings, device, dtype)
        shared = _layer_positions(settings, device)
        self.blocks = nn.ModuleList(_block(settings, i, shared, device, dtype) for i in range(settings.layers))
        last = settings.norm_order == "pre"
        norm, eps = settings.norm, settings.norm_eps
        self.norm = build_norm(norm, settings.dim, eps, device=device, dtype=dtype) if last else nn.Identity()
        self.outputs = build_output(settings.outputs, self.inputs, settings.dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill all parameters by the preset `config.init`, from torch's default generator."""
        initialise(self, self.config.init)

    @shaped
    def forward(
        self,
        inputs: Float[Tensor, "b t c"] | Int[Tensor, "b t"],
        *,
        mask: Bool[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "#b t"] | None = None,
        tail: int | None = None,
        keep: Sequence[Tensor | None] | None = None,
        taps: list[Taps] | None = None,
    ) -> Float[Tensor, "b _ _"]:
        """`mask` is True at real tokens, `positions` default to 0, 1, ...; `taps` collects one Taps per layer.

        `tail`: only the last that many positions are wanted, (b tail c); the last layer then computes no others.
        `keep`: for each layer what multiplies its code, (b|1 h|1 t s), instead of its own dropout, or None.
        """
        x = self.inputs(inputs)
        if mask is not None:
            mask = mask[:, None, None, :]
        if self.positions is not None:
            where = torch.arange(x.shape[1], device=x.device)[None] if positions is None else positions
            x = x + self.positions(where).to(x.dtype)
        if tail is not None and not 1 <= tail <= x.shape[1]:
            raise ValueError(f"Transformer: tail must be 1 to {x.shape[1]} (the positions) but is {tail}")
        if keep is not None and len(keep) != len(self.blocks):
            raise ValueError(
                f"Transformer: keep must hold one tensor, or None, a layer: {len(self.blocks)}, not {len(keep)}"
            )
        # Given positions are those of the keys, too: then the last layer computes all, and the end is cut out.
        wanted = tail if positions is None else None
        for i, block in enumerate(self.blocks):
            its_tail, its_keep = wanted if i == len(self.blocks) - 1 else None, None if keep is None else keep[i]
            x = block(x, mask=mask, positions=positions, tail=its_tail, keep=its_keep, taps=taps)
        x = x if tail is None else x[:, -tail:]
        return self.outputs(self.norm(x))

    def auxiliary_loss(self) -> Tensor | float:
        """What the last forward adds to the loss beside the task's: the load balance of mixtures of experts, else 0."""
        if not isinstance(self.config.feedforward, config.Experts):
            return 0.0
        losses = [m.balance_loss for m in self.modules() if isinstance(m, MixtureOfExperts)]
        total = torch.stack([loss for loss in losses if loss is not None]).sum()
        return self.config.feedforward.balance * total


def _input_positions(
    settings: TransformerConfig, device: Device, dtype: torch.dtype | None
) -> LearnedPositions | SinusoidalPositions | None:
    if isinstance(settings.positions, config.Learned):
        return LearnedPositions(settings.max_length, settings.dim, device=device, dtype=dtype)
    if isinstance(settings.positions, config.Sinusoidal):
        return SinusoidalPositions(settings.max_length, settings.dim, device=device, dtype=dtype)
    return None


def _layer_positions(settings: TransformerConfig, device: Device) -> Positions:
    """What every layer gets: rotary tables made once and shared; a relative bias is each layer's own."""
    positions = settings.positions
    if isinstance(positions, config.Rotary):
        layers = [settings.layer_heads(i) for i in range(settings.layers)]
        theta, layout, length = positions.theta, positions.layout, settings.max_length
        return rotary_tables(layers, settings.dim, theta=theta, layout=layout, max_length=length, device=device)
    return positions if isinstance(positions, (config.RelativeBias, config.Alibi)) else None


def _block(
    settings: TransformerConfig,
    layer: int,
    positions: Positions,
    device: Device,
    dtype: torch.dtype | None,
) -> TransformerBlock:
    attention = MultiHeadAttention(
        settings.dim,
        settings.layer_heads(layer),
        causal=settings.causal,
        positions=positions,
        bias=settings.bias,
        qk_norm=settings.qk_norm,
        dropout=settings.dropout,
        dropout_shared=settings.dropout_shared,
        max_length=settings.max_length,
        device=device,
        dtype=dtype,
    )
    return TransformerBlock(
        attention,
        _feedforward(settings, device, dtype),
        norm=settings.norm,
        norm_eps=settings.norm_eps,
        norm_order=settings.norm_order,
        dropout=settings.residual_dropout,
        device=device,
        dtype=dtype,
    )


def _feedforward(
    settings: TransformerConfig, device: Device, dtype: torch.dtype | None
) -> MLP | SwiGLU | MixtureOfExperts:
    kind, dim = settings.feedforward, settings.dim
    if isinstance(kind, config.Swiglu):
        return SwiGLU(dim, kind.hidden, device=device, dtype=dtype)
    if isinstance(kind, config.Experts):
        return MixtureOfExperts(
            *(dim, kind.experts, kind.top_k, kind.hidden),
            act=kind.act,
            bias=kind.bias,
            device=device,
            dtype=dtype,
        )
    return MLP(dim, kind.hidden, act=kind.act, bias=kind.bias, device=device, dtype=dtype)
