"""Mathematics: shapes, splits, repeatability, scores."""

import itertools
import re

import pytest
import torch
from maths_checker import fault
from torch.nn import functional as F

from polyhead.tasks import Maths
from polyhead.tasks.maths import modules as maths_modules
from polyhead.tasks.maths.modules import LEVELS, MODULES, Level
from polyhead.tasks.maths.text import END, PAD, START, VOCABULARY

SPLITS = ("train", "validation", "iid", "compositional", "novel")


def texts(task, split, batches=4, size=64, seed=0):
    return [pair for step in range(batches) for pair in task.texts(task.batch(split, size, seed=seed, step=step))]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("split", SPLITS)
def test_a_batch_spells_questions_and_their_right_answers(module, split):
    task = Maths(module, "mixed")
    batch = task.batch(split, 16, seed=0, step=0)
    assert task.length == 31
    assert batch.mask is None
    assert {x.dtype for x in (batch.source, batch.inputs, batch.targets)} == {torch.int64}
    for i, (question, answer) in enumerate(task.texts(batch)):
        assert fault(module, question, answer) is None
        q, a = ([ord(c) - 29 for c in text] for text in (question, answer))
        assert batch.source[i].tolist() == q + [PAD] * (160 - len(q))
        assert batch.source_mask[i].tolist() == [True] * len(q) + [False] * (160 - len(q))
        assert batch.inputs[i].tolist() == [START, *a] + [PAD] * (30 - len(a))
        assert batch.targets[i].tolist() == [*a, END] + [PAD] * (30 - len(a))
        assert batch.scored[i].tolist() == [True] * (len(a) + 1) + [False] * (30 - len(a))
        assert batch.latents["question_length"][i] == len(q)
        assert batch.latents["answer_length"][i] == len(a)


def test_few_questions_are_all_seen_and_yet_none_is_shared(monkeypatch):
    """Training repeats itself here, so that a split by chance alone would be caught."""
    monkeypatch.setitem(LEVELS["algebra__linear_1d"], "easy", Level((2, 2), 4))
    monkeypatch.setattr(maths_modules, "LETTERS", "xy")
    task = Maths("algebra__linear_1d", "easy")
    questions_by_split = {split: [q for q, _ in texts(task, split, 1, 300)] for split in ("train", "validation", "iid")}
    assert all(len(questions) > 2 * len(set(questions)) for questions in questions_by_split.values())
    for first, second in itertools.combinations(questions_by_split.values(), 2):
        assert not set(first) & set(second)


def parts(module, question):
    """What `Level.parts` counts, read off the text."""
    if module == "algebra__linear_1d":
        return len([term for term in re.split(r" [-+=] ", question[6:-7]) if term != "0"])
    if module == "algebra__sequence_next_term":
        row, degree = [int(n) for n in re.findall(r"-?\d+", question)], 0
        while len(set(row)) > 1:
            row, degree = [b - a for a, b in itertools.pairwise(row)], degree + 1
        return degree
    if module == "calculus__differentiate":
        return len(re.split(r" [-+] ", question))
    if module == "polynomials__add":  # the terms of the first polynomial, after collecting
        letter = question[6]
        sums = {}
        for sign, term in re.findall(r"(^|[-+] |-)([^ ]+)", question.split(" = ")[1].split(". ")[0]):
            key = term.partition(letter)[2] if letter in term else "constant"
            number = int(re.match(r"\d+|", term)[0] or 1)
            sums[key] = sums.get(key, 0) + (-number if "-" in sign else number)
        return len([value for value in sums.values() if value])
    return question.count("(")


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("difficulty", ["easy", "mixed"])
def test_extrapolation_is_longer_or_larger_than_training_ever_is(module, difficulty):
    task = Maths(module, difficulty)
    levels = [LEVELS[module][d] for d in (("easy", "medium", "hard") if difficulty == "mixed" else (difficulty,))]
    longest, size = max(level.parts[1] for level in levels), max(level.size for level in levels)
    measured = {
        split: [(parts(module, q), max(map(int, re.findall(r"\d+", q)))) for q, _ in texts(task, split, 1, 40)]
        for split in ("train", "compositional", "novel")
    }
    lengths, numbers = zip(*measured["train"], strict=True)
    assert max(lengths) == longest
    assert size / 4 < max(numbers) <= size
    longer, larger = measured["compositional"], measured["novel"]
    assert {length for length, _ in longer} == {longest + 1}
    assert max(number for _, number in longer) <= size
    assert min(number for _, number in larger) > size
    assert max(length for length, _ in larger) <= longest


def test_scores_by_hand():
    task = Maths("algebra__linear_1d", "easy")
    batch = task.batch("train", 4, seed=0, step=0)
    answer_lengths = batch.latents["answer_length"]
    logits = F.one_hot(batch.targets, VOCABULARY).float() * 9
    # Wrong are the first character, the end, and padding, which is free.
    for row, position in ((0, 0), (1, answer_lengths[1]), (2, answer_lengths[2] + 1)):
        logits[row, position] = logits[row, position].roll(1)
    scores = task.metrics(logits, batch)
    assert scores["exact_match"].tolist() == [0, 0, 1, 1]
    scored = (answer_lengths + 1).float()
    expected = torch.tensor([1 - 1 / scored[0], 1 - 1 / scored[1], 1, 1])
    torch.testing.assert_close(scores["character_accuracy"], expected)
    terms = [-logits[b, t].log_softmax(dim=0)[batch.targets[b, t]] for b, t in batch.scored.nonzero().tolist()]
    torch.testing.assert_close(task.loss(logits, batch), torch.stack(terms).mean())
    assert len(terms) == scored.sum()
