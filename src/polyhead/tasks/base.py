"""The abstract task: a stream of batches with a loss and metrics, and the words that reports print about it."""

import abc
import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from polyhead.config import checked
from polyhead.config.components import Input, Output
from polyhead.spec.shapes import one_of


# ----------------------------------------------------------------------------------------------------------- randomness
def stream(seed: int, name: str, step: int = 0) -> int:
    """A seed of 63 bits for one consumer of randomness: `stream(0, "fuzzy_logic/compositional", 17)`.

    Streams are counter-based: a batch is a pure function of (seed, name, step).  So no generator state is stored, and
    streams of different names are independent.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


# -------------------------------------------------------------------------------------------------------------- batches
Array = Any
"""A PyTorch tensor or a JAX array."""


@dataclass(frozen=True, repr=False)
class Batch:
    """One batch of a task; its `repr` has the shapes.

    `inputs`: (b t c), (b t), or images (b c height width).  `targets`: (b t c) or (b t), at all positions.  `mask` (b
    s): True at real tokens; None if all are.  `scored` (b t): True at positions that enter loss and metrics.
    `latents`: the task's ground truth by name, (b ...).  `source` (b s) or (b s c) and `source_mask` (b s): the inputs
    of an encoder, if the task has one.  For classification, `targets` and `scored` are (b 1)."""

    inputs: Array
    targets: Array
    mask: Array | None
    scored: Array
    latents: dict[str, Array]
    source: Array | None = None
    source_mask: Array | None = None

    def __repr__(self) -> str:
        arrays = {}
        for part in fields(self):
            if part.name != "latents":
                arrays[part.name] = getattr(self, part.name)
        for label, array in self.latents.items():
            arrays[f"latents[{label!r}]"] = array
        shapes = [f"{name} {tuple(array.shape)}" for name, array in arrays.items() if array is not None]
        return f"Batch({', '.join(shapes)})"

    @classmethod
    def cat(cls, batches: "Sequence[Batch]") -> "Batch":
        """Concatenate batches along their first dimension; a batch without a mask has real tokens only."""
        if not batches:
            raise ValueError("Batch: at least one batch was wanted but none came")
        sizes = [len(batch.scored) for batch in batches]
        parts: dict[str, Array] = {"latents": {}}
        for part in fields(cls):
            if part.name != "latents":
                parts[part.name] = _joined(part.name, [getattr(batch, part.name) for batch in batches], sizes)
        for label in dict.fromkeys(itertools.chain.from_iterable(batch.latents for batch in batches)):
            arrays = [batch.latents.get(label) for batch in batches]
            parts["latents"][label] = _joined(f"latents[{label!r}]", arrays, sizes)
        return cls(**parts)

    def map(self, function: Callable[[Array], Array]) -> "Batch":
        """The batch with `function` applied to each array."""
        latents = {label: function(array) for label, array in self.latents.items()}
        parts = {}
        for part in fields(self):
            array = getattr(self, part.name)
            if part.name != "latents" and array is not None:
                parts[part.name] = function(array)
        return replace(self, **parts, latents=latents)

    def to(self, device: object, *, non_blocking: bool = False) -> "Batch":
        """The batch of PyTorch tensors on a device; accelerate and Lightning move batches by this method."""
        return self.map(lambda array: array.to(device, non_blocking=non_blocking))


def _joined(name: str, arrays: list[Array], sizes: list[int]) -> Array:
    """The arrays of one part, one of each batch, as one; None if no batch has that part."""
    import torch

    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if name in ("mask", "source_mask"):
        for i, array in enumerate(arrays):
            if array is None:
                arrays[i] = present[0].new_ones((sizes[i], *present[0].shape[1:]))
    elif len(present) < len(arrays):
        raise ValueError(f"Batch: {name} must be in all batches or in none, but is in some of {len(arrays)}")
    return torch.cat(arrays)


# ---------------------------------------------------------------------------------------------------------------- words
SPLIT_NAMES = {
    "train": "training data",
    "validation": "validation data",
    "iid": "fresh data",
    "compositional": "unseen combinations",
    "novel": "what was never seen in training",
}
"""Names of splits, for tasks that do not name them."""


@dataclass(frozen=True)
class Baseline:
    """A baseline score without training.

    `label` is its name; `does` completes "a predictor that ...".  `drawn`: figures show it as a line.
    """

    label: str
    does: str
    drawn: bool = False


@dataclass(frozen=True)
class Words:
    """The words of a task.

    `splits`: names of splits ("new shapes"), if the usual ones are not clear.  `metric`: the name of the main metric
    and its meaning.  `baselines`: by their names in `task.baselines`.  `part`: what a task combines ("term"), for
    reports on the latent code.
    """

    splits: Mapping[str, str] = field(default_factory=dict)
    metric: tuple[str, str] | None = None
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    part: str = "part"


# ---------------------------------------------------------------------------------------------------------------- tasks
@dataclass(frozen=True)
class Task(checked.Task, abc.ABC):
    """A stream of data with a loss and metrics.  It does not depend on any network."""

    name: ClassVar[str]  # name of its seed streams, such as "fuzzy_logic"
    metric: ClassVar[str]  # the main metric among `metrics`
    items: ClassVar[str] = "sequences"  # the word for the items that it scores
    better: ClassVar[str] = "higher"  # or "lower": whether high or low scores of the main metric are good
    lazy: ClassVar[bool] = False  # whether loss and metrics also take LazyLogits (tasks/task.py)
    autoregressive: ClassVar[bool] = False  # whether its inputs hold earlier targets: only for causal models
    words: ClassVar[Words] = Words()  # words that reports print about it

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(type(self).__name__, "better", self.better, ("higher", "lower"))

    # ------------------------------------------------------------------------------------------- what a model must know
    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """Its splits, among `train`, `validation`, `iid`, `compositional`, `novel`."""

    @property
    @abc.abstractmethod
    def ends(self) -> tuple[Input, Output]:
        """The configurations of a transformer's inputs and outputs."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Tokens in a sequence."""

    @property
    def source(self) -> Input | None:
        """The configuration of an encoder's inputs; None for a task without an encoder."""
        return None

    @property
    def source_length(self) -> int:
        """The largest number of tokens an encoder reads."""
        return self.length

    @property
    def tail(self) -> int | None:
        """Only the last `tail` positions are ever scored; None if any position may be."""
        return None

    @property
    def pairs(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Named lists of (query, key) positions whose latent code reports show; by default the last token with
        itself."""
        return {"self": ((-1, -1),)}

    # ------------------------------------------------------------------------------------------------------------- data
    def count(self, split: str) -> int | None:
        """The number of sequences of a finite held-out split, all in its first batches; None: every batch is drawn."""
        return None

    def shared(self, split: str) -> bool:
        """Whether the sequences of a finite held-out split are the same for all seeds, so that all runs share their
        sampling error."""
        return False

    @abc.abstractmethod
    def sample(self, split: str, batch_size: int, generator: Any) -> Batch:
        """A batch on the generator's device."""

    def contrasts(self, split: str, batch_size: int, generator: Any) -> tuple[Batch, Batch]:
        """Two batches whose sequences have pairwise the same inputs and different rules.

        Raises ValueError for a task without such pairs.
        """
        raise ValueError(f"{type(self).__name__}: has no sequences that differ in their rule alone")

    # ----------------------------------------------------------------------------------------------------------- scores
    @abc.abstractmethod
    def loss(self, outputs: Array, batch: Batch) -> Array:
        """Mean loss over scored positions: a scalar; 0 if there are none, as in a part of an accumulated batch."""

    @abc.abstractmethod
    def metrics(self, outputs: Array, batch: Batch) -> dict[str, Array]:
        """Per-sequence scores (b,) by name: their mean over batches, weighted by `amounts`, is the reported figure.

        No name may be that of another score or column: "loss", "sequences", "step", "seconds", "lr", ..., and with
        "r2" also "r2_se"."""

    def amounts(self, batch: Batch) -> Array | None:
        """How much each sequence (b) counts in the means of `metrics`; None: all count the same."""
        return None

    def gain(self, score: float) -> float:
        """A score of the main metric for ranking: negated if lower is better."""
        return score if self.better == "higher" else -score

    def derived(self, scores: dict[str, float]) -> dict[str, float]:
        """Scores computed from those of a whole evaluation: `loss` and the means of the metrics.  By default none."""
        return {}

    # ------------------------------------------------------------------------------------------------------------ words
    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...] | None:
        """Names of the tokens of the first sample of `batch`, or of its source; None: reports show numbers."""
        return None

    def class_name(self, target: str, label: int) -> str:
        """The name of class `label` of `target`: "answer", or one of the labels of `analysis.targets`."""
        return str(label)

    def split_name(self, split: str) -> str:
        """The name of a split in tables and figures: that of `words`, or a usual one."""
        if split in self.words.splits:
            return self.words.splits[split]
        if split == "iid" and "compositional" in self.splits:
            return "known combinations"
        return SPLIT_NAMES.get(split, split.replace("_", " "))

    # ------------------------------------------------------------------------------------------------------------- runs
    def keep(self, folder: str | os.PathLike[str]) -> None:
        """At the start of a run, write to its folder which data these are, and what the model needs without them.

        Raises ValueError if the run in the folder was begun with other data.
        """

    def batch(self, split: str, batch_size: int, *, seed: int, step: int, device: Any = "cpu") -> Batch:
        """Batch number `step` of `split`: a pure function of (seed, split, step)."""
        return self.sample(split, batch_size, self.generator(split, seed=seed, step=step, device=device))

    def generator(self, split: str, *, seed: int, step: int, device: Any = "cpu") -> Any:
        """The random generator of batch number `step` of `split`.  Raises ValueError for a split that it lacks."""
        import torch

        one_of(type(self).__name__, "split", split, self.splits)
        return torch.Generator(device).manual_seed(stream(seed, f"{self.name}/{split}", step))
