"""The table of mechanisms: what each computes, as an equation, axes and words.

Tests hold the PyTorch ops, the JAX ops, the converters and the docs to this table.  It imports neither torch nor jax.

A hidden pair has the score -inf before a softmax, otherwise 0; its code is exactly 0.  A query without a visible key
gives an output of exactly 0 and no NaN gradient.  Causal: the last query is aligned with the last key, so key j is
visible to query i when j <= i + s - t.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

NORMALISE = ("softmax", "rms_heads", "identity", "softmax_rms_heads", "softmax_heads")
"""How scores become the code.  softmax: over keys.  rms_heads: divided by the root mean square over the heads of a
group.  identity: no normalisation.  softmax_rms_heads: softmax over keys, then rms over heads.  softmax_heads: softmax
over the heads of a group (ours, in no paper).  C++ counts them in this order (ops/native/pairs.h)."""

SOFTMAX_AXIS = {"softmax": "s", "softmax_rms_heads": "s", "softmax_heads": "h"}
"""The axis of the softmax, for the values of `normalise` that have one."""

ACTS = ("identity", "relu", "gelu", "gelu_tanh", "silu")
"""Names of pointwise activations: for values of linear attention, value networks of HYLA, feed-forward layers."""

RELATION_ACTS = ("identity", "relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "softmax")
"""Activations of relations and of the Abstractor's scores: pointwise, or softmax over the visible keys.
C++ counts them in this order (ops/native/acts.h)."""

POOLS = ("max", "mean", "sum")
"""How pooled heads bring the visible keys of a query together."""

NETWORKS = ("pair", "query", "sequence")
"""What has a value network of its own in pooled heads.  pair: each pair of query and key, as in HYLA.  query: each
query; its first layer reads the keys.  sequence: the whole sequence; one code chooses the operation of all queries."""

RELATION_INIT = ("balanced", "paper", "package")
"""Initialisations of the map from relations to a head's output."""

LAYOUTS = ("interleaved", "half")
"""Which components of a vector the rotary embedding rotates as a pair: (2j, 2j + 1), or (j, j + d/2)."""

NORMS = ("layer", "rms")
"""Norms of a transformer: LayerNorm, RMSNorm."""

NORM_ORDERS = ("pre", "post")
"""Where a block has its norms: before attention and feed-forward layer, or after their sum with the stream."""

PRESETS = ("hyla", "cs336")
"""Initialisations of a model: that of the HYLA paper's code, that of the course."""

RMS_HEADS_EPS = 1e-6
"""Added inside the root of the mean square over heads; no gain (Schug et al., code: Flax RMSNorm without scale)."""

AXES = {
    "q": "b t h d",
    "k": "b s g d",
    "v": "b s g e",
    "symbols": "b s g e, or by offset: t+s-1 g e (row j - i + t - 1 is the symbol of key j for query i)",
    "q_rel": "b t r p",
    "k_rel": "b s r p",
    "relation_weight": "h e r",
    "value_weight": "h e e",
    "bias": "b|1 h|1 t s, or by offset: h t+s-1 (column j - i + t - 1 is key j for query i)",
    "mask": "broadcasts to b h t s; True where attention is allowed",
    "keep": "b|1 h|1 t s; 0 or 1 / (1 - rate), multiplies the code",
    "scores": "b h t s",
    "code": "b h t s",
    "rel": "b r t s",
    "out": "b t h e",
}
"""Name of an array -> its axes, in the letters of shapes.LETTERS.  Query head i reads key/value head i // (h / g)."""

COMMON: dict[str, object] = {
    "bias": None,
    "mask": None,
    "causal": False,
    "window": None,
    "cu_seqlens": None,
    "scale": None,
    "keep": None,
    "impl": "auto",
}
"""Keyword arguments that every mechanism takes, with defaults; `scale` None means d ** -0.5."""

PROJECTIONS = {
    "qkv.weight": "(h d + g d + g e) m",
    "qkv.bias": "(h d + g d + g e)",
    "out.weight": "m (h e)",
    "out.bias": "m",
}
"""Parameters of a layer with one group of heads: name in the state dict -> axes [out, in]; those in brackets are
flattened.  Rows are queries, keys, values, head by head; a group of symbols has only queries and keys, and `VALUES`."""

VALUES = {"value.weight": "(g e) m", "value.bias": "(g e)"}
"""The map from symbols to values, for a group that reads symbols."""


@dataclass(frozen=True)
class MechanismRow:
    """One row of the table of mechanisms; `amount` evaluates `size` and `work`.

    Attributes:
        op: The name of its function.
        tensors: The tensor arguments of the function in order, all of one dtype, with their axes.
        size: Parameters of one head with its projections, without biases.
        work: Multiply-adds of one head for one token that attends to s keys.
        parameters: Name in the group -> axes as in `PROJECTIONS`, and after a semicolon a condition or a note.
        options: Other arguments of the function beside `COMMON`, with defaults.
        optional: Tensor arguments that may be absent, with their axes.
        torch_only: Arguments that the function does not have in JAX, by default None.
    """

    op: str
    config: str
    summary: str
    equation: str
    normalise: str
    tensors: dict[str, str]
    size: str
    work: str
    source: str
    parameters: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)
    torch_only: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The name of its folder in ops/."""
        return self.op.removesuffix("_attention")

    @property
    def reads_symbols(self) -> bool:
        """Whether its values are symbols."""
        return "symbols" in self.tensors

    @property
    def layer(self) -> dict[str, str]:
        """Parameters of a layer with one such group and biases: name in the state dict -> axes as in `PROJECTIONS`."""
        rows, of_group = "h d + g d + g e", dict(self.parameters)
        if self.reads_symbols:  # values have a projection of their own
            rows, of_group = "h d + g d", {**self.parameters, **VALUES}
        axes = {**PROJECTIONS, "qkv.weight": f"({rows}) m", "qkv.bias": f"({rows})"}
        for name, text in of_group.items():
            axes[f"groups.0.{name}"] = text.partition(";")[0]
        return axes

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """The allowed values of its options."""
        kinds = {"normalise": NORMALISE, "act": ACTS, "relation_act": RELATION_ACTS}
        kinds |= {"pool": POOLS, "network": NETWORKS}
        choices = {}
        for name, default in self.options.items():
            choices[name] = kinds[name]
            # An option with this default acts on scores, as a relation's does, so it has the same choices.
            if default == "softmax":
                choices[name] = RELATION_ACTS
        return choices


def _axes(*names: str) -> dict[str, str]:
    return {name: AXES[name].partition(",")[0] for name in names}


QKV = _axes("q", "k", "v")
MECHANISMS = (
    MechanismRow(
        op="softmax_attention",
        config="Softmax",
        summary="each head mixes values with weights that sum to one over the keys",
        equation="y_t = sum_h W_out_h sum_s a_hts v_sh,   a = softmax_s(q_th . k_sh / sqrt(d))",
        normalise="softmax",
        tensors=QKV,
        size="2 m (d + e)",
        work="2 m (d + e) + s (d + e)",
        source="Vaswani et al. 2017, eq. 1",
        torch_only=("softcap", "sinks"),
    ),
    MechanismRow(
        op="linear_attention",
        config="Linear",
        summary="the same sum with unnormalised scores: O(t) time and memory when nothing is added to them",
        equation="y_t = sum_h W_out_h sum_s a_hts act(v_sh),   a = q_th . k_sh / sqrt(d)",
        normalise="identity",
        tensors=QKV,
        options={"normalise": "identity", "act": "identity"},
        size="2 m (d + e)",
        work="2 m (d + e) + 2 d e",
        source="Schug et al., eq. 3 without the softmax",
    ),
    MechanismRow(
        op="hyla",
        config="Hyla",
        summary="the latent code of each query-key pair picks its two-layer value network",
        equation="y_t = sum_s (sum_h a_hts W_out_h) act(sum_h a_hts v_sh),   a = rms_heads(q_th . k_sh / sqrt(d))",
        normalise="rms_heads",
        tensors=QKV,
        options={"normalise": "rms_heads", "act": "relu"},
        optional=_axes("value_weight"),
        parameters={"value_weight": "h e e; head, out, in: eq. 10, where value_depth is 2"},
        size="2 m (d + e)",
        work="2 m (d + e) + s (d + 2 e)",
        source="Schug et al., eq. 6",
    ),
    MechanismRow(
        op="relational_attention",
        config="Relational",
        summary="heads retrieve symbols and, weighted alike, r relations of the pair: nothing of what a sender holds",
        equation="y_t = sum_h W_out_h (sum_s a_hts symbol_sh + W_rel_h sum_s a_hts rel_ts),   a as in Softmax,   "
        "rel_tsr = act(q_rel_tr . k_rel_sr / sqrt(p))",
        normalise="softmax",
        tensors=_axes("q", "k", "q_rel", "k_rel", "symbols", "relation_weight"),
        options={"relation_act": "identity"},
        parameters={
            "q_rel.weight": "(r p) m; shared by the heads",
            "k_rel.weight": "(r p) m; unless symmetric",
            "relation_weight": "h e r",
        },
        size="2 m (d + e) + 2 m r p / h + e r",
        work="2 m (d + e) + 2 m r p / h + e r + s (d + e + r + r p / h)",
        source="Altabaa and Lafferty 2024",
    ),
    MechanismRow(
        op="disentangled_attention",
        config="Disentangled",
        summary="attention selects, a relation of the head's own multiplies the symbol that is selected",
        equation="y_t = sum_h W_out_h sum_s a_hts rel_hts symbol_sh,   a as in Softmax,   "
        "rel_hts = act(q_rel_th . k_rel_sh / sqrt(p))",
        normalise="softmax",
        tensors={**_axes("q", "k"), "q_rel": "b t h p", "k_rel": "b s g p", **_axes("symbols")},
        options={"relation_act": "identity"},
        parameters={"q_rel.weight": "(h p) m", "k_rel.weight": "(g p) m; unless symmetric"},
        size="2 m (d + e) + 2 m p",
        work="2 m (d + e) + 2 m p + s (d + e + p)",
        source="an earlier draft of Altabaa and Lafferty 2024",
    ),
    MechanismRow(
        op="abstractor_attention",
        config="Abstractor",
        summary="attention whose values are symbols: softmax over the keys, or any activation of the scores",
        equation="y_t = sum_h W_out_h sum_s act(q_th . k_sh / sqrt(d)) symbol_sh",
        normalise="softmax",
        tensors=_axes("q", "k", "symbols"),
        options={"act": "softmax"},
        size="2 m (d + e)",
        work="2 m (d + e) + s (d + e)",
        source="Altabaa et al. 2024",
    ),
    MechanismRow(
        op="pooled_attention",
        config="Pooled",
        summary="HYLA with another pooling of the keys: a value network of each pair, query or sequence",
        equation="y_t = sum_h W_out_h pool_s a_hts act(sum_h a_hts v_sh),   a as in Hyla",
        normalise="rms_heads",
        tensors=QKV,
        options={"normalise": "rms_heads", "act": "relu", "pool": "max", "network": "pair"},
        size="2 m (d + e)",
        work="2 m (d + e) + s (d + 2 e)",
        source="Schug et al., section 7, in words",
    ),
)


def mechanism(op: str) -> MechanismRow:
    """The row of the mechanism whose function has that name."""
    return next(row for row in MECHANISMS if row.op == op)


def amount(formula: str, sizes: Mapping[str, int]) -> int:
    """The value of a formula of this table, such as a head's `size`; a space between two factors means multiplication.

    >>> amount("2 m (d + e) + e r", {"m": 100, "d": 3, "e": 5, "r": 2})
    1610
    """
    # Fractions keep a quotient such as r p / h exact, so only the result is rounded.
    value = _value(ast.parse(re.sub(r"(?<=[\w)]) (?=[\w(])", "*", formula), mode="eval").body, sizes)
    return round(value)


def shape(axes: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a parameter of this table.

    >>> shape("(h d + g d + g e) m", {"h": 8, "g": 2, "d": 4, "e": 5, "m": 32})
    (50, 32)
    """
    lengths = []
    for formula, letter in re.findall(r"\(([^)]*)\)|(\w)", axes):  # an axis is a formula in parentheses, or a letter
        lengths.append(amount(formula or letter, sizes))
    return tuple(lengths)


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Fraction:
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, sizes), _value(node.right, sizes)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Mult):
            return left * right
        return left / right
    if isinstance(node, ast.Name):
        return Fraction(sizes[node.id])
    return Fraction(ast.literal_eval(node))
