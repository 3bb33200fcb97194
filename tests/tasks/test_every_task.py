"""What every task promises: batches that repeat, splits that share nothing, scores, errors of one line."""

import dataclasses
import hashlib
import itertools
import math
import sys

import pytest
import torch
from some import some
from torch.nn import functional as F

from polyhead import config, tasks

PINNED = {
    "uniform": (tasks.FuzzyLogic(length=8), "675a7f9a"),
    "fixed_context": (tasks.FuzzyLogic(length=6, inputs="fixed_context"), "d120295b"),
    "sraven": (tasks.Sraven(), "6c89c07b"),
    "games": (tasks.RelationalGames("between", examples=200), "b43f6f0f"),
    "sorting": (tasks.ObjectSorting(noise=0.5), "624af3ec"),
    "pairs": (tasks.PairwiseOrder(), "ce84e6bf"),
    "cards": (tasks.SetCards(), "2b87809d"),
    "maths": (tasks.Maths("calculus__differentiate", "easy"), "8ea50254"),
    "images": (tasks.Images(shift=1, flip=True), "c84ed23a"),
    "text": (tasks.Text(length=16), "3a0dd8ff"),
}
"""At least one of every kind, and one for each way to draw; with a hash of its first batch: of its integers, and of the
inputs of fuzzy logic, which are exact everywhere."""

TASKS = {name: task for name, (task, _) in PINNED.items()}


@pytest.fixture(scope="module", params=TASKS)
def task(request, tmp_path_factory):
    if request.param != "text":
        return TASKS[request.param]
    folder = tmp_path_factory.mktemp("text")
    (folder / "one.txt").write_text("".join(f"line {number} is é {number**2 % 977}\n" for number in range(1500)))
    return tasks.Text(str(folder / "one.txt"), length=16, folder=str(folder / "cache"))


def arrays(batch):
    fields = {name: getattr(batch, name) for name in ("inputs", "targets", "scored", "mask", "source", "source_mask")}
    return {name: array for name, array in {**fields, **batch.latents}.items() if array is not None}


def same(a, b):
    a, b = arrays(a), arrays(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def fingerprint(batch):
    exact = {name: array for name, array in arrays(batch).items() if not array.is_floating_point()}
    exact |= {"inputs": batch.inputs} if "terms" in batch.latents else {}
    return hashlib.blake2b(b"".join(exact[name].numpy().tobytes() for name in sorted(exact)), digest_size=4).hexdigest()


def sequences(batch):
    """What a model reads of each sequence."""
    return {row.numpy().tobytes() for row in (batch.inputs if batch.source is None else batch.source)}


def differ(a, b):
    """Whether two draws have no latent in common; the bytes of a window of text are always as many."""
    return all(name == "bytes" or not torch.equal(array, b.latents[name]) for name, array in a.latents.items())


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def clear_caches():
    """As in a new process."""
    for name, module in list(sys.modules.items()):
        if name.startswith("polyhead.tasks."):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


# -------------------------------------------------------------------------------------------------------------- batches
def test_no_release_changes_a_batch(task, request):
    assert fingerprint(task.batch("train", 16, seed=0, step=0)) == PINNED[request.node.callspec.params["task"]][1]


def test_a_batch_is_a_function_of_seed_split_and_step(task):
    for split in task.splits:
        first = task.batch(split, 16, seed=0, step=3)
        task.sample(split, 4, generator())
        task.batch("train", 5, seed=1, step=0)
        clear_caches()
        assert same(first, task.batch(split, 16, seed=0, step=3))
        seed, step = task.batch(split, 16, seed=1, step=3), task.batch(split, 16, seed=0, step=4)
        assert sequences(first) != sequences(step)
        # What is held out of a text comes in one order, so that all seeds are scored on the same windows.
        assert (sequences(first) == sequences(seed)) == (task.name == "text" and split != "train")
        if task.name in ("fuzzy_logic", "sraven"):  # always fresh
            assert not sequences(first) & (sequences(seed) | sequences(step))


def test_no_sequence_is_in_two_splits_even_from_generators_in_one_state(task):
    for a, b in itertools.combinations([task.sample(split, 64, generator()) for split in task.splits], 2):
        assert not sequences(a) & sequences(b)
        assert differ(a, b)


def test_a_generator_moves_on_and_repeats(task):
    rng = generator()
    draws = [task.sample("train", 16, rng) for _ in range(3)]
    for a, b in itertools.combinations(draws, 2):
        assert sequences(a) != sequences(b)
        assert differ(a, b)
    rng = generator()
    assert all(same(draw, task.sample("train", 16, rng)) for draw in draws)


def test_draws_ignore_and_spare_the_global_generator_and_dtype(task):
    def draw(seed):
        torch.manual_seed(seed)
        clear_caches()
        rng, state = generator(), torch.get_rng_state()
        draws = [task.sample(task.splits[-1], 4, rng) for _ in range(2)]
        assert torch.equal(state, torch.get_rng_state())
        return draws

    first = draw(1)
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"):
        assert all(map(same, first, draw(2)))


# --------------------------------------------------------------------------------------------------------------- scores
def perfect(task, batch):
    return batch.targets if task.name == "fuzzy_logic" else F.one_hot(batch.targets, task.ends[1].count) * 99.0


def test_perfect_outputs_score_one_and_equal_ones_the_logarithm_of_their_number(task):
    batch = task.batch("iid" if "iid" in task.splits else "validation", 8, seed=0, step=0)
    outputs = perfect(task, batch)
    scores, loss = task.metrics(outputs, batch), task.loss(outputs, batch)
    assert task.metric in scores
    assert {score.shape for score in scores.values()} == {(8,)}
    expected = {"mse": 0, "bits_per_byte": 0}
    assert all(torch.equal(score, torch.full((8,), expected.get(name, 1.0))) for name, score in scores.items())
    assert loss == 0
    if task.name != "fuzzy_logic":
        torch.testing.assert_close(task.loss(0 * outputs, batch), torch.tensor(math.log(task.ends[1].count)))


def test_outputs_that_are_no_numbers_are_never_right(task):
    """For `argmax` NaN is the largest: the answer was class 0, or the first one with NaN, here the right one."""
    batch = task.batch("iid" if "iid" in task.splits else "validation", 8, seed=0, step=0)
    outputs = perfect(task, batch).float()
    correct = outputs == outputs.amax(dim=-1, keepdim=True)
    for broken in (outputs * math.nan, outputs.masked_fill(correct, math.nan)):
        scores = task.metrics(broken, batch)
        assert not any((scores[name] > 0).any() for name in scores if name not in ("mse", "bits_per_byte"))


def test_half_precision_is_scored_in_float32_and_double_stays_double(task):
    batch = task.batch("train", 4, seed=0, step=0)
    outputs = torch.randn(perfect(task, batch).shape, generator=generator()).bfloat16()
    for dtype, expected_dtype in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        loss, scores = task.loss(outputs.to(dtype), batch), task.metrics(outputs.to(dtype), batch)
        assert {loss.dtype, scores[task.metric].dtype} == {expected_dtype}
        torch.testing.assert_close(loss.float(), task.loss(outputs.float(), batch))
        for name, score in some(task.metrics(outputs.float(), batch).items()):
            torch.testing.assert_close(scores[name].to(score.dtype), score)


def test_a_part_of_a_batch_that_scores_nothing_has_no_loss(task):
    if task.name not in ("fuzzy_logic", "maths", "text"):  # of the others all sequences are scored
        return
    batch = task.batch("train", 6, seed=0, step=0)
    outputs = torch.randn(perfect(task, batch).shape, requires_grad=True)
    loss = task.loss(outputs, dataclasses.replace(batch, scored=torch.zeros_like(batch.scored)))
    loss.backward()
    assert (loss.item(), outputs.grad.abs().max().item()) == (0, 0)


def test_outputs_of_another_shape_are_an_error_and_not_a_broadcast(task):
    if task.name == "text":
        return  # it also takes logits that are never made
    batch = task.batch("train", 4, seed=0, step=0)
    outputs = perfect(task, batch)
    message = rf"^{type(task).__name__}: outputs must (be logits|have the targets' shape) \(.*\) but have \([^\n]*\)$"
    for score, misshapen in itertools.product((task.loss, task.metrics), (outputs[:1], outputs[..., :-1])):
        with pytest.raises(ValueError, match=message):
            score(misshapen.float(), batch)


def test_baselines_repeat_and_ignore_the_default_dtype(task):
    if not hasattr(task, "baselines"):
        return  # there is none for mathematics

    def means(seed=0):
        scores = task.baselines(task.splits[-1], sequences=40, seed=seed)
        return {name: score.mean for name, score in scores.items()}

    first = means()
    assert (first != means(seed=1)) == (task.name in ("fuzzy_logic", "sraven", "object_sorting"))  # others are exact
    torch.set_default_dtype(torch.float64)
    assert means() == first


# ---------------------------------------------------------------------------------------------------------- the surface
def test_a_run_of_it_is_a_value_and_the_folder_is_no_part_of_its_digest(task):
    assert {type(task) for task in TASKS.values()} == set(tasks.KINDS)
    run = config.Run(task, config.TransformerConfig(*task.ends))
    assert config.from_dict(config.to_dict(run), tasks.KINDS) == run
    if hasattr(task, "folder"):
        moved = dataclasses.replace(run, task=dataclasses.replace(task, folder="elsewhere"))
        assert (config.digest(moved) == config.digest(run)) == (task.name != "images")


def test_unknown_splits_and_empty_batches_are_one_line(task):
    class_name, names = type(task).__name__, ", ".join(task.splits)
    calls = [lambda split, n: task.batch(split, n, seed=0, step=0), lambda split, n: task.sample(split, n, generator())]
    for call in calls:
        with pytest.raises(ValueError, match=rf"^{class_name}: unknown split 'test' \(choose from {names}\)$"):
            call("test", 4)
        with pytest.raises(ValueError, match=rf"^{class_name}: batch_size must be at least 1 but is 0$"):
            call("train", 0)
        with pytest.raises(ValueError, match=rf"^{class_name}: batch_size must be an integer but is 2.0$"):
            call("train", 2.0)
    with pytest.raises(ValueError, match=rf"^{class_name}: step must be an integer but is 1.0$"):
        task.batch("train", 4, seed=0, step=1.0)
    for name in ("functions", "rules", "pairs_of", "triples", "levels", "baselines"):
        if hasattr(task, name):
            with pytest.raises(ValueError, match=rf"^{class_name}: unknown split 'test'"):
                getattr(task, name)("test")
    if hasattr(task, "baselines"):
        with pytest.raises(ValueError, match=r"^baselines: sequences must be at least 1 but is 0$"):
            task.baselines(task.splits[-1], sequences=0)
