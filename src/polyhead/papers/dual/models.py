"""The models of the dual-attention study: dual attention (softmax and relational heads), controls, and relational
baselines, all with as many parameters as dual attention.

The papers (Altabaa and Lafferty 2024, "Disentangling and integrating relational and sensory information"; Altabaa,
Webb, Cohen, Lafferty 2024, "Abstractors") compare dual attention with softmax heads without relative positions.  Our
controls are softmax heads with relative positions.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from polyhead import config
from polyhead.config import Classes, Input, Mechanism, Model, Output, Position, Run, Softmax, TransformerConfig
from polyhead.models.size import match, parameters
from polyhead.papers.sizes import Scale
from polyhead.papers.study import Axis, Paper
from polyhead.spec.shapes import one_of
from polyhead.tasks import Images

# Inputs, outputs and length of a model.
Ends = tuple[Input, Any, int]

# The largest relative difference of the number of parameters from that of dual attention.
CLOSE = 0.01


@dataclass(frozen=True)
class ModelLabel:
    """The label of a model, and our choice where the papers are silent."""

    label: str
    choice: str = ""


# Name -> model.
ROWS: dict[str, ModelLabel] = {
    "dual": ModelLabel(
        "Dual attention", "half of the heads are softmax, half relational, one relation per relational head"
    ),
    "dual-package": ModelLabel("Dual attention, package start", "relation weights as small as in the released package"),
    "relational": ModelLabel("Relational heads only"),
    "disentangled": ModelLabel(
        "Dual attention, disentangled heads",
        "the draft's operator in place of relational heads: an attention weight times a relation, which weighs symbols",
    ),
    "rca": ModelLabel(
        "Dual attention, RCA heads", "the Abstractor's operator in their place: softmax attention to symbols"
    ),
    "softmax": ModelLabel(
        "Softmax", "learned absolute positions and nothing else tells where a token is, as in the papers"
    ),
    "softmax-rope": ModelLabel("Softmax + RoPE", "our control: relative positions, in place of the learned ones"),
    "softmax-t5": ModelLabel(
        "Softmax + T5 bias", "our control: one bias per offset and head, in place of learned positions"
    ),
    "corelnet": ModelLabel("CoRelNet"),
    "predinet": ModelLabel("PrediNet"),
    "abstractor": ModelLabel(
        "Abstractor", "the original one, with its residual stream of symbols and softmax relations"
    ),
}

# The rows of which half of the heads are softmax heads.
HALVES = ("dual", "dual-package", "disentangled", "rca")

# The labels of symbol sources.
SYMBOLS: dict[str, config.SymbolSource] = {
    "by place": config.PositionSymbols(),
    "by offset": config.RelativeSymbols(),
    "library": config.SymbolicAttention(),
    "by neighbours": config.RelationalSymbols(),
}


@dataclass(frozen=True)
class Relations:
    """Settings of relational heads: symbol source, number of relations (None: one per head), initialisation."""

    symbols: config.SymbolSource = config.PositionSymbols()  # noqa: RUF009 (frozen)
    symmetric: bool = True
    relations: int | None = None
    start: str = "balanced"

    def heads(self, softmax: int, relational: int, dim: int, row: str = "dual") -> tuple[Mechanism, ...]:
        """Groups of softmax heads and of those of `row`, all of width `dim`, without empty groups."""
        operators: dict[str, Mechanism] = {
            "disentangled": config.Disentangled(symbols=self.symbols, symmetric=self.symmetric),
            "rca": config.Abstractor(symbols=self.symbols),
        }
        heads = config.Relational(symbols=self.symbols, symmetric=self.symmetric, relations=self.relations)
        operator = operators.get(row, replace(heads, relation_init=self.start))
        groups = []
        for group, count in ((Softmax(), softmax), (operator, relational)):
            if count:
                groups.append(replace(group, heads=count, dim=dim, value_dim=dim))
        return tuple(groups)


# The papers' settings on relational games.
BY_PLACE = Relations()

# The papers' settings on maths and, with symmetric relations, on images.
BY_OFFSET = Relations(config.RelativeSymbols(), symmetric=False)


def heads_of(row: str, shape: Scale, relations: Relations) -> tuple[Mechanism, ...]:
    """The heads of a transformer row."""
    if row == "dual-package":
        relations = replace(relations, start="package")
    softmax = {**dict.fromkeys(HALVES, shape.heads // 2), "relational": 0}.get(row, shape.heads)
    return relations.heads(softmax, shape.heads - softmax, shape.head_dim, row)


def positions_of(row: str, shape: Scale, length: int) -> Position:
    """Position encodings for sequences of `length`.  A T5 bias with one bucket per offset needs 4 `length` buckets."""
    offsets = config.RelativeBias(4 * length, max_distance=length, bidirectional=True)
    controls: dict[str, Position] = {"softmax-rope": config.Rotary(), "softmax-t5": offsets}
    return controls.get(row, shape.positions)


@functools.cache
def classifier(ends: Ends, row: str, shape: Scale, relations: Relations, standard: Relations) -> Model:
    """The model `row` that classifies, with as many parameters as dual attention with `standard` relations."""
    one_of("recipes", "model", row, ROWS)
    inputs, outputs, length = ends
    dual = _reader(*ends, "dual", replace(shape, positions=config.Learned()), standard)
    target = parameters(dual)
    if row == "predinet":
        predinet = config.PrediNetConfig(inputs, outputs, shape.dim, length, heads=max(shape.dim // 8, 1))
        return match(predinet, target, field="relations", tolerance=CLOSE)
    settings: Model = _reader(*ends, row, shape, relations)
    if row == "corelnet":
        settings = config.CoRelNetConfig(inputs, outputs, shape.dim, length)
    if row == "abstractor":
        settings = _abstractor(inputs, outputs, length, shape)
    return dual if settings == dual else match(settings, target, field="hidden", tolerance=CLOSE)


@functools.cache
def writer(source: tuple[Input, int], ends: Ends, row: str, shape: Scale, relations: Relations) -> TransformerConfig:
    """The encoder-decoder model `row`, with as many parameters as dual attention.

    `source`: the encoder's input and length; `ends`: the decoder's input, output and length.  Dual attention
    has relational heads in encoder and decoder; the Abstractor is an encoder, and its decoder a transformer.
    """
    one_of("recipes", "model", row, ROWS)

    def whole(name: str) -> TransformerConfig:
        encoder: TransformerConfig | config.AbstractorConfig = _abstractor(source[0], None, source[1], shape)
        if name != "abstractor":
            encoder = _reader(source[0], config.Values(), source[1], name, shape, relations)
        return replace(_reader(*ends, name, shape, relations), causal=True, encoder=encoder)

    dual = whole("dual")
    return dual if row == "dual" else match(whole(row), parameters(dual), field="hidden", tolerance=CLOSE)


def _reader(
    inputs: Input, outputs: Output, length: int, row: str, shape: Scale, relations: Relations
) -> TransformerConfig:
    """The transformer of a row, before its width is matched."""
    return TransformerConfig(
        inputs=inputs,
        outputs=outputs,
        dim=shape.dim,
        layers=shape.layers,
        heads=heads_of(row, shape, relations),
        feedforward=config.Swiglu(shape.hidden) if shape.act == "swiglu" else config.Mlp(shape.hidden, shape.act),
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


# Other models than transformers; operators in place of relational heads; positions of the controls.
RIVALS: dict[type, str] = {
    config.CoRelNetConfig: "corelnet",
    config.PrediNetConfig: "predinet",
    config.AbstractorConfig: "abstractor",
}
OPERATORS: dict[type, str] = {config.Disentangled: "disentangled", config.Abstractor: "rca"}
CONTROLS: dict[type, str] = {config.Rotary: "softmax-rope", config.RelativeBias: "softmax-t5"}


def row_of(run: Run) -> str:
    """The name of the row whose model `run` trains, by its content.  Raises ValueError for a model of no row."""
    for part in (run.model, getattr(run.model, "encoder", None)):
        if type(part) in RIVALS:
            return RIVALS[type(part)]
    settings = encoder_of(run)
    groups, relational = settings.layer_heads(0), relational_of(run)
    if type(groups[-1]) in OPERATORS:
        return OPERATORS[type(groups[-1])]
    if relational is None and all(isinstance(group, Softmax) for group in groups):
        return CONTROLS.get(type(settings.positions), "softmax")
    if relational is None:
        raise ValueError(f"row_of: {run.name} is none of the models of the study")
    if len(groups) == 1:
        return "relational"
    return "dual-package" if relational.relation_init == "package" else "dual"


def encoder_of(run: Run) -> TransformerConfig:
    """The encoder if there is one, else the transformer."""
    encoder = run.transformer.encoder
    if isinstance(encoder, TransformerConfig):
        return encoder
    return run.transformer


def relational_of(run: Run) -> config.Relational | None:
    """The relational heads of the first layer of `encoder_of`; None for a model without them."""
    if isinstance(run.model, TransformerConfig):
        for group in encoder_of(run).layer_heads(0):
            if isinstance(group, config.Relational):
                return group
    return None


def label(model: str) -> str:
    """The label of a model in figures."""
    return ROWS[model].label


# ---------------------------------------------------------------------------------------------------------------- axes
def relational_axis(read: Callable[[config.Relational, TransformerConfig], Any]) -> Axis:
    """An axis of the models with relational heads; the others have no value on it."""

    def axis(run: Run) -> Any:
        heads = relational_of(run)
        if heads is None:
            return None
        return read(heads, encoder_of(run))

    return axis


def head_axis(*, softmax: bool) -> Axis:
    """The number of softmax heads in a layer, or of the others; other models than transformers have no value."""

    def axis(run: Run) -> int | None:
        if not isinstance(run.model, TransformerConfig):
            return None
        groups = encoder_of(run).layer_heads(0)
        return sum(group.heads for group in groups if isinstance(group, Softmax) == softmax)

    return axis


SYMBOL_NAMES = {type(source): name for name, source in SYMBOLS.items()}

# Axes of figures about relational heads, for any task.
AXES: dict[str, Axis] = {
    "symbols": relational_axis(lambda heads, _: SYMBOL_NAMES[type(heads.symbols)]),
    "relations": relational_axis(lambda heads, _: heads.relations or heads.heads),
    "symmetric": relational_axis(lambda heads, _: heads.symmetric),
    "positions": relational_axis(lambda _, model: type(model.positions).__name__.lower()),
}

DUAL = Paper(
    "dual attention",
    row_of,
    label,
    {
        **AXES,
        "game": lambda run: getattr(run.task, "game", None),
        "examples": lambda run: getattr(run.task, "examples", None),
        "module": lambda run: getattr(run.task, "module", None),
        "data": lambda run: run.task.data if isinstance(run.task, Images) else None,
        "softmax heads": head_axis(softmax=True),
        "relational heads": head_axis(softmax=False),
    },
)
