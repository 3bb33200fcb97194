"""Mathematics in words, character by character: read a question, write its answer (Saxton et al. 2019).

    source    Solve 126*p = 110*p + 80 for p.       (b s) the characters of the question, then padding
    inputs    <start> 5                             (b t) the answer so far
    targets   5 <end>                               (b t) the next character of the answer

modules.py makes questions of five modules.  text.py reads the published files.
"""

import functools
import os
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from polyhead.config import Logits, Tokens, non_semantic
from polyhead.spec.checked import Count, choice
from polyhead.spec.home import located
from polyhead.spec.shapes import one_of, shaped
from polyhead.tasks import record
from polyhead.tasks.base import Batch, Task, Words, advance, check_draw, check_split, fork
from polyhead.tasks.maths import text as maths_text
from polyhead.tasks.maths.modules import DIFFICULTIES, LEVELS, MODULES, TRIES, Level, StableRandom, question
from polyhead.tasks.maths.text import END, PAD, START, VOCABULARY, Pair
from polyhead.tasks.scores import check_logits, token_guesses


@dataclass(frozen=True)
class Maths(Task):
    """Sequence-to-sequence mathematics: characters in, characters out.

        train           questions of the given difficulty
        validation      other questions, to select hyper-parameters
        iid             other questions, for reported scores: interpolation
        compositional   extrapolation in length: more parts (terms, factors, degrees) than any training question
        novel           extrapolation in size: the largest number exceeds all numbers of training

    No question is in two splits: a hash of its text decides between train, validation and iid.

    >>> task = Maths("calculus__differentiate", "easy")
    >>> print(*task.texts(task.batch("train", 1, seed=0, step=0))[0])
    What is the first derivative of -19*n**4 + 18*n**3 - 7*n**2? -76*n**3 + 54*n**2 - 14*n

    Attributes:
        module: The kind of question, one of `modules.MODULES`, or of the published files.
        difficulty: "easy", "medium", "hard", or "mixed": a third of each, as in the papers.
        question: Most characters of a question.  Longer ones are replaced, so all batches have one shape.
        answer: Most characters of an answer, likewise.
        data: "generated" uses our generators.  "original" reads the published files in `folder`: train from
            `train-easy/MODULE.txt` etc., iid from `interpolate`, novel from `extrapolate` (only for modules with a file
            there; none of our five has one).
        folder: Where the published files are.
    """

    module: str = "algebra__linear_1d"
    difficulty: Annotated[str, choice((*DIFFICULTIES, "mixed"))] = "easy"
    question: Count = 160
    answer: Count = 30
    data: Annotated[str, choice(("generated", "original"))] = "generated"
    folder: str = non_semantic("mathematics_dataset")

    name: ClassVar[str] = "maths"
    source: ClassVar[Tokens] = Tokens(VOCABULARY)
    ends: ClassVar[tuple[Tokens, Logits]] = (Tokens(VOCABULARY), Logits(VOCABULARY))
    metric: ClassVar[str] = "exact_match"
    items: ClassVar[str] = "questions"
    autoregressive: ClassVar[bool] = True
    words: ClassVar[Words] = Words(
        splits={"compositional": "longer questions than in training", "novel": "larger numbers than in training"},
        metric=("Exact match", "The share of answers that are right to the last character, including the end."),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data == "generated":
            one_of("Maths", "module", self.module, MODULES)

    @property
    def splits(self) -> tuple[str, ...]:
        splits = ("train", "validation", "iid")
        if self.data == "generated":
            return (*splits, "compositional", "novel")
        if self.module in maths_text.SUFFIXES:
            return (*splits, "novel")
        return splits

    @property
    def source_length(self) -> int:
        return self.question

    @property
    def length(self) -> int:
        """Tokens of the answer, including its end."""
        return self.answer + 1

    def levels(self, split: str) -> tuple[Level, ...]:
        """The levels of the generated questions of `split`; extrapolation exceeds the hardest training level."""
        check_split(self, split)
        if self.data != "generated":
            raise ValueError("Maths: the published questions have no levels")
        levels = [LEVELS[self.module][level] for level in maths_text.levels(self.difficulty)]
        if split == "compositional":
            return (levels[-1].longer(),)
        if split == "novel":
            return (levels[-1].larger(),)
        return tuple(levels)

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch on the generator's device: source (b s), inputs, targets (b t), latents question_length and
        answer_length (b), in characters."""
        check_draw(self, split, batch_size)
        device = generator.device
        draws = fork(generator, f"{self.name}/{split}/questions")
        if self.data == "generated":
            pairs = _draw(self, split, batch_size, draws.initial_seed())
            questions, answers = maths_text.tokens(pairs, (self.question, self.answer))
        else:
            questions, answers = _published(self, split, device, located(self.folder))
            rows = torch.randint(len(questions), (batch_size,), generator=draws, device=device)
            questions, answers = questions[rows], answers[rows]
        advance(generator)
        questions, answers = questions.to(device).long(), answers.to(device).long()
        lengths = (answers != PAD).sum(dim=1)  # (b)
        inputs = F.pad(answers, (1, 0), value=START)  # (b t)
        targets = F.pad(answers, (0, 1), value=PAD).scatter(1, lengths[:, None], END)
        scored = torch.arange(self.length, device=answers.device) <= lengths[:, None]
        real = questions != PAD  # (b s)
        latents = {"question_length": real.sum(dim=1), "answer_length": lengths}
        return Batch(inputs, targets, None, scored, latents, questions, real)

    def texts(self, batch: Batch) -> list[Pair]:
        """The questions and answers of a batch as text."""
        questions = maths_text.decode(batch.source)  # type: ignore[arg-type]
        return list(zip(questions, maths_text.decode(batch.targets), strict=True))

    def token_names(self, batch: Batch, *, source: bool = False) -> tuple[str, ...]:
        return maths_text.characters((batch.source if source else batch.inputs)[0].tolist())  # type: ignore[index]

    def class_name(self, target: str, label: int) -> str:
        (name,) = maths_text.characters([label])
        return {"␣": " ", "end": "", "-": "−"}.get(name, name)

    def keep(self, folder: str | os.PathLike[str]) -> None:
        """Write data.json with a fingerprint of the training questions, unless they are generated."""
        if self.data != "generated":
            fingerprint = record.fingerprint(_published(self, "train", torch.device("cpu"), located(self.folder)))
            record.keep("Maths", folder, f"{self.module} ({self.data})", fingerprint)

    @shaped
    def loss(self, outputs: Float[Tensor, "b t c"], batch: Batch) -> Float[Tensor, ""]:
        """Mean cross-entropy over the characters of the answers, including their ends."""
        logits, targets = check_logits(self, outputs, batch, VOCABULARY)[batch.scored], batch.targets[batch.scored]
        return F.cross_entropy(logits, targets, reduction="sum") / max(1, len(targets))

    @shaped
    def metrics(self, outputs: Float[Tensor, "b t c"], batch: Batch) -> dict[str, Float[Tensor, "b"]]:
        """For each sequence (b): `exact_match`, 1 if the whole answer and its end are right, and `character_accuracy`.

        Both use teacher forcing: the outputs saw the true answer so far.  The exact match equals that of greedy
        decoding, whose input is the same until its first mistake.
        """
        logits = check_logits(self, outputs, batch, VOCABULARY)
        right = (token_guesses(logits) == batch.targets) & batch.scored  # (b t)
        exact = (right | ~batch.scored).all(dim=1).to(logits.dtype)
        character_accuracy = right.sum(dim=1) / batch.scored.sum(dim=1).to(logits.dtype)
        return {"exact_match": exact, "character_accuracy": character_accuracy}


def _draw(task: Maths, split: str, count: int, seed: int) -> list[Pair]:
    """`count` questions of `split`, drawn with `seed`."""
    dice = StableRandom(seed)
    levels = task.levels(split)
    tries = 0
    questions: list[Pair] = []
    level: Level | None = None
    # Any bucket will do for questions that training cannot contain.
    buckets = {"validation": (0,), "iid": (1,), "train": range(2, maths_text.BUCKETS)}.get(split)
    while len(questions) < count:
        # A question that is drawn again keeps its level: hard ones are more often too long.
        if level is None:
            level = levels[0]
            if len(levels) > 1:
                level = dice.pick(levels)
        pair = question(task.module, level, dice)
        tries += 1
        if tries > TRIES * (len(questions) + 1):
            raise ValueError(
                f"Maths: {tries} draws gave no question of {split!r} within {task.question} characters and an answer "
                f"within {task.answer}; allow more"
            )
        if pair is None or len(pair[0]) > task.question or len(pair[1]) > task.answer:
            continue
        if buckets is None or maths_text.bucket(pair[0]) in buckets:
            questions.append(pair)
            level = None
    return questions


@functools.lru_cache(maxsize=8)
def _published(task: Maths, split: str, device: torch.device, folder: str) -> tuple[Tensor, Tensor]:
    """The published questions of a split and their answers, as tokens (uint8)."""
    check_split(task, split)
    pairs = maths_text.from_files(folder, task.module, task.difficulty, (task.question, task.answer))[split]
    if not pairs:
        raise ValueError(f"Maths: no question of {task.module} is left for {split!r}; give more questions")
    questions, answers = maths_text.tokens(pairs, (task.question, task.answer))
    return questions.to(device), answers.to(device)
