"""A transformer, its training and a run, as frozen dataclasses.  Runs with the same `digest` compute the same numbers,
up to rounding on another machine; fields that cannot change a result (device, folders, logging) stay out of it."""

import hashlib
import itertools
import json
import pathlib
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from polyhead.config import components, mechanisms, serial
from polyhead.config.components import Classes, FeedForward, Input, Mlp, Output, Patches, Position
from polyhead.config.mechanisms import MECHANISMS, Mechanism, RelativeSymbols, Softmax, SymbolHeads, SymbolSource
from polyhead.config.rivals import AbstractorConfig, CoRelNetConfig, PrediNetConfig
from polyhead.extensions import kind_of
from polyhead.spec import NORM_ORDERS, NORMS, PRESETS
from polyhead.spec.checked import Amount, Checked, Count, Index, LayerCount, Positive, Rate, Seed, choice, non_semantic
from polyhead.spec.files import read_values

if TYPE_CHECKING:
    from polyhead.tasks.base import Task
else:
    from polyhead.spec.checked import Task

__all__ = ["Decay", "Heads", "Model", "Run", "Train", "TransformerConfig", "check_run", "digest", "from_dict"]
__all__ += ["head_list", "load", "save", "to_dict", "total_heads"]

Heads = tuple[Mechanism, ...]


# ------------------------------------------------------------------------------------------------------ the transformer
@dataclass(frozen=True)
class TransformerConfig(Checked):
    """The transformer: an encoder, a causal decoder or, with an `encoder`, both.

    Attributes:
        dim: Width of the model.
        layers: How many blocks it has.
        heads: One list of head groups for all layers, or one list per layer (hybrid stacks).
        max_length: Most positions of tables of positions and symbols.
        causal: A token attends to none after it.
        norm: layer or rms.
        norm_eps: What a norm adds to the variance.
        norm_order: "pre" normalises the input of attention and feed-forward layers, "post" the sum after them.
        bias: Biases on q, k, v and the output projection.
        qk_norm: LayerNorm without bias on queries and keys, per head.
        dropout: Dropout rate on the latent code.
        dropout_shared: One dropout mask per layer, shared by batch and heads, instead of one per sample and head.
        residual_dropout: Dropout rate on what a layer adds to the stream.
        init: Initial parameters: hyla or cs336.
        final_norm: A norm after the last block; None: with pre-norm only.
        encoder: Every layer also attends to the stream of this model.
        cross_heads: Heads that attend to the encoder; None: softmax heads, as many as the layer has heads.
        window: A token attends to the tokens of its sequence that are fewer than `window` positions away.
        checkpoint: Activation checkpointing: training saves only the inputs of blocks, and computes the rest again for
            gradients.
    """

    inputs: Input
    outputs: Output
    dim: Count = 128
    layers: LayerCount = 2
    heads: Mechanism | Sequence[Mechanism | Sequence[Mechanism]] = (Softmax(),)
    feedforward: FeedForward = Mlp()  # noqa: RUF009 (frozen)
    positions: Position | None = None
    max_length: Count = 512
    causal: bool = False
    norm: Annotated[str, choice(NORMS)] = "layer"
    norm_eps: Amount = 1e-5
    norm_order: Annotated[str, choice(NORM_ORDERS)] = "pre"
    bias: bool = False
    qk_norm: bool = False
    dropout: Rate = 0.0
    dropout_shared: bool = False
    residual_dropout: Rate = 0.0
    init: Annotated[str, choice(PRESETS)] = "cs336"
    final_norm: bool | None = None
    encoder: "TransformerConfig | AbstractorConfig | None" = None
    cross_heads: Mechanism | Sequence[Mechanism] | None = None
    window: Count | None = None
    checkpoint: bool = non_semantic(False)

    def __post_init__(self) -> None:
        super().__post_init__()
        lists = _layers_of_heads(self.heads)
        object.__setattr__(self, "heads", lists)
        if self.per_layer and len(lists) != self.layers:
            raise ValueError(f"TransformerConfig: {self.layers} layers but {len(lists)} lists of heads")
        if self.cross_heads is not None:
            object.__setattr__(self, "cross_heads", head_list("TransformerConfig", self.cross_heads))
        # What single fields cannot know: how they go together.
        reason = next(self._reasons(), None)
        if reason is not None:
            raise ValueError(f"TransformerConfig: {reason}")

    def _reasons(self) -> Iterator[str]:
        """What is wrong with the model, if anything is."""
        if self.encoder is None and self.cross_heads is not None:
            yield "cross_heads look at an encoder, but encoder is None"
        if self.encoder is not None and self.encoder.dim != self.dim:
            yield f"the encoder's dim is {self.encoder.dim} but the decoder's {self.dim}"
        if getattr(self.encoder, "encoder", None) is not None:
            yield "an encoder has no encoder of its own"
        for group in self.layer_cross_heads(0):
            if isinstance(group, SymbolHeads) and isinstance(group.symbols, RelativeSymbols):
                yield "cross_heads see another sequence, which has no RelativeSymbols"
        if self.causal or self.window is not None:
            for group in (*self.groups(), *self.layer_cross_heads(0)):
                if group.reads_all_queries:
                    yield "network='sequence' reads all queries: give no causal and no window"
        if isinstance(self.outputs, Classes) and self.outputs.pool == "class":
            if isinstance(self.inputs, Patches) and not self.inputs.class_token:
                yield 'Classes(pool="class") needs Patches(class_token=True)'
            if self.causal:
                yield 'with causal=True the first token sees no other: Classes(pool="mean")'

    @property
    def per_layer(self) -> bool:
        """Whether `heads` is one list per layer."""
        return isinstance(typing.cast(Heads, self.heads)[0], tuple)  # __post_init__ made it a tuple

    def layer_heads(self, layer: int) -> Heads:
        """The head groups of layer `layer` (from 0)."""
        lists: Any = self.heads
        return lists[layer] if self.per_layer else lists

    def layer_cross_heads(self, layer: int) -> Heads:
        """The head groups that attend to the encoder in layer `layer`; none without an encoder."""
        if self.encoder is None:
            return ()
        if self.cross_heads is None:
            return (Softmax(total_heads(self.layer_heads(layer))),)
        return typing.cast(Heads, self.cross_heads)

    def groups(self) -> list[Mechanism]:
        """The head groups of all layers, without those that attend to the encoder."""
        return list(itertools.chain.from_iterable(map(self.layer_heads, range(self.layers))))

    @property
    def context(self) -> int | None:
        """The most tokens it can read; None if it has no limit: without positions, with relative bias or ALiBi."""
        if isinstance(self.positions, (components.Rotary, components.Learned, components.Sinusoidal)):
            return self.max_length
        for group in self.groups():
            if isinstance(group, SymbolHeads):
                symbols = group.symbols
                is_table = isinstance(symbols, RelativeSymbols) and symbols.distance is None
                if is_table or isinstance(symbols, mechanisms.PositionSymbols):
                    return self.max_length
        return None


def head_list(caller: str, heads: object) -> Heads:
    """`heads` as a tuple of mechanisms; a single mechanism becomes a tuple of one."""
    groups = (heads,) if isinstance(heads, Mechanism) else heads
    if not isinstance(groups, (list, tuple)) or not groups or not all(isinstance(group, Mechanism) for group in groups):
        raise ValueError(f"{caller}: heads must be mechanisms such as [Softmax(4), Hyla(4)] but is {heads!r}")
    return tuple(groups)


def total_heads(groups: Iterable[Mechanism]) -> int:
    """The number of heads of all these groups."""
    return sum(group.heads for group in groups)


def _layers_of_heads(heads: object) -> tuple[Any, ...]:
    """One list of mechanisms, or a list per layer, in which a single mechanism stands for a list of one."""
    if not isinstance(heads, (list, tuple)) or not any(isinstance(group, (list, tuple)) for group in heads):
        return head_list("TransformerConfig", heads)
    return tuple(head_list("TransformerConfig", group) for group in heads)


# ------------------------------------------------------------------------------------------------------------- training
Model = TransformerConfig | CoRelNetConfig | PrediNetConfig | AbstractorConfig
"""The models that a run can train: `models.build` has the network of each."""


@dataclass(frozen=True)
class Decay(Checked):
    """Which parameters weight decay applies to: always to weight matrices, to all others only if set here.

    Attributes:
        biases: Biases of linear maps, except those of q, k and v; scores of sinks.
        qkv_biases: Biases of q, k and v.
        norms: Scales and biases of norms.
        relative_bias: Tables of relative bias.
        embeddings: Tables of tokens, positions and symbols.
    """

    biases: bool = False
    qkv_biases: bool = False
    norms: bool = False
    relative_bias: bool = False
    embeddings: bool = False


@dataclass(frozen=True)
class Train(Checked):
    """AdamW with a linear warm-up from 0, then a cosine.

    Attributes:
        batch_size: Sequences of a step.
        lr: Learning rate after the warm-up.
        weight_decay: Decay of AdamW, on the parameters that `decay` names.
        betas: Decay rates of AdamW's two moments.
        eps: What AdamW adds to the square root of the second moment.
        warmup: Steps of the warm-up.
        final: The learning rate ends at `final` x lr.
        early_floor: End the cosine `warmup` steps early (the original HYLA code counted warm-up twice).
        clip: Largest gradient norm; None does not clip.
        precision: fp32, bf16 or fp16 for products.
        evaluate: Splits that are scored at the end and every `eval_every` steps.
        accumulate: Gradient accumulation: a batch is processed in this many equal parts, with less memory and the same
            gradient; each part draws its own dropout, and balances its own load of experts.
        eval_batches: Batches of a score.
        eval_every: Steps between scores.
        log_every: Steps between rows of metrics.
        save_every: Steps between checkpoints.
        keep: How many of the last checkpoints are kept.
    """

    steps: Count = 1000
    batch_size: Count = 128
    lr: Amount = 1e-3
    weight_decay: Amount = 0.1
    decay: Decay = Decay()
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: Amount = 1e-8
    warmup: Index = 100
    final: Amount = 0.1
    early_floor: bool = False
    clip: Positive | None = None
    precision: Annotated[str, choice(("fp32", "bf16", "fp16"))] = "fp32"
    evaluate: tuple[str, ...] = ("iid", "compositional")
    accumulate: Count = 1
    eval_batches: Count = 16
    eval_every: Count = non_semantic(500)
    log_every: Count = non_semantic(50)
    save_every: Count = non_semantic(500)
    keep: Count = non_semantic(2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.accumulate:
            raise ValueError(f"Train: accumulate must divide batch_size {self.batch_size} but is {self.accumulate}")


# ---------------------------------------------------------------------------------------------------------------- a run
@dataclass(frozen=True, repr=False)
class Run(Checked):
    """One training run: its task, model and training.  `repr` is short; `polyhead.config.to_dict` has every field.

    Attributes:
        name: The default folder is runs/NAME-DIGEST.
        seed: Seed of parameters, batches and dropout.
        device: auto, cpu, cuda or mps.
        compile: Compile the model by torch.compile.
        deterministic: Use deterministic algorithms only; an operation that has none raises an error.
        threads: Threads of PyTorch on the CPU; None: as many as it takes by itself.
        fast_products: On a CPU, compute float32 matrix products by oneDNN if a check finds that as exact.
        folder: Where the run is written.
        parallel: On several devices, each holds the whole model ("data") or a shard ("sharded"), and its part of the
            batch.
        track: Trackers beside metrics.jsonl: tensorboard, wandb.
    """

    task: Task
    model: Model
    name: str = non_semantic("run")
    train: Train = Train()
    seed: Seed = 0
    device: str = non_semantic("auto")
    compile: bool = non_semantic(False)
    deterministic: bool = non_semantic(False)
    threads: LayerCount | None = non_semantic(None)
    fast_products: bool = non_semantic(True)
    folder: str | None = non_semantic(None)
    parallel: Annotated[str, choice(("data", "sharded"))] = non_semantic("data")
    """On several devices: each holds the whole model ("data") or a shard ("sharded"), and its part of the batch."""
    track: tuple[str, ...] = non_semantic(())

    def __post_init__(self) -> None:
        super().__post_init__()
        # The name is a part of the folder's name, which a stranger's file must not move elsewhere.
        if not self.name.isprintable() or not self.name.strip(". ") or set(self.name) & {"/", "\\"}:
            raise ValueError(f"Run: name must be printable, without slashes, and not only dots, got {self.name!r}")
        if self.folder is not None and "\0" in self.folder:
            raise ValueError(f"Run: folder must be a path, got {self.folder!r}")

    def __repr__(self) -> str:
        task, model = type(self.task).__name__, type(self.model).__name__
        steps = f"{self.train.steps} steps of {self.train.batch_size}"
        return f"Run({self.name!r}, {task}, {model}, {steps}, seed={self.seed}, digest={digest(self)!r})"

    @property
    def transformer(self) -> TransformerConfig:
        """The model, if it is a transformer.  Raises ValueError for any other model."""
        if not isinstance(self.model, TransformerConfig):
            raise ValueError(f"{self.name}: the model must be a transformer, got a {type(self.model).__name__}")
        return self.model


def check_run(caller: str, run: object) -> None:
    """Raise ValueError unless this is a Run; the name of a recipe is not."""
    if not isinstance(run, Run):
        raise ValueError(f"{caller}: the run must be a Run, as RECIPES['fuzzy-hyla']() makes, got {run!r:.60}")


# ------------------------------------------------------------------------------------------------- the digest and files
def to_dict(config: Any, *, semantic: bool = False) -> Any:
    """`config` as JSON values: a dataclass becomes an object with its class name under "kind".

    Args:
        semantic: Omit the fields that cannot change the result of a run.
    """
    if is_dataclass(config) and not isinstance(config, type):
        values = {"kind": kind_of(type(config))}
        for field in fields(config):
            if not semantic or field.metadata.get("semantic", True):
                values[field.name] = to_dict(getattr(config, field.name), semantic=semantic)
        return values
    if isinstance(config, (list, tuple)):
        return [to_dict(item, semantic=semantic) for item in config]
    return config


def digest(config: Any) -> str:
    """Twelve hex digits of the JSON of `config` without its non-semantic fields: the id of a run, and of its folder."""
    text = json.dumps(to_dict(config, semantic=True), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


_UNIONS = (SymbolSource, Position, FeedForward, Input, Output, Model)
_KINDS = (*MECHANISMS, *itertools.chain.from_iterable(map(typing.get_args, _UNIONS)), Decay, Train, Run)


def save(config: Any, path: str | pathlib.Path) -> None:
    """Write `config` as JSON."""
    pathlib.Path(path).write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")


def load(path: str | pathlib.Path, kinds: Iterable[type] = ()) -> Any:
    """Read a run from a JSON or YAML file.  `kinds`: classes beyond this module's: `polyhead.tasks.KINDS`."""
    return from_dict(read_values(path), kinds, where=str(path))


def from_dict(data: Any, kinds: Iterable[type] = (), *, where: str = "config") -> Any:
    """The inverse of `to_dict`; `kinds`: see `load`.  Unknown fields, kinds, types are errors that name the field."""
    known = {cls.__name__: cls for cls in (*_KINDS, *kinds)}
    try:
        return serial.build(data, known, where, (Checked,))
    except RecursionError:
        raise ValueError(f"{where}: cannot be read (it is nested too deeply)") from None
