"""The models of the dual-attention study: dual attention (softmax and relational heads), controls, and relational
baselines, all with as many parameters as dual attention.

The papers (Altabaa and Lafferty 2024, "Disentangling and integrating relational and sensory information"; Altabaa,
Webb, Cohen, Lafferty 2024, "Abstractors") compare dual attention with softmax heads without relative positions.  Our
controls are softmax heads with relative positions.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

from polyhead import config
from polyhead.config import Classes, Input, Mechanism, Model, Output, Position, Softmax, TransformerConfig
from polyhead.models.size import match, parameters
from polyhead.papers.sizes import Scale
from polyhead.papers.study import ModelRow, Paper
from polyhead.spec.shapes import one_of
from polyhead.tasks import Images

# Inputs, outputs and length of a model.
Ends = tuple[Input, Any, int]

# The largest relative difference of the number of parameters from that of dual attention.
CLOSE = 0.01


# Name -> model.
ROWS: dict[str, ModelRow] = {
    "dual": ModelRow(
        "Dual attention", choice="half of the heads are softmax, half relational, one relation per relational head"
    ),
    "dual-package": ModelRow(
        "Dual attention, package start", choice="relation weights as small as in the released package"
    ),
    "relational": ModelRow("Relational heads only"),
    "disentangled": ModelRow(
        "Dual attention, disentangled heads",
        choice="the draft's operator in place of relational heads: an attention weight times a relation, which weighs "
        "symbols",
    ),
    "rca": ModelRow(
        "Dual attention, RCA heads", choice="the Abstractor's operator in their place: softmax attention to symbols"
    ),
    "softmax": ModelRow(
        "Softmax", choice="learned absolute positions and nothing else tells where a token is, as in the papers"
    ),
    "softmax-rope": ModelRow("Softmax + RoPE", choice="our control: relative positions, in place of the learned ones"),
    "softmax-t5": ModelRow(
        "Softmax + T5 bias", choice="our control: one bias per offset and head, in place of learned positions"
    ),
    "corelnet": ModelRow("CoRelNet"),
    "predinet": ModelRow("PrediNet"),
    "abstractor": ModelRow(
        "Abstractor", choice="the original one, with its residual stream of symbols and softmax relations"
    ),
}


@dataclass(frozen=True)
class Relations:
    """The symbols of heads that relate tokens, and whether their relations are symmetric."""

    symbols: config.SymbolSource = config.PositionSymbols()  # noqa: RUF009 (frozen)
    symmetric: bool = True


# The papers' settings on relational games.
BY_PLACE = Relations()

# The papers' settings on maths and, with symmetric relations, on images.
BY_OFFSET = Relations(config.RelativeSymbols(), symmetric=False)


def heads_of(row: str, shape: Scale, relations: Relations) -> tuple[Mechanism, ...]:
    """The heads of a transformer row, all of one width."""
    relational = config.Relational(symbols=relations.symbols, symmetric=relations.symmetric)
    operators: dict[str, Mechanism] = {
        "dual": relational,
        "dual-package": replace(relational, relation_init="package"),
        "disentangled": config.Disentangled(symbols=relations.symbols, symmetric=relations.symmetric),
        "rca": config.Abstractor(symbols=relations.symbols),
    }
    if row in operators:
        half = shape.heads // 2
        groups = [replace(Softmax(), heads=half), replace(operators[row], heads=shape.heads - half)]
    elif row == "relational":
        groups = [replace(relational, heads=shape.heads)]
    else:
        groups = [Softmax(shape.heads)]
    return tuple(replace(group, dim=shape.head_dim, value_dim=shape.head_dim) for group in groups)


def positions_of(row: str, shape: Scale, length: int) -> Position:
    """Position encodings for sequences of `length`.  A T5 bias with one bucket per offset needs 4 `length` buckets."""
    offsets = config.RelativeBias(4 * length, max_distance=length, bidirectional=True)
    controls: dict[str, Position] = {"softmax-rope": config.Rotary(), "softmax-t5": offsets}
    return controls.get(row, shape.positions)


@functools.cache
def classifier(ends: Ends, row: str, shape: Scale, relations: Relations) -> Model:
    """The model `row` that classifies, with as many parameters as dual attention."""
    one_of("recipes", "model", row, ROWS)
    inputs, outputs, length = ends
    dual = _reader(*ends, "dual", shape, relations)
    target = parameters(dual)
    if row == "predinet":
        predinet = config.PrediNetConfig(inputs, outputs, shape.dim, length, heads=max(shape.dim // 8, 1))
        return match(predinet, target, field="relations", tolerance=CLOSE)
    settings: Model = _reader(*ends, row, shape, relations)
    if row == "corelnet":
        settings = config.CoRelNetConfig(inputs, outputs, shape.dim, length)
    if row == "abstractor":
        settings = _abstractor(inputs, outputs, length, shape)
    if settings == dual:
        return dual
    return match(settings, target, field="hidden", tolerance=CLOSE)


@functools.cache
def writer(source: tuple[Input, int], ends: Ends, row: str, shape: Scale, relations: Relations) -> TransformerConfig:
    """The encoder-decoder model `row`, with as many parameters as dual attention.

    Dual attention has relational heads on both sides; the Abstractor is an encoder, and its decoder a transformer.

    Args:
        source: The encoder's input and length.
        ends: The decoder's input, output and length.
    """
    one_of("recipes", "model", row, ROWS)

    def unmatched(name: str) -> TransformerConfig:
        """The model `name` before its width is matched."""
        encoder: TransformerConfig | config.AbstractorConfig = _abstractor(source[0], None, source[1], shape)
        if name != "abstractor":
            encoder = _reader(source[0], config.Values(), source[1], name, shape, relations)
        return replace(_reader(*ends, name, shape, relations), causal=True, encoder=encoder)

    dual = unmatched("dual")
    if row == "dual":
        return dual
    return match(unmatched(row), parameters(dual), field="hidden", tolerance=CLOSE)


def _reader(
    inputs: Input, outputs: Output, length: int, row: str, shape: Scale, relations: Relations
) -> TransformerConfig:
    """The transformer of a row, before its width is matched."""
    feedforward = config.Swiglu(shape.hidden) if shape.act == "swiglu" else config.Mlp(shape.hidden, shape.act)
    return TransformerConfig(
        inputs=inputs,
        outputs=outputs,
        dim=shape.dim,
        layers=shape.layers,
        heads=heads_of(row, shape, relations),
        feedforward=feedforward,
        positions=positions_of(row, shape, length),
        max_length=length,
        norm_order=shape.norm_order,
        dropout=shape.dropout,
        residual_dropout=shape.dropout,
    )


def _abstractor(inputs: Input, outputs: Classes | None, length: int, shape: Scale) -> config.AbstractorConfig:
    return config.AbstractorConfig(
        inputs=inputs,
        outputs=outputs,
        dim=shape.dim,
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        hidden=shape.hidden,
        max_length=length,
        dropout=shape.dropout,
    )


DUAL = Paper(
    "dual attention",
    ROWS,
    {
        "game": lambda run: getattr(run.task, "game", None),
        "examples": lambda run: getattr(run.task, "examples", None),
        "module": lambda run: getattr(run.task, "module", None),
        "data": lambda run: run.task.data if isinstance(run.task, Images) else None,
    },
)
label = DUAL.label
