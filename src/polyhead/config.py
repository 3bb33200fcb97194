"""Everything that fixes a run, as frozen dataclasses: mechanisms, the transformer, the abstract task, training, the
run itself.

A run is a value: two runs with the same `digest` do the same arithmetic.  Fields that cannot change a result
(device, folders, logging) are marked non-semantic and do not enter the digest.  Plain dataclasses, read and written
as JSON (or read as YAML); only `cli.py` knows a command-line library.  Neither torch nor jax is imported: both
sides share this file.
"""

import abc
import hashlib
import json
import pathlib
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polyhead import serial
from polyhead.parts import (
    Alibi,
    Experts,
    FeedForward,
    Hyla,
    Learned,
    Linear,
    Logits,
    Mechanism,
    Mlp,
    Position,
    RelativeBias,
    Rotary,
    Sinusoidal,
    Softmax,
    Swiglu,
    Tokens,
    Values,
    Vectors,
    plain,
)
from polyhead.serial import to_dict
from polyhead.shapes import one_of

__all__ = [
    "Alibi",
    "Batch",
    "Decay",
    "Experts",
    "FeedForward",
    "Hyla",
    "Learned",
    "Linear",
    "Logits",
    "Mechanism",
    "Mlp",
    "Position",
    "RelativeBias",
    "Rotary",
    "Run",
    "Sinusoidal",
    "Softmax",
    "Swiglu",
    "Task",
    "Tokens",
    "Train",
    "TransformerConfig",
    "Values",
    "Vectors",
    "digest",
    "from_dict",
    "load",
    "save",
    "stream",
    "to_dict",
]


def stream(seed: int, name: str, step: int = 0) -> int:
    """A seed of 63 bits for one consumer of randomness: `stream(0, "fuzzy_logic/compositional", 17)`.

    Streams are counter-based: a batch is a pure function of (seed, name, step), so there is no generator state to
    store, and two names never share draws.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


Heads = tuple[Mechanism, ...]

_PARTS: dict[str, tuple[type, ...]] = {
    "inputs": (Tokens, Vectors),
    "outputs": (Logits, Values),
    "feedforward": typing.get_args(FeedForward),
    "positions": (*typing.get_args(Position), type(None)),
}


@dataclass(frozen=True)
class TransformerConfig:
    """The one transformer.  `heads`: one list of head groups for all layers, or one list per layer (hybrid stacks)."""

    inputs: Tokens | Vectors
    outputs: Logits | Values
    dim: int = 128
    layers: int = 2
    heads: Mechanism | Sequence[Mechanism | Sequence[Mechanism]] = (Softmax(),)
    feedforward: FeedForward = Mlp()  # noqa: RUF009 (frozen)
    positions: Position | None = None
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
        object.__setattr__(self, "heads", _layers_of_heads(self.heads))
        for name, kinds in _PARTS.items():
            if not isinstance(getattr(self, name), kinds):
                names = ", ".join(f"{kind.__name__}()" for kind in kinds if kind is not type(None))
                raise ValueError(f"TransformerConfig: {name} must be one of {names} but is {getattr(self, name)!r}")
        for name in ("dim", "layers", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"TransformerConfig: {name} must be at least 1 but is {getattr(self, name)}")
        if self.per_layer and len(self._lists) != self.layers:
            raise ValueError(f"TransformerConfig: {self.layers} layers but {len(self._lists)} lists of heads")
        one_of("TransformerConfig", "norm", self.norm, ("layer", "rms"))
        one_of("TransformerConfig", "norm_order", self.norm_order, ("pre", "post"))
        one_of("TransformerConfig", "init", self.init, ("hyla", "cs336"))

    @property
    def _lists(self) -> tuple[Any, ...]:
        return typing.cast(tuple[Any, ...], self.heads)  # __post_init__ made it a tuple

    @property
    def per_layer(self) -> bool:
        return isinstance(self._lists[0], tuple)

    def layer_heads(self, layer: int) -> Heads:
        """The head groups of layer `layer` (from 0)."""
        return typing.cast(Heads, self._lists[layer] if self.per_layer else self._lists)


def head_list(who: str, heads: Any) -> Heads:
    """`heads` as a tuple of mechanisms, a lone one included."""
    groups = (heads,) if isinstance(heads, Mechanism) else heads
    if not isinstance(groups, (list, tuple)) or not groups:
        raise ValueError(f"{who}: heads must be mechanisms such as [Softmax(4), Hyla(4)] but is {heads!r}")
    strangers = [group for group in groups if not isinstance(group, Mechanism)]
    if strangers:
        raise ValueError(f"{who}: heads must be mechanisms such as Softmax(4) but holds {strangers[0]!r}")
    return tuple(groups)


def _layers_of_heads(heads: Any) -> Any:
    """One list of mechanisms, or a list per layer."""
    who = "TransformerConfig"
    nested = [isinstance(group, (list, tuple)) for group in heads] if isinstance(heads, (list, tuple)) else []
    if any(nested) and not all(nested):
        raise ValueError(f"{who}: heads must be one list of mechanisms or one list per layer, not a mixture of both")
    return tuple(head_list(who, group) for group in heads) if any(nested) else head_list(who, heads)


Array = Any
"""A tensor of either side."""


@dataclass(frozen=True)
class Batch:
    """One draw of a task.  `inputs` (b t c) or (b t); `targets` (b t c) or (b t) at all positions; `mask` (b s): a
    real token, None when all are; `scored` (b t): counts in loss and metric; `latents`: the task's ground truth, by
    name, (b ...)."""

    inputs: Array
    targets: Array
    mask: Array | None
    scored: Array
    latents: dict[str, Array]

    @classmethod
    def stack(cls, batches: "Sequence[Batch]") -> "Batch":
        """Batches of one shape along a new first dimension."""
        import torch

        return cls._joined(batches, torch.stack)

    @classmethod
    def cat(cls, batches: "Sequence[Batch]") -> "Batch":
        """Batches one after the other along their first dimension."""
        import torch

        return cls._joined(batches, torch.cat)

    @classmethod
    def _joined(cls, batches: "Sequence[Batch]", join: Callable[[list[Array]], Array]) -> "Batch":
        def field(name: str) -> Array:
            return join([getattr(batch, name) for batch in batches])

        mask = None if batches[0].mask is None else field("mask")
        latents = {name: join([batch.latents[name] for batch in batches]) for name in batches[0].latents}
        return cls(field("inputs"), field("targets"), mask, field("scored"), latents)

    def map(self, function: Callable[[Array], Array]) -> "Batch":
        """The batch with `function` of every array it holds."""
        mask = None if self.mask is None else function(self.mask)
        latents = {name: function(value) for name, value in self.latents.items()}
        return Batch(function(self.inputs), function(self.targets), mask, function(self.scored), latents)


@dataclass(frozen=True)
class Task(abc.ABC):
    """A stream of data with a loss and metrics.  It knows no network."""

    name: ClassVar[str]  # of its seed streams: "fuzzy_logic"
    metric: ClassVar[str]  # the headline among `metrics`; higher is better

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits it has, of `train`, `validation`, `iid`, `compositional`, `novel`."""

    @property
    @abc.abstractmethod
    def ends(self) -> tuple[Tokens | Vectors, Logits | Values]:
        """What a transformer needs at its two ends."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Tokens in a sequence."""

    @property
    def tail(self) -> int | None:
        """How many positions at the end are ever scored; None when any may be."""
        return None

    @property
    def pairs(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Named lists of (query, key) positions whose latent code is worth a look; by default the last token's own."""
        return {"self": ((-1, -1),)}

    @abc.abstractmethod
    def sample(self, split: str, batch_size: int, generator: Any) -> Batch:
        """A batch on the generator's device."""

    @abc.abstractmethod
    def loss(self, outputs: Array, batch: Batch) -> Array:
        """Mean loss over scored positions: a scalar."""

    @abc.abstractmethod
    def metrics(self, outputs: Array, batch: Batch) -> dict[str, Array]:
        """Per-sequence scores (b,) by name: their mean over batches is the reported figure."""

    def batch(self, split: str, batch_size: int, *, seed: int, step: int, device: Any = "cpu") -> Batch:
        """Batch number `step` of `split`: a pure function of (seed, split, step)."""
        return self.sample(split, batch_size, self.generator(split, seed=seed, step=step, device=device))

    def batches(self, split: str, batch_size: int, *, seeds: Sequence[int], step: int, device: Any = "cpu") -> Batch:
        """`batch` for each of `seeds`, stacked: inputs (n b t c) and so on.

        To be written anew by a task that can draw them together, to the same values: a GPU waits for every launch.
        """
        return Batch.stack([self.batch(split, batch_size, seed=seed, step=step, device=device) for seed in seeds])

    def generator(self, split: str, *, seed: int, step: int, device: Any = "cpu") -> Any:
        """The generator that batch number `step` of `split` is drawn from."""
        import torch

        return torch.Generator(device).manual_seed(stream(seed, f"{self.name}/{split}", step))


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
        for name in ("lr", "weight_decay", "warmup", "final", "eps"):
            if not getattr(self, name) >= 0:  # nan neither
                raise ValueError(f"Train: {name} must be at least 0 but is {getattr(self, name)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"Train: clip must be above 0, or None, but is {self.clip}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"Train: betas must be two numbers in [0, 1) but are {self.betas}")


@dataclass(frozen=True)
class Run:
    """One training run, whole."""

    task: Task
    model: TransformerConfig
    name: str = plain("run")
    train: Train = Train()
    seed: int = 0
    device: str = plain("auto")
    compile: bool = plain(False)
    deterministic: bool = plain(False)
    threads: int | None = plain(None)
    folder: str | None = plain(None)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"Run: threads must be at least 1, or None, but is {self.threads}")


def digest(config: Any) -> str:
    """Twelve hex digits of the JSON of `config` without its non-semantic fields: the id of a run."""
    text = json.dumps(to_dict(config, semantic=True), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


_KINDS = (
    *(Softmax, Linear, Hyla, *typing.get_args(Position), *typing.get_args(FeedForward)),
    *(Tokens, Vectors, Logits, Values, TransformerConfig, Decay, Train, Run),
)


def save(config: Any, path: str | pathlib.Path) -> None:
    """Write `config` as JSON."""
    pathlib.Path(path).write_text(json.dumps(to_dict(config), indent=2) + "\n")


def load(path: str | pathlib.Path, kinds: Iterable[type] = ()) -> Any:
    """Read a run from a JSON or YAML file.  `kinds`: classes beyond this module's (the tasks)."""
    return from_dict(serial.read(path), kinds, where=str(path))


def from_dict(data: Any, kinds: Iterable[type] = (), *, where: str = "config") -> Any:
    """The inverse of `to_dict`.  Unknown fields, kinds and types are errors that name the field."""
    return serial.build(data, Run, {cls.__name__: cls for cls in (*_KINDS, *kinds)}, where)
