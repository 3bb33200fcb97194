"""The relational baselines as frozen dataclasses: CoRelNet, PrediNet and the original Abstractor (`models/rivals`)."""

import typing
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from polyhead.config.components import Classes, Input, Patches
from polyhead.config.mechanisms import PositionSymbols, RelationAct, RelativeSymbols, SymbolSource
from polyhead.spec.checked import LARGEST, Checked, Count, LayerCount, Rate

__all__ = ["AbstractorConfig", "CoRelNetConfig", "PrediNetConfig"]


@dataclass(frozen=True)
class Objects(Checked):
    """The base class of classifiers of `length` objects; if the inputs are patches, each is an object."""

    inputs: Input
    outputs: Classes
    dim: Count = 128
    length: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.outputs.pool != "mean":
            raise ValueError(f"{name}: outputs must be Classes(pool='mean'): it has no class token")
        if isinstance(self.inputs, Patches):
            if self.inputs.class_token:
                raise ValueError(f"{name}: every token is an object, so inputs must have no class token")
            if self.length not in (None, self.inputs.count):
                raise ValueError(f"{name}: length is {self.length} but the image has {self.inputs.count} patches")
        elif self.length is None:
            raise ValueError(f"{name}: length (the number of objects) must be given for {type(self.inputs).__name__}")

    @property
    def objects(self) -> int:
        """The number of objects."""
        return self.inputs.count if isinstance(self.inputs, Patches) else typing.cast(int, self.length)


@dataclass(frozen=True)
class CoRelNetConfig(Objects):
    """CoRelNet (Kerg et al. 2022): a classifier that reads only the inner products of its objects.

    Attributes:
        hidden: Hidden width of the MLP that embeds an object; None: 4 x dim.
        softmax: Normalise each row of inner products, as in the paper.
    """

    hidden: Count | None = None
    softmax: bool = True


@dataclass(frozen=True)
class PrediNetConfig(Objects):
    """PrediNet (Shanahan et al. 2020): each head retrieves two objects and compares them along some directions.

    Attributes:
        relations: Directions of a head.
        key_dim: Width of the keys; None: dim // heads.
    """

    heads: Count = 16
    relations: Count = 8
    key_dim: Count | None = None


@dataclass(frozen=True)
class AbstractorConfig(Checked):
    """The original Abstractor (Altabaa et al. 2024): a stream of symbols that reads objects only through relations.

    Attributes:
        outputs: Those of a classifier; None: it is the encoder of a `TransformerConfig`.
        head_dim: Width of a head; None: dim, as in the authors' code.
        hidden: Hidden width of feed-forward layers; None: 2 x dim.
        act: Activation of relations: a name of `spec.RELATION_ACTS`.
        self_attention: Symbols first attend to each other.
        encoder_layers: Transformer blocks before its own layers.
    """

    inputs: Input
    outputs: Classes | None = None
    dim: Count = 128
    layers: LayerCount = 2
    heads: Count = 4
    head_dim: Count | None = None
    hidden: Count | None = None
    act: RelationAct = "softmax"
    symbols: SymbolSource = PositionSymbols()  # noqa: RUF009 (frozen)
    self_attention: bool = True
    encoder_layers: Annotated[int, Meta(ge=0, le=LARGEST)] = 0
    max_length: Count = 512
    dropout: Rate = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outputs is not None and self.outputs.pool != "mean":
            raise ValueError("AbstractorConfig: outputs must be Classes(pool='mean'): it has no class token")
        if isinstance(self.symbols, RelativeSymbols):
            raise ValueError(f"AbstractorConfig: symbols must be one for each object but is {self.symbols!r}")
        if self.symbols.dim not in (None, self.dim):
            raise ValueError(f"AbstractorConfig: symbols are its stream, of width {self.dim}, not {self.symbols.dim}")
