"""What a task is: a stream of batches with a loss and metrics.  Neither torch nor jax is imported."""

import abc
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from polyhead.config.components import Classes, Input, Output
from polyhead.config.serial import Checked
from polyhead.config.words import Words


def stream(seed: int, name: str, step: int = 0) -> int:
    """A seed of 63 bits for one consumer of randomness: `stream(0, "fuzzy_logic/compositional", 17)`.

    Streams are counter-based: a batch is a pure function of (seed, name, step), so there is no generator state to
    store, and two names never share draws.
    """
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


Array = Any
"""A tensor of either side."""


@dataclass(frozen=True)
class Batch:
    """One draw of a task.  `inputs` (b t c) or (b t); `targets` (b t c) or (b t) at all positions; `mask` (b s): a
    real token, None when all are; `scored` (b t): counts in loss and metric; `latents`: the task's ground truth, by
    name, (b ...).  `source` (b s) or (b s c) and `source_mask` (b s): what an encoder reads, where there is one.  Of a
    task that classifies, `targets` and `scored` are (b 1); images are (b c height width)."""

    inputs: Array
    targets: Array
    mask: Array | None
    scored: Array
    latents: dict[str, Array]
    source: Array | None = None
    source_mask: Array | None = None

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
        def field(name: str) -> Array | None:
            return None if getattr(batches[0], name) is None else join([getattr(batch, name) for batch in batches])

        latents = {name: join([batch.latents[name] for batch in batches]) for name in batches[0].latents}
        return cls(**{name: field(name) for name in cls._arrays()}, latents=latents)

    @classmethod
    def _arrays(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name != "latents"]

    def map(self, function: Callable[[Array], Array]) -> "Batch":
        """The batch with `function` of every array it holds."""
        given = {name: getattr(self, name) for name in self._arrays()}
        arrays = {name: None if array is None else function(array) for name, array in given.items()}
        return Batch(**arrays, latents={name: function(value) for name, value in self.latents.items()})


@dataclass(frozen=True)
class Task(Checked, abc.ABC):
    """A stream of data with a loss and metrics.  It knows no network."""

    name: ClassVar[str]  # of its seed streams: "fuzzy_logic"
    metric: ClassVar[str]  # the headline among `metrics`
    items: ClassVar[str] = "sequences"  # what a reader calls what it scores one by one
    better: ClassVar[str] = "higher"  # or "lower": which scores of the headline are good
    lazy: ClassVar[bool] = False  # whether loss and metrics also take logits that are never made, tasks.task.LazyLogits
    words: ClassVar[Words] = Words()  # what reports print about it

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The splits it has, of `train`, `validation`, `iid`, `compositional`, `novel`."""

    @property
    @abc.abstractmethod
    def ends(self) -> tuple[Input, Output]:
        """What a transformer needs at its two ends."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Tokens in a sequence."""

    @property
    def source(self) -> Input | None:
        """What an encoder needs at its input end; None for a task without one."""
        return None

    @property
    def source_length(self) -> int:
        """The largest number of tokens an encoder reads.  Default: the length of the sequence."""
        return self.length

    @property
    def tail(self) -> int | None:
        """How many positions at the end are ever scored; None when any may be."""
        return None

    @property
    def pairs(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Named lists of (query, key) positions whose latent code is worth a look; by default the last token's own."""
        return {"self": ((-1, -1),)}

    def count(self, split: str) -> int | None:
        """How many sequences a held-out split has, each in one of its first batches; None: each batch is drawn anew."""
        return None

    @abc.abstractmethod
    def sample(self, split: str, batch_size: int, generator: Any) -> Batch:
        """A batch on the generator's device."""

    def contrasts(self, split: str, batch_size: int, generator: Any) -> tuple[Batch, Batch]:
        """Two batches whose sequences have the same inputs, one by one, and different rules.

        ValueError of a task that has no such pairs.
        """
        raise ValueError(f"{type(self).__name__}: has no sequences that differ in their rule alone")

    @abc.abstractmethod
    def loss(self, outputs: Array, batch: Batch) -> Array:
        """Mean loss over scored positions: a scalar."""

    @abc.abstractmethod
    def metrics(self, outputs: Array, batch: Batch) -> dict[str, Array]:
        """Per-sequence scores (b,) by name: their mean over batches is the reported figure."""

    def gain(self, score: float) -> float:
        """A score of the headline metric with its sign changed where lower is better: for ranking."""
        return score if self.better == "higher" else -score

    def derived(self, scores: dict[str, float]) -> dict[str, float]:
        """Scores that follow from those of a whole evaluation, `loss` and the means of the metrics: by default none."""
        return {}

    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...] | None:
        """Names of the tokens of the first sample of `batch`, or of its source; None: numbers will do."""
        return None

    def class_name(self, target: str, label: int) -> str:
        """The name of class `label` of `target`, a label that `analysis.targets` finds in a batch."""
        return str(label)

    def asked(self, batch: Batch, sample: int) -> str:
        """What one sample asks, printed before the answer."""
        return "Class" if isinstance(self.ends[1], Classes) else "Answer"

    def written(self, answer: Sequence[int]) -> str:
        """An answer, the classes at the scored positions, as a reader sees it."""
        return " ".join(map(str, answer))

    def keep(self, folder: str | os.PathLike[str]) -> None:
        """Write into a run's folder, as the run begins, what its model needs to be used without the data."""

    def batch(self, split: str, batch_size: int, *, seed: int, step: int, device: Any = "cpu") -> Batch:
        """Batch number `step` of `split`: a pure function of (seed, split, step)."""
        return self.sample(split, batch_size, self.generator(split, seed=seed, step=step, device=device))

    def batches(self, split: str, batch_size: int, *, seeds: Sequence[int], step: int, device: Any = "cpu") -> Batch:
        """`batch` for each of `seeds`, stacked: inputs (n b t c) and so on.

        A task that can draw all of them at once overrides this, with the same values: on a GPU each launch costs time.
        """
        return Batch.stack([self.batch(split, batch_size, seed=seed, step=step, device=device) for seed in seeds])

    def generator(self, split: str, *, seed: int, step: int, device: Any = "cpu") -> Any:
        """The generator that batch number `step` of `split` is drawn from."""
        import torch

        return torch.Generator(device).manual_seed(stream(seed, f"{self.name}/{split}", step))
