"""The original Abstractor: a stream of symbols that reads objects only through relations (Altabaa et al. 2024).

Objects x (b s m) come from the inputs, optionally through transformer blocks.  Symbols s (1 s m) are learned, one per
position.  A layer has its residual on the symbols:

    s = norm(s + self_attention(s))                                       if `self_attention`
    s = norm(s + W_out sum_j act(q(x_i) . k(x_j) / sqrt(d)) v(s_j))       relational cross-attention
    s = norm(s + feedforward(s))

So objects influence the output only through inner products.  (The dual-attention experiments put the residual on the
objects instead.)  With `Classes` the model is a classifier; without outputs it returns the abstract states (b s m).
"""

from typing import Unpack

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead.config import Abstractor as RelationalCrossAttention, AbstractorConfig, Softmax
from polyhead.layers.attention import MultiHeadAttention
from polyhead.layers.block import TransformerBlock
from polyhead.layers.device import Placement
from polyhead.layers.feedforward import MlpLayer
from polyhead.layers.norms import LayerNorm
from polyhead.layers.symbols import build_symbols
from polyhead.layers.taps import Taps
from polyhead.models.initialise import initialise
from polyhead.models.inputs_outputs import build_input, build_output, check_mask
from polyhead.spec.shapes import shaped

# The preset of its initial parameters, also as the encoder of a model with another one.
PRESET = "cs336"


class AbstractorModel(nn.Module):
    """Symbols that read the relations of objects; a classifier, or an encoder for a decoder.

    >>> AbstractorModel(AbstractorConfig(Vectors(8), dim=32))(torch.randn(5, 10, 8)).shape
    torch.Size([5, 10, 32])
    """

    def __init__(self, settings: AbstractorConfig, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config = settings
        self.inputs = build_input(settings.inputs, settings.dim, **placement)
        self.blocks = nn.ModuleList()
        for _ in range(settings.encoder_layers):
            self.blocks.append(_block(settings, **placement))
        length = settings.max_length
        self.symbols = build_symbols(settings.symbols, settings.dim, max_length=length, **placement)
        self.layers = nn.ModuleList()
        for _ in range(settings.layers):
            self.layers.append(AbstractorLayer(settings, **placement))
        self.dropout = nn.Dropout(settings.dropout)
        self.outputs: nn.Module | None = None
        if settings.outputs is not None:
            self.outputs = build_output(settings.outputs, self.inputs, settings.dim, **placement)
        initialise(self, PRESET)

    @shaped
    def forward(
        self,
        inputs: Float[Tensor, "b s _"] | Int[Tensor, "b s"] | Float[Tensor, "b _ _ _"],
        mask: Bool[Tensor, "b s"] | None = None,
        *,
        taps: list[Taps] | None = None,
    ) -> Float[Tensor, "b _ _"]:
        """Logits (b 1 c), or the abstract states (b s m); `mask` is True at real objects.

        Args:
            taps: Collects the Taps of each layer's relational cross-attention.
        """
        x = self.inputs(inputs)
        check_mask("AbstractorModel", "mask (b s)", mask, x)
        keys = None
        if mask is not None:
            keys = mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask=keys)
        # The first state of the stream (b s m); symbols of positions (1 s m) are the same for all samples.
        s = self.dropout(self.symbols(x, mask=mask).expand(x.shape[0], -1, -1))
        for layer in self.layers:
            s = layer(s, x, mask=keys, taps=taps)
        if self.outputs is None:
            return s
        return self.outputs(s, mask)


class AbstractorLayer(nn.Module):
    """One layer: `s` (b s m), the stream of symbols, reads the relations of the objects `x` (b s m)."""

    self_attention: MultiHeadAttention | None

    def __init__(self, settings: AbstractorConfig, **placement: Unpack[Placement]) -> None:
        super().__init__()
        dim, act = settings.dim, settings.act
        width = settings.head_dim or dim
        relational = RelationalCrossAttention(settings.heads, dim=width, value_dim=width, act=act)
        self.self_attention = None
        if settings.self_attention:
            self.self_attention = _attention(settings, Softmax(settings.heads, width, width), **placement)
            self.norm0 = LayerNorm(dim, **placement)
        self.relational_attention = _attention(settings, relational, **placement)
        self.norm1 = LayerNorm(dim, **placement)
        self.feedforward = _feedforward(settings, **placement)
        self.norm2 = LayerNorm(dim, **placement)
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self,
        s: Float[Tensor, "b s m"],
        x: Float[Tensor, "b s m"],
        *,
        mask: Bool[Tensor, "..."] | None = None,
        taps: list[Taps] | None = None,
    ) -> Float[Tensor, "b s m"]:
        if self.self_attention is not None:
            s = self.norm0(s + self.dropout(self.self_attention(s, mask=mask)))
        # Scores compare the objects x; values come from the symbols s, and so does the residual.
        s = self.norm1(s + self.dropout(self.relational_attention(x, mask=mask, symbols=s, taps=taps)))
        return self.norm2(s + self.dropout(self.feedforward(s)))


def _attention(
    settings: AbstractorConfig, heads: Softmax | RelationalCrossAttention, **placement: Unpack[Placement]
) -> MultiHeadAttention:
    """Attention with biases, as in the authors' code; the caller passes symbols."""
    return MultiHeadAttention(
        settings.dim,
        [heads],
        bias=True,
        dropout=settings.dropout,
        max_length=settings.max_length,
        own_symbols=False,
        **placement,
    )


def _feedforward(settings: AbstractorConfig, **placement: Unpack[Placement]) -> MlpLayer:
    hidden = settings.hidden or 2 * settings.dim
    return MlpLayer(settings.dim, hidden, act="relu", **placement)


def _block(settings: AbstractorConfig, **placement: Unpack[Placement]) -> TransformerBlock:
    """A block of the encoder before the Abstractor's layers."""
    width = settings.head_dim or settings.dim
    return TransformerBlock(
        _attention(settings, Softmax(settings.heads, width, width), **placement),
        _feedforward(settings, **placement),
        norm_order="post",
        dropout=settings.dropout,
        **placement,
    )
