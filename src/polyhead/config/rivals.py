"""The relational baselines as frozen dataclasses: CoRelNet, PrediNet and the original Abstractor.

Each has inputs and outputs as a transformer's configuration has.  The modules are in `models/rivals`.
"""

import typing
from dataclasses import dataclass

from polyhead.config.components import Classes, Input, Patches
from polyhead.config.mechanisms import LARGEST, PositionSymbols, RelativeSymbols, SymbolSource, positive
from polyhead.config.serial import Checked
from polyhead.spec import RELATION_ACTS
from polyhead.spec.shapes import one_of


def _check(part: "CoRelNetConfig | PrediNetConfig | AbstractorConfig") -> None:
    """Raise ValueError unless inputs are valid and outputs are classes."""
    who = type(part).__name__
    if not isinstance(part.inputs, typing.get_args(Input)):
        raise ValueError(f"{who}: inputs must be Tokens(), Vectors() or Patches() but is {part.inputs!r}")
    if not isinstance(part.outputs, (Classes, type(None))) or (part.outputs is None and who != "AbstractorConfig"):
        raise ValueError(f"{who}: outputs must be Classes() but is {part.outputs!r}")
    if part.outputs is not None and part.outputs.pool != "mean":
        raise ValueError(f"{who}: outputs must be Classes(pool='mean'): it has no class token")


def _objects(part: "CoRelNetConfig | PrediNetConfig") -> int:
    """The fixed number of objects of a model."""
    who = type(part).__name__
    positive(part, "length")
    if isinstance(part.inputs, Patches):
        if part.inputs.class_token:
            raise ValueError(f"{who}: every token is an object, so inputs must have no class token")
        if part.length not in (None, part.inputs.count):
            raise ValueError(f"{who}: length is {part.length} but the image has {part.inputs.count} patches")
        return part.inputs.count
    if part.length is None:
        raise ValueError(f"{who}: length (the number of objects) must be given for {type(part.inputs).__name__}")
    return part.length


@dataclass(frozen=True)
class CoRelNetConfig(Checked):
    """CoRelNet (Kerg et al. 2022): a classifier that reads only the inner products of its objects.

    `length`: number of objects, needed unless the inputs are patches.  `hidden`: width of the MLP that embeds each
    object, default 4 x dim.  `softmax`: normalise each row of inner products (as in the paper).

    >>> CoRelNetConfig(Patches((3, 36, 36), (12, 12)), Classes(2)).objects
    9
    """

    inputs: Input
    outputs: Classes
    dim: int = 128
    length: int | None = None
    hidden: int | None = None
    softmax: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "dim", "hidden")
        _check(self)
        _objects(self)

    @property
    def objects(self) -> int:
        """The number of objects it compares."""
        return _objects(self)


@dataclass(frozen=True)
class PrediNetConfig(Checked):
    """PrediNet (Shanahan et al. 2020): each head retrieves two objects and compares them along `relations` directions.

    `length`: number of objects, needed unless the inputs are patches.  `key_dim`: by default dim // heads.
    """

    inputs: Input
    outputs: Classes
    dim: int = 128
    length: int | None = None
    heads: int = 16
    relations: int = 8
    key_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "dim", "heads", "relations", "key_dim")
        _check(self)
        _objects(self)

    @property
    def objects(self) -> int:
        """The number of objects it retrieves from."""
        return _objects(self)


@dataclass(frozen=True)
class AbstractorConfig(Checked):
    """The original Abstractor (Altabaa et al. 2024): a stream of symbols that reads objects only through relations.

    With `outputs` it is a classifier; without them it is the encoder of a sequence-to-sequence `TransformerConfig`.
    `head_dim`: width of a head (default: dim, as in the authors' code).  `hidden`: width of the feed-forward layers,
    default 2 x dim.  `act`: softmax, or a pointwise activation of the relations.  `self_attention`: symbols first
    attend to each other.  `encoder_layers`: number of transformer blocks before the Abstractor's layers.
    """

    inputs: Input
    outputs: Classes | None = None
    dim: int = 128
    layers: int = 2
    heads: int = 4
    head_dim: int | None = None
    hidden: int | None = None
    act: str = "softmax"
    symbols: SymbolSource = PositionSymbols()  # noqa: RUF009 (frozen)
    self_attention: bool = True
    encoder_layers: int = 0
    max_length: int = 512
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "dim", "layers", "heads", "head_dim", "hidden", "max_length")
        _check(self)
        one_of("AbstractorConfig", "act", self.act, RELATION_ACTS)
        if not isinstance(self.symbols, typing.get_args(SymbolSource)) or isinstance(self.symbols, RelativeSymbols):
            raise ValueError(
                "AbstractorConfig: symbols must be one for each object, such as PositionSymbols(), "
                f"but is {self.symbols!r}"
            )
        if self.symbols.dim not in (None, self.dim):
            raise ValueError(f"AbstractorConfig: symbols are its stream, of width {self.dim}, not {self.symbols.dim}")
        if not 0 <= self.encoder_layers <= LARGEST["layers"]:
            raise ValueError(
                f"AbstractorConfig: encoder_layers must be 0 to {LARGEST['layers']} but is {self.encoder_layers}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"AbstractorConfig: dropout must lie in [0, 1) but is {self.dropout}")


Baseline = CoRelNetConfig | PrediNetConfig | AbstractorConfig
