"""Everything that fixes a run, as frozen dataclasses: mechanisms, the transformer, the abstract task, training, the run itself.

A run is a value: two runs with the same `digest` do the same arithmetic.  Fields that cannot change a result (device, folders,
logging) are marked non-semantic and do not enter the digest.  Plain dataclasses, read and written as JSON (or read as YAML);
only `cli.py` knows a command-line library.
"""

import abc
import hashlib
import json
import pathlib
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyhead import serial
from polyhead.serial import to_dict
from polyhead.shapes import one_of
from polyhead.spec import ACTS, NORMALISE


def stream(seed: int, name: str, step: int = 0) -> int:
    """A seed of 63 bits for one consumer of randomness: `stream(0, "fuzzy_logic/compositional", 17)`.

    Streams are counter-based: a batch is a pure function of (seed, name, step), so there is no generator state to store, and
    two names never share draws.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def plain(default: Any) -> Any:
    """A field that cannot change the result of a run: it stays out of the digest."""
    return field(default=default, kw_only=True, metadata={"semantic": False})


# ---------------------------------------------------------------------------------------------------------- mechanisms
@dataclass(frozen=True)
class Mechanism:
    """A group of heads of one kind.  `dim` (query/key) and `value_dim` are per head; by default model width // total heads.

    `kv_heads`: keys and values are shared by heads // kv_heads query heads (grouped attention).
    """

    heads: int = 8
    dim: int | None = None
    value_dim: int | None = None
    kv_heads: int | None = None
    impl: str = plain("auto")

    def __post_init__(self) -> None:
        who = type(self).__name__
        for name in ("heads", "dim", "value_dim", "kv_heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{who}: {name} must be at least 1 but is {value}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"{who}: kv_heads must divide {self.heads} heads but is {self.kv_heads}")


@dataclass(frozen=True)
class Softmax(Mechanism):
    """Softmax attention (Vaswani et al. 2017)."""


@dataclass(frozen=True)
class Linear(Mechanism):
    """Linear attention: scores are used as they are.  `act` acts on the values."""

    normalise: str = "identity"
    act: str = "identity"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("Linear", "normalise", self.normalise, NORMALISE)
        one_of("Linear", "act", self.act, ACTS)


@dataclass(frozen=True)
class Hyla(Mechanism):
    """Hypernetwork linear attention (Schug et al., eq. 6; `value_depth=2` is the deep value network of eq. 10)."""

    normalise: str = "rms_heads"
    act: str = "relu"
    value_depth: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("Hyla", "normalise", self.normalise, NORMALISE)
        one_of("Hyla", "act", self.act, ACTS)
        if self.value_depth not in (1, 2):
            raise ValueError(f"Hyla: value_depth must be 1 or 2 but is {self.value_depth}")


# ----------------------------------------------------------------------------------------------------------- positions
@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of q and k.  `interleaved` turns pairs (2j, 2j+1), `half` turns pairs (j, j + d/2)."""

    theta: float = 1e4
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        one_of("Rotary", "layout", self.layout, ("interleaved", "half"))


@dataclass(frozen=True)
class RelativeBias:
    """T5 relative bias, one table per layer.  Defaults: as many buckets as positions; keys after the query share bucket 0."""

    buckets: int | None = None
    max_distance: int | None = None
    bidirectional: bool = False


@dataclass(frozen=True)
class Alibi:
    """Attention with linear biases: score - slope_h |i - j| (Press et al. 2022)."""


@dataclass(frozen=True)
class Learned:
    """A learned vector per position, added to the inputs of the first layer."""


@dataclass(frozen=True)
class Sinusoidal:
    """Sines and cosines of the position, added to the inputs of the first layer (Vaswani et al. 2017)."""


Position = Rotary | RelativeBias | Alibi | Learned | Sinusoidal


# -------------------------------------------------------------------------------------------------------- feed-forward
@dataclass(frozen=True)
class Mlp:
    """Two linear maps with `act` between them.  `hidden` defaults to 4 x width."""

    hidden: int | None = None
    act: str = "gelu"
    bias: bool = True

    def __post_init__(self) -> None:
        one_of("Mlp", "act", self.act, ACTS)


@dataclass(frozen=True)
class Swiglu:
    """W2(silu(W1 x) * W3 x), no biases.  `hidden` defaults to floor(8/3 width) down to a multiple of 64."""

    hidden: int | None = None


@dataclass(frozen=True)
class Experts:
    """Mixture of expert MLPs: the top k of a linear gate, weighted by the softmax over those k; no noise."""

    experts: int = 4
    top_k: int = 2
    hidden: int | None = None
    act: str = "gelu"
    bias: bool = True
    balance: float = 0.01  # weight of the load-balance loss

    def __post_init__(self) -> None:
        one_of("Experts", "act", self.act, ACTS)
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"Experts: top_k must be 1 to {self.experts} (experts) but is {self.top_k}")


FeedForward = Mlp | Swiglu | Experts


# ---------------------------------------------------------------------------------------------------------------- ends
@dataclass(frozen=True)
class Tokens:
    """Integer tokens (b t) through an embedding table of `count` rows."""

    count: int


@dataclass(frozen=True)
class Vectors:
    """Vectors (b t size) through a linear map."""

    size: int
    bias: bool = True


@dataclass(frozen=True)
class Logits:
    """`count` logits per position; `tied` reuses the token table, `scaled` divides by sqrt(width) (the HYLA paper's LM)."""

    count: int
    bias: bool = False
    tied: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Values:
    """`size` real numbers per position."""

    size: int = 1
    bias: bool = True


# --------------------------------------------------------------------------------------------------------- transformer
Heads = tuple[Mechanism, ...]


@dataclass(frozen=True)
class TransformerConfig:
    """The one transformer.  `heads` is one list of head groups for all layers, or one list per layer (hybrid stacks)."""

    inputs: Tokens | Vectors
    outputs: Logits | Values
    dim: int = 128
    layers: int = 2
    heads: Heads | tuple[Heads, ...] = (Softmax(),)
    feedforward: Mlp | Swiglu | Experts = Mlp()
    positions: Rotary | RelativeBias | Alibi | Learned | Sinusoidal | None = None
    max_length: int = 512
    causal: bool = False
    norm: str = "layer"
    norm_eps: float = 1e-5
    norm_order: str = "pre"
    bias: bool = False
    """Biases on q, k, v and the output projection."""
    qk_norm: bool = False
    dropout: float = 0.0
    """Rate on the latent code."""
    dropout_shared: bool = False
    """One dropout mask per layer, shared by batch and heads, instead of one per element."""
    residual_dropout: float = 0.0
    init: str = "cs336"

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", _heads(self.heads))
        for name in ("dim", "layers", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"TransformerConfig: {name} must be at least 1 but is {getattr(self, name)}")
        if self.per_layer and len(self.heads) != self.layers:
            raise ValueError(f"TransformerConfig: {self.layers} layers but {len(self.heads)} lists of heads")
        one_of("TransformerConfig", "norm", self.norm, ("layer", "rms"))
        one_of("TransformerConfig", "norm_order", self.norm_order, ("pre", "post"))
        one_of("TransformerConfig", "init", self.init, ("hyla", "cs336"))

    @property
    def per_layer(self) -> bool:
        return isinstance(self.heads[0], tuple)

    def layer_heads(self, layer: int) -> Heads:
        """The head groups of layer `layer` (from 0)."""
        return typing.cast(Heads, self.heads[layer] if self.per_layer else self.heads)


def _heads(heads: Any) -> Any:
    if isinstance(heads, Mechanism):
        return (heads,)
    if not isinstance(heads, (list, tuple)) or not heads:
        raise ValueError(f"heads must be mechanisms such as [Softmax(4), Hyla(4)] but is {heads!r}")
    nested = [isinstance(group, (list, tuple)) for group in heads]
    if any(nested) and not all(nested):
        raise ValueError("heads must be one list of mechanisms, or one such list per layer, not a mixture of both")
    if all(nested):
        return tuple(_heads(group) for group in heads)
    for group in heads:
        if not isinstance(group, Mechanism):
            raise ValueError(f"heads must be mechanisms such as Softmax(4) but holds {group!r}")
    return tuple(heads)


# ---------------------------------------------------------------------------------------------------------------- task
@dataclass(frozen=True)
class Batch:
    """One draw of a task.  `inputs` (b t c) or (b t); `targets` (b t c) or (b t) at all positions; `mask` (b s): a real token,
    None when all are; `scored` (b t): counts in loss and metric; `latents`: the task's ground truth, by name, (b ...)."""

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None
    scored: Tensor
    latents: dict[str, Tensor]


@dataclass(frozen=True)
class Task(abc.ABC):
    """A stream of data with a loss and metrics.  It knows no network."""

    name: ClassVar[str]  # of its seed streams: "fuzzy_logic"
    metric: ClassVar[str]  # the headline among `metrics`; higher is better

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits it has: `train`, `iid`, `compositional`, `novel`."""

    @property
    @abc.abstractmethod
    def ends(self) -> tuple[Tokens | Vectors, Logits | Values]:
        """What a transformer needs at its two ends."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Tokens in a sequence."""

    @abc.abstractmethod
    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device."""

    @abc.abstractmethod
    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Mean loss over scored positions: a scalar."""

    @abc.abstractmethod
    def metrics(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Per-sequence scores (b,) by name: their mean over batches is the reported figure."""

    def batch(self, split: str, batch_size: int, *, seed: int, step: int, device: Any = "cpu") -> Batch:
        """Batch number `step` of `split`: a pure function of (seed, split, step)."""
        generator = torch.Generator(device).manual_seed(stream(seed, f"{self.name}/{split}", step))
        return self.sample(split, batch_size, generator)


# ---------------------------------------------------------------------------------------------------------------- runs
@dataclass(frozen=True)
class Decay:
    """Which parameters weight decay touches.  Weight matrices always; everything else only if asked."""

    biases: bool = False
    qkv_biases: bool = False
    norms: bool = False
    relative_bias: bool = False
    embeddings: bool = False


@dataclass(frozen=True)
class Train:
    """AdamW, linear warm-up from 0, cosine to `final` x lr."""

    steps: int = 1000
    batch_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.1
    decay: Decay = Decay()
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    warmup: int = 100
    final: float = 0.1
    early_floor: bool = False
    """End the cosine `warmup` steps early (the original HYLA code counted warm-up twice)."""
    clip: float | None = None
    """Largest gradient norm; None does not clip."""
    precision: str = "fp32"
    evaluate: tuple[str, ...] = ("iid", "compositional")
    eval_batches: int = 16
    eval_every: int = plain(500)
    log_every: int = plain(50)
    save_every: int = plain(500)

    def __post_init__(self) -> None:
        one_of("Train", "precision", self.precision, ("fp32", "bf16", "fp16"))
        for name in ("steps", "batch_size", "eval_batches", "eval_every", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"Train: {name} must be at least 1 but is {getattr(self, name)}")


@dataclass(frozen=True)
class Run:
    """One training run, whole."""

    name: str = plain("run")
    task: Task
    model: TransformerConfig
    train: Train = Train()
    seed: int = 0
    device: str = plain("auto")
    compile: bool = plain(False)
    deterministic: bool = plain(False)
    threads: int | None = plain(None)
    folder: str | None = plain(None)


def digest(config: Any) -> str:
    """Twelve hex digits of the JSON of `config` without its non-semantic fields: the id of a run."""
    text = json.dumps(to_dict(config, semantic=True), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


_KINDS = (
    *(Softmax, Linear, Hyla),
    *(Rotary, RelativeBias, Alibi, Learned, Sinusoidal),
    *(Mlp, Swiglu, Experts),
    *(Tokens, Vectors, Logits, Values),
    *(TransformerConfig, Decay, Train, Run),
)


# ---------------------------------------------------------------------------------------------------- reading, writing
def save(config: Any, path: str | pathlib.Path) -> None:
    """Write `config` as JSON."""
    pathlib.Path(path).write_text(json.dumps(to_dict(config), indent=2) + "\n")


def load(path: str | pathlib.Path, kinds: Iterable[type] = ()) -> Any:
    """Read a run from a JSON or YAML file written by `save` or by hand.  `kinds`: classes beyond this module's (the tasks)."""
    return from_dict(serial.read(path), kinds, where=str(path))


def from_dict(data: Any, kinds: Iterable[type] = (), *, where: str = "config") -> Any:
    """The inverse of `to_dict`.  Unknown fields, kinds and types are errors that name the field."""
    return serial.build(data, Run, {cls.__name__: cls for cls in (*_KINDS, *kinds)}, where)
