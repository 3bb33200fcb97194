"""A transformer, its training and a run, as frozen dataclasses.  Runs with the same `digest` compute the same numbers,
up to rounding on another machine; fields that cannot change a result (device, folders, logging) stay out of it."""

import hashlib
import itertools
import json
import pathlib
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from polyhead.config import checked, components, mechanisms, serial
from polyhead.config.checked import Amount, Checked, Count, LayerCount, Rate, choice, non_semantic
from polyhead.config.components import Classes, FeedForward, Input, Mlp, Output, Patches, Position
from polyhead.config.mechanisms import MECHANISMS, Mechanism, RelativeSymbols, Softmax, SymbolHeads, SymbolSource
from polyhead.config.rivals import AbstractorConfig, CoRelNetConfig, PrediNetConfig
from polyhead.spec import NORM_ORDERS, NORMS, PRESETS
from polyhead.spec.files import read_values

if TYPE_CHECKING:
    from polyhead.tasks.base import Task
else:
    from polyhead.config.checked import Task

__all__ = ["Decay", "Heads", "Model", "Run", "Train", "TransformerConfig", "check_run", "digest", "from_dict"]
__all__ += ["head_list", "load", "save", "total_heads"]

Heads = tuple[Mechanism, ...]


# ------------------------------------------------------------------------------------------------------ the transformer
@dataclass(frozen=True)
class TransformerConfig(Checked):
    """The transformer.  `heads`: one list of head groups for all layers, or one list per layer (hybrid stacks).

    With an `encoder`, every layer also attends to that model's stream through `cross_heads`: by default softmax heads,
    as many as the layer has heads.
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
    """Biases on q, k, v and the output projection."""
    qk_norm: bool = False
    dropout: Rate = 0.0
    """Dropout rate on the latent code."""
    dropout_shared: bool = False
    """One dropout mask per layer, shared by batch and heads, instead of one per sample and head."""
    residual_dropout: Rate = 0.0
    init: Annotated[str, choice(PRESETS)] = "cs336"
    final_norm: bool | None = None
    """A norm after the last block; None: with pre-norm only."""
    encoder: "TransformerConfig | AbstractorConfig | None" = None
    cross_heads: Mechanism | Sequence[Mechanism] | None = None
    window: Count | None = None
    """A token attends to the tokens of its sequence that are fewer than `window` positions away."""
    checkpoint: bool = non_semantic(False)
    """Activation checkpointing: training saves only the inputs of blocks, and computes the rest again for gradients."""

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
    """Which parameters weight decay applies to: always to weight matrices, to all others only if set here."""

    biases: bool = False
    qkv_biases: bool = False
    norms: bool = False
    relative_bias: bool = False
    embeddings: bool = False


@dataclass(frozen=True)
class Train(Checked):
    """AdamW with a linear warm-up from 0 over `warmup` steps, then a cosine that ends at `final` x lr.

    The splits `evaluate` are scored at the end and every `eval_every` steps, on `eval_batches` batches each.
    `log_every` and `save_every` count steps, too.  `precision`: fp32, bf16 or fp16 for products.
    """

    steps: Count = 1000
    batch_size: Count = 128
    lr: Amount = 1e-3
    weight_decay: Amount = 0.1
    decay: Decay = Decay()
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: Amount = 1e-8
    warmup: checked.Index = 100
    final: Amount = 0.1
    early_floor: bool = False
    """End the cosine `warmup` steps early (the original HYLA code counted warm-up twice)."""
    clip: checked.Positive | None = None
    """Largest gradient norm; None does not clip."""
    precision: Annotated[str, choice(("fp32", "bf16", "fp16"))] = "fp32"
    evaluate: tuple[str, ...] = ("iid", "compositional")
    accumulate: Count = 1
    """Gradient accumulation: a batch is processed in this many equal parts, with less memory and the same gradient;
    each part draws its own dropout, and balances its own load of experts."""
    eval_batches: Count = 16
    eval_every: Count = non_semantic(500)
    log_every: Count = non_semantic(50)
    save_every: Count = non_semantic(500)
    keep: Count = non_semantic(2)
    """How many of the last checkpoints are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.accumulate:
            raise ValueError(f"Train: accumulate must divide batch_size {self.batch_size} but is {self.accumulate}")


# ---------------------------------------------------------------------------------------------------------------- a run
@dataclass(frozen=True, repr=False)
class Run(Checked):
    """One training run: its task, model and training.  `repr` is short; `polyhead.config.to_dict` has every field."""

    task: Task
    model: Model
    name: str = non_semantic("run")
    """The default folder is runs/NAME-DIGEST."""
    train: Train = Train()
    seed: checked.Seed = 0
    device: str = non_semantic("auto")
    """auto, cpu, cuda or mps."""
    compile: bool = non_semantic(False)
    """Compile the model by torch.compile."""
    deterministic: bool = non_semantic(False)
    """Use deterministic algorithms only; an operation that has none raises an error."""
    threads: LayerCount | None = non_semantic(None)
    """Threads of PyTorch on the CPU; None: as many as it takes by itself."""
    fast_products: bool = non_semantic(True)
    """On a CPU, compute float32 matrix products by oneDNN if a check finds that as exact."""
    folder: str | None = non_semantic(None)
    """Where the run is written."""
    parallel: Annotated[str, choice(("data", "sharded"))] = non_semantic("data")
    """On several devices: each holds the whole model ("data") or a shard ("sharded"), and its part of the batch."""
    track: tuple[str, ...] = non_semantic(())
    """Trackers beside metrics.jsonl: tensorboard, wandb."""

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
def digest(config: Any) -> str:
    """Twelve hex digits of the JSON of `config` without its non-semantic fields: the id of a run, and of its folder."""
    text = json.dumps(checked.to_dict(config, semantic=True), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


_UNIONS = (SymbolSource, Position, FeedForward, Input, Output, Model)
_KINDS = (*MECHANISMS, *itertools.chain.from_iterable(map(typing.get_args, _UNIONS)), Decay, Train, Run)


def save(config: Any, path: str | pathlib.Path) -> None:
    """Write `config` as JSON."""
    pathlib.Path(path).write_text(json.dumps(checked.to_dict(config), indent=2) + "\n", encoding="utf-8")


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
