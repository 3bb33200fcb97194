"""The models of the dual-attention study: dual attention (softmax and relational heads), controls, and relational
baselines, all with as many parameters as dual attention.

The papers (Altabaa and Lafferty 2024, "Disentangling and integrating relational and sensory information"; Altabaa,
Webb, Cohen, Lafferty 2024, "Abstractors") compare dual attention with softmax heads without relative positions.  Our
controls are softmax heads with relative positions.
"""

import functools
from dataclasses import dataclass, replace

from polyhead.config import (
    Abstractor,
    AbstractorConfig,
    Classes,
    CoRelNetConfig,
    Disentangled,
    Input,
    Learned,
    Mechanism,
    Mlp,
    Model,
    Output,
    Position,
    PositionSymbols,
    PrediNetConfig,
    Relational,
    RelationalSymbols,
    RelativeBias,
    RelativeSymbols,
    Rotary,
    Run,
    Softmax,
    Swiglu,
    SymbolicAttention,
    SymbolSource,
    TransformerConfig,
    Values,
)
from polyhead.models.size import match, parameters
from polyhead.papers.sizes import Scale
from polyhead.papers.study import Axis, Paper
from polyhead.spec.shapes import one_of
from polyhead.tasks import Images

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
SYMBOLS: dict[str, SymbolSource] = {
    "by place": PositionSymbols(),
    "by offset": RelativeSymbols(),
    "library": SymbolicAttention(),
    "by neighbours": RelationalSymbols(),
}


@dataclass(frozen=True)
class Relations:
    """Settings of relational heads: symbol source, number of relations (None: one per head), initialisation."""

    symbols: SymbolSource = PositionSymbols()  # noqa: RUF009 (frozen)
    symmetric: bool = True
    relations: int | None = None
    start: str = "balanced"

    def heads(self, softmax: int, relational: int, dim: int, row: str = "dual") -> tuple[Mechanism, ...]:
        """Groups of softmax heads and of those of `row`, all of width `dim`, without empty groups."""
        groups: list[Mechanism] = []
        if softmax:
            groups.append(Softmax(softmax, dim, dim))
        if relational and row == "disentangled":
            groups.append(Disentangled(relational, dim, dim, symbols=self.symbols, symmetric=self.symmetric))
        elif relational and row == "rca":
            groups.append(Abstractor(relational, dim, dim, symbols=self.symbols))
        elif relational:
            relational_heads = Relational(relational, dim, dim, symbols=self.symbols, symmetric=self.symmetric)
            groups.append(replace(relational_heads, relations=self.relations, relation_init=self.start))
        return tuple(groups)


# The papers' settings on relational games.
BY_PLACE = Relations()

# The papers' settings on maths and, with symmetric relations, on images.
BY_OFFSET = Relations(RelativeSymbols(), symmetric=False)


def heads_of(row: str, shape: Scale, relations: Relations) -> tuple[Mechanism, ...]:
    """The heads of a transformer row."""
    if row == "dual-package":
        relations = replace(relations, start="package")
    softmax = {**dict.fromkeys(HALVES, shape.heads // 2), "relational": 0}.get(row, shape.heads)
    return relations.heads(softmax, shape.heads - softmax, shape.head_dim, row)


def positions_of(row: str, shape: Scale, length: int) -> Position:
    """Position encodings for sequences of `length`.  A T5 bias with one bucket per offset needs 4 `length` buckets."""
    offsets = RelativeBias(4 * length, max_distance=length, bidirectional=True)
    controls: dict[str, Position] = {"softmax-rope": Rotary(), "softmax-t5": offsets}
    return controls.get(row, shape.positions)


@functools.cache
def classifier(
    ends: tuple[Input, Classes],
    length: int,
    row: str,
    shape: Scale,
    relations: Relations = BY_PLACE,
    standard: Relations | None = None,
) -> Model:
    """The model `row` that classifies sequences of `length`.

    It has as many parameters as dual attention with learned positions and `standard` relations (default: `relations`).
    """
    one_of("recipes", "model", row, ROWS)
    inputs, outputs = ends
    dual = _reader(inputs, outputs, length, "dual", replace(shape, positions=Learned()), standard or relations)
    target = parameters(dual)
    if row == "predinet":
        predinet = PrediNetConfig(inputs, outputs, shape.dim, length, heads=max(shape.dim // 8, 1))
        return match(predinet, target, field="relations", tolerance=CLOSE)
    settings: Model = _reader(inputs, outputs, length, row, shape, relations)
    if row == "corelnet":
        settings = CoRelNetConfig(inputs, outputs, shape.dim, length)
    if row == "abstractor":
        settings = _abstractor(inputs, outputs, length, shape)
    return dual if settings == dual else match(settings, target, field="hidden", tolerance=CLOSE)


@functools.cache
def writer(
    source: tuple[Input, int], ends: tuple[Input, Output, int], row: str, shape: Scale, relations: Relations
) -> TransformerConfig:
    """The encoder-decoder model `row`, with as many parameters as dual attention.

    `source`: the encoder's input and length; `ends`: the decoder's input, output and length.  Dual attention
    has relational heads in encoder and decoder; the Abstractor is an encoder, and its decoder a transformer.
    """
    one_of("recipes", "model", row, ROWS)

    def whole(name: str) -> TransformerConfig:
        encoder: TransformerConfig | AbstractorConfig = _abstractor(source[0], None, source[1], shape)
        if name != "abstractor":
            encoder = _reader(source[0], Values(), source[1], name, shape, relations)
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
        feedforward=Swiglu(shape.hidden) if shape.act == "swiglu" else Mlp(shape.hidden, shape.act),
        positions=positions_of(row, shape, length),
        max_length=length,
        norm_order=shape.norm_order,
        dropout=shape.dropout,
        residual_dropout=shape.dropout,
    )


def _abstractor(inputs: Input, outputs: Classes | None, length: int, shape: Scale) -> AbstractorConfig:
    return AbstractorConfig(
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


def row_of(run: Run) -> str:
    """The name of the row whose model `run` trains, by its content.  Raises ValueError for a model of no row."""
    model = run.model
    for kind, name in ((CoRelNetConfig, "corelnet"), (PrediNetConfig, "predinet"), (AbstractorConfig, "abstractor")):
        if isinstance(model, kind) or isinstance(getattr(model, "encoder", None), kind):
            return name
    settings = encoder_of(run)
    groups, relational = settings.layer_heads(0), relational_of(run)
    other = {Disentangled: "disentangled", Abstractor: "rca"}.get(type(groups[-1]))
    if other is not None:
        return other
    if relational is None and all(isinstance(group, Softmax) for group in groups):
        return {Rotary: "softmax-rope", RelativeBias: "softmax-t5"}.get(type(settings.positions), "softmax")
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


def relational_of(run: Run) -> Relational | None:
    """The relational heads of the first layer of `encoder_of`; None for a model without them."""
    if isinstance(run.model, TransformerConfig):
        for group in encoder_of(run).layer_heads(0):
            if isinstance(group, Relational):
                return group
    return None


def softmax_heads_of(run: Run) -> int | None:
    """The number of softmax heads in a layer; None for other models than transformers."""
    if not isinstance(run.model, TransformerConfig):
        return None
    return sum(group.heads for group in encoder_of(run).layer_heads(0) if isinstance(group, Softmax))


def relational_heads_of(run: Run) -> int | None:
    """The number of other heads in a layer; None for other models than transformers."""
    if not isinstance(run.model, TransformerConfig):
        return None
    return sum(group.heads for group in encoder_of(run).layer_heads(0) if not isinstance(group, Softmax))


def label(model: str) -> str:
    """The label of a model in figures."""
    return ROWS[model].label


def symbols_of(run: Run) -> str | None:
    """The symbol source of its relational heads, as a label."""
    group = relational_of(run)
    if group is None:
        return None
    (name,) = (name for name, source in SYMBOLS.items() if type(source) is type(group.symbols))
    return name


def relations_of(run: Run) -> int | None:
    """The number of relations of its relational heads."""
    group = relational_of(run)
    if group is None:
        return None
    return group.relations or group.heads


def positions_kind(run: Run) -> str | None:
    """The label of the positions of a model with relational heads."""
    if relational_of(run) is None:
        return None
    return type(encoder_of(run).positions).__name__.lower()


# Axes of figures about relational heads, for any task.
AXES: dict[str, Axis] = {
    "symbols": symbols_of,
    "relations": relations_of,
    "symmetric": lambda run: getattr(relational_of(run), "symmetric", None),
    "positions": positions_kind,
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
        "softmax heads": softmax_heads_of,
        "relational heads": relational_heads_of,
    },
)
