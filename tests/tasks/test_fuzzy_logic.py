"""Fuzzy logic: the Zadeh operators, the contents of a batch, random streams, loss and metrics."""

import dataclasses
import doctest
import itertools

import numpy as np
import pytest
import torch
from some import some

from polyhead import config
from polyhead.tasks import KINDS, FuzzyLogic
from polyhead.tasks.fuzzy_logic import task as fuzzy_logic
from polyhead.tasks.fuzzy_logic.task import zadeh

SPLITS = ("train", "validation", "iid", "compositional", "novel")


def by_hand(x, terms, variables):
    """f(x) in plain Python: x a list of floats, terms a list of term indices."""
    values = []
    for term in terms:
        bits = f"{term:0{variables}b}"
        values.append(min(v if bit == "1" else 1 - v for v, bit in zip(x, bits, strict=True)))
    return max(values)


# ------------------------------------------------------------------------------------------ operators
def test_worked_example():
    found = zadeh(torch.tensor([[[0.1, 0.3, 0.8, 0.4]]]), torch.tensor([[2, 7]]))
    torch.testing.assert_close(found, torch.tensor([[0.6]]))
    assert doctest.testmod(fuzzy_logic).attempted >= 2
    assert doctest.testmod(fuzzy_logic).failed == 0


@pytest.mark.parametrize("variables", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_zadeh_is_boolean_logic_on_all_corners(variables, count):
    corners = list(itertools.product([False, True], repeat=variables))
    combinations = list(itertools.combinations(range(2**variables), min(count, 2**variables)))
    x = torch.tensor(corners).float().expand(len(combinations), -1, -1)
    found = zadeh(x, torch.tensor(combinations))
    for row, combination in some(zip(found.tolist(), combinations, strict=True)):
        signs = [[bit == "1" for bit in f"{term:0{variables}b}"] for term in combination]
        truth = [any(all(v == s for v, s in zip(corner, sign, strict=True)) for sign in signs) for corner in corners]
        assert row == [float(value) for value in truth]


def test_zadeh_is_the_equation_on_fuzzy_inputs():
    x = torch.rand(6, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = torch.tensor([[0, 1, 2], [3, 4, 7], [0, 6, 7], [1, 3, 5], [2, 4, 6], [5, 6, 7]])
    found = zadeh(x, terms)
    for b, t in itertools.product(range(6), range(5)):
        assert found[b, t].item() == by_hand(x[b, t].tolist(), terms[b].tolist(), 3)


def test_the_original_code_gives_the_same_targets(fixtures):
    data = np.load(fixtures / "hyla_gen_logic.npz")
    place = 2 ** np.arange(3, -1, -1)
    assert (data["conjunctions_all"] @ place == np.arange(16)).all()
    terms = torch.from_numpy(data["latents"] @ place).long()
    found = zadeh(torch.from_numpy(data["inputs"]), terms)
    torch.testing.assert_close(found, torch.from_numpy(data["targets"])[..., 0], rtol=0, atol=0)


# ------------------------------------------------------------------------------------------ batches
@pytest.mark.parametrize("setting", [{}, {"variables": 3, "length": 9}, {"variables": 5, "terms": 3, "held_out": 0.3}])
@pytest.mark.parametrize("split", SPLITS)
def test_what_a_batch_holds(setting, split):
    task = FuzzyLogic(**setting)
    batch = task.sample(split, 50, torch.Generator().manual_seed(3))
    x, y, terms = batch.inputs[..., :-1], batch.inputs[..., -1], batch.latents["terms"]
    assert batch.inputs.shape == (50, task.length, task.variables + 1)
    assert batch.inputs.dtype == batch.targets.dtype == torch.float32
    assert batch.mask is None
    assert set(batch.latents) == {"terms"}
    assert batch.targets.shape == (50, task.length, 1)
    torch.testing.assert_close(batch.targets[..., 0], zadeh(x, terms), rtol=0, atol=0)
    assert (y[:, -1] == 0).all()
    assert (y[:, :-1] == batch.targets[:, :-1, 0]).all()
    assert (batch.targets[:, -1] > 0).all()  # the hidden one is the truth
    assert batch.scored.dtype == torch.bool
    assert batch.scored.sum(dim=1).tolist() == [1] * 50
    assert batch.scored[:, -1].all()
    assert terms.shape == (50, task.terms)
    assert (terms.diff(dim=1) > 0).all()
    assert set(map(tuple, terms.tolist())) <= set(map(tuple, task.functions(split).tolist()))
    inputs, outputs = task.ends
    assert (inputs, outputs) == (config.Vectors(task.variables + 1), config.Values(1))


def test_functions_and_inputs_are_uniform():
    task = FuzzyLogic(length=4)
    batch = task.sample("train", 33 * 400, torch.Generator().manual_seed(0))
    code = batch.latents["terms"] @ torch.tensor([16, 1])
    counts = code.unique(return_counts=True)[1]
    assert len(counts) == 33
    assert (counts - 400).abs().max() < 5 * 20  # five standard deviations
    x = batch.inputs[..., :-1].flatten(0, 1)
    histogram = torch.stack([torch.histc(column, bins=10, min=0, max=1) for column in x.T])
    assert (histogram / len(x) - 0.1).abs().max() < 5 * (0.09 / len(x)) ** 0.5
    assert torch.corrcoef(x.T).fill_diagonal_(0).abs().max() < 5 / len(x) ** 0.5


@pytest.mark.parametrize("inputs", ["uniform", "fixed_context", "fixed_query"])
def test_draws_ignore_and_spare_the_global_generator_and_dtype(inputs):
    task = FuzzyLogic(inputs=inputs)
    torch.manual_seed(1)
    first, state = task.batch("train", 4, seed=0, step=0), torch.get_rng_state()
    torch.manual_seed(2)
    fuzzy_logic._fixed.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        second = task.batch("train", 4, seed=0, step=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert second.inputs.dtype == torch.float32
    assert (first.inputs == second.inputs).all()
    torch.manual_seed(1)
    assert (state == torch.get_rng_state()).all()


# ------------------------------------------------------------------------------------------ streams
def rows(batch):
    """The inputs of a batch, as a set of points."""
    return set(map(tuple, batch.inputs[..., :-1].flatten(0, 1).tolist()))


def test_a_batch_is_a_function_of_seed_split_and_step():
    task = FuzzyLogic()
    draws = {key: task.batch(key[1], 16, seed=key[0], step=key[2]) for key in itertools.product((0, 1), SPLITS, (0, 1))}
    for seed, split, step in some(draws):
        again = task.batch(split, 16, seed=seed, step=step)
        assert (again.inputs == draws[seed, split, step].inputs).all()
        assert (again.targets == draws[seed, split, step].targets).all()
    for a, b in itertools.combinations(draws.values(), 2):
        assert not rows(a) & rows(b)


def test_splits_share_no_draws_even_from_generators_in_one_state():
    task = FuzzyLogic()
    draws = [task.sample(split, 64, torch.Generator().manual_seed(5)) for split in SPLITS]
    for a, b in itertools.combinations(draws, 2):
        assert not rows(a) & rows(b)
    # Training and iid hold the same functions, but in an order of their own.
    assert (draws[0].latents["terms"] != draws[1].latents["terms"]).any()


def test_a_generator_moves_on_and_repeats():
    task = FuzzyLogic()
    generator = torch.Generator().manual_seed(5)
    draws = [task.sample("train", 8, generator) for _ in range(3)]
    for a, b in itertools.combinations(draws, 2):
        assert not rows(a) & rows(b)
        assert (a.latents["terms"] != b.latents["terms"]).any()
    generator = torch.Generator().manual_seed(5)
    for draw in draws:
        assert (task.sample("train", 8, generator).inputs == draw.inputs).all()


@pytest.mark.parametrize("size", [1, 7, 16, 100])
def test_a_smaller_batch_is_a_prefix_of_a_larger_one(size):
    task = FuzzyLogic()
    whole = task.batch("compositional", 128, seed=4, step=9)
    part = task.batch("compositional", size, seed=4, step=9)
    assert (part.inputs == whole.inputs[:size]).all()
    assert (part.latents["terms"] == whole.latents["terms"][:size]).all()


def test_the_first_draw_is_pinned():
    batch = FuzzyLogic().batch("train", 2, seed=0, step=0)
    assert batch.latents["terms"].tolist() == [[4, 9], [2, 4]]
    wanted = torch.tensor(
        [[0.969410, 0.268574, 0.874253, 0.312110, 0.125747], [0.259938, 0.816364, 0.872005, 0.712991, 0.183636]]
    )
    torch.testing.assert_close(batch.inputs[:, 0], wanted, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------ fixed inputs
def test_fixed_context_fixes_the_context_inputs_and_nothing_else():
    task = FuzzyLogic(inputs="fixed_context")
    first, second = (task.batch("compositional", 40, seed=0, step=step) for step in (0, 1))
    x = torch.cat((first.inputs, second.inputs))[..., :-1]
    terms = torch.cat((first.latents["terms"], second.latents["terms"]))
    assert (x[:, :-1] == x[0, :-1]).all()
    assert len(x[:, -1].unique(dim=0)) == 80
    assert (torch.cat((first.targets, second.targets))[..., 0] == zadeh(x, terms)).all()
    assert len(terms.unique(dim=0)) > 20
    assert len(x[0, :-1].unique(dim=0)) == 31


def test_fixed_query_fixes_the_query_and_nothing_else():
    task = FuzzyLogic(inputs="fixed_query")
    first, second = (task.batch("novel", 40, seed=0, step=step) for step in (0, 1))
    x = torch.cat((first.inputs, second.inputs))[..., :-1]
    assert (x[:, -1] == x[0, -1]).all()
    assert len(x[:, :-1].flatten(0, 1).unique(dim=0)) == 80 * 31
    assert (first.targets[..., 0] == zadeh(first.inputs[..., :-1], first.latents["terms"])).all()


@pytest.mark.parametrize(("inputs", "position"), [("fixed_context", 0), ("fixed_query", -1)])
def test_fixed_inputs_are_those_of_the_split_seed_on_every_split(inputs, position):
    """What is fitted on training functions is asked of unseen ones at the same inputs."""
    points = [
        tuple(
            FuzzyLogic(inputs=inputs, split_seed=seed).batch(split, 1, seed=0, step=0).inputs[0, position, :4].tolist()
        )
        for seed in (0, 1)
        for split in SPLITS
    ]
    assert len(set(points)) == 2
    assert len(set(points[: len(SPLITS)])) == 1


# ------------------------------------------------------------------------------------------ loss and metrics
def test_loss_is_the_squared_error_at_the_query():
    task = FuzzyLogic()
    batch = task.batch("train", 6, seed=0, step=0)
    outputs = torch.full_like(batch.targets, float("nan"))
    outputs[:, -1] = batch.targets[:, -1] + torch.tensor([0.1, -0.1, 0.2, 0.0, 0.0, 0.0])[:, None]
    torch.testing.assert_close(task.loss(outputs, batch), torch.tensor(0.06 / 6))
    outputs = torch.zeros_like(batch.targets, requires_grad=True)
    task.loss(outputs, batch).backward()
    assert (outputs.grad[:, :-1] == 0).all()
    torch.testing.assert_close(outputs.grad[:, -1], -2 * batch.targets[:, -1] / 6)


def test_a_part_of_a_batch_that_scores_nothing_has_no_loss():
    task = FuzzyLogic()
    batch = task.batch("train", 6, seed=0, step=0)
    outputs = torch.randn_like(batch.targets, requires_grad=True)
    loss = task.loss(outputs, dataclasses.replace(batch, scored=torch.zeros_like(batch.scored)))
    loss.backward()
    assert (loss.item(), outputs.grad.abs().max().item()) == (0, 0)


def test_r2_is_per_sequence_over_the_variance_of_all_targets():
    task = FuzzyLogic()
    batch = task.batch("train", 20, seed=0, step=0)
    outputs = torch.rand(20, 32, 1, generator=torch.Generator().manual_seed(0))
    found = task.metrics(outputs, batch)
    assert set(found) == {"r2", "mse"}
    for b in range(20):
        y, error = batch.targets[b, :, 0].double().numpy(), (outputs - batch.targets)[b, -1, 0].item()
        assert found["mse"][b].item() == pytest.approx(error**2, rel=1e-5)
        assert found["r2"][b].item() == pytest.approx(1 - error**2 / np.var(y), rel=1e-4, abs=1e-5)
    perfect = task.metrics(batch.targets, batch)
    assert (perfect["r2"] == 1).all()
    assert (perfect["mse"] == 0).all()
    assert task.metric in perfect


def test_half_precision_outputs_are_scored_in_float32_and_double_stays_double():
    task = FuzzyLogic()
    batch = task.batch("train", 4, seed=0, step=0)
    outputs = torch.full_like(batch.targets, 0.25)
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert task.loss(outputs.to(dtype), batch).dtype == wanted
        assert task.metrics(outputs.to(dtype), batch)["r2"].dtype == wanted
        torch.testing.assert_close(task.loss(outputs.to(dtype), batch).float(), task.loss(outputs, batch))


def test_outputs_of_another_shape_are_an_error_not_a_broadcast():
    task = FuzzyLogic()
    batch = task.batch("train", 4, seed=0, step=0)
    for score in (task.loss, task.metrics):
        with pytest.raises(
            ValueError, match=r"outputs must have the targets' shape \(4, 32, 1\) but have \(4, 32, 3\)"
        ):
            score(torch.zeros(4, 32, 3), batch)
        with pytest.raises(ValueError, match=r"outputs must have the targets' shape .* but have \(1, 32, 1\)"):
            score(torch.zeros(1, 32, 1), batch)


# ------------------------------------------------------------------------------------------ the surface
def test_an_unknown_split_lists_those_there_are():
    for call in (
        lambda: FuzzyLogic().functions("compositonal"),
        lambda: FuzzyLogic().batch("compositonal", 1, seed=0, step=0),
    ):
        with pytest.raises(ValueError, match=r"FuzzyLogic: unknown split 'compositonal'; did you mean 'compositional'"):
            call()
    with pytest.raises(ValueError, match=r"choose from train, validation, iid, compositional, novel"):
        FuzzyLogic().functions("ood")
    with pytest.raises(ValueError, match=r"FuzzyLogic: batch_size must be at least 1 but is 0"):
        FuzzyLogic().sample("train", 0, torch.Generator())


def test_it_survives_a_configuration_file(tmp_path):
    task = FuzzyLogic(variables=3, held_out=0.4, inputs="fixed_query")
    inputs, outputs = task.ends
    run = config.Run(task=task, model=config.TransformerConfig(inputs, outputs))
    config.save(run, tmp_path / "config.json")
    assert config.load(tmp_path / "config.json", KINDS) == run
    assert config.digest(run) != config.digest(dataclasses.replace(run, task=FuzzyLogic(variables=3)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("inputs", ["uniform", "fixed_context", "fixed_query"])
def test_a_batch_on_a_gpu(inputs):
    task = FuzzyLogic(inputs=inputs)
    batch, again, other = (task.batch("train", 64, seed=0, step=step, device="cuda") for step in (0, 0, 1))
    assert batch.inputs.is_cuda
    assert batch.scored.is_cuda
    assert (batch.inputs == again.inputs).all()
    assert (batch.inputs != other.inputs).any()
    assert (batch.targets[..., 0] == zadeh(batch.inputs[..., :-1], batch.latents["terms"])).all()
    assert (task.metrics(batch.targets, batch)["r2"] == 1).all()
    if inputs != "uniform":
        here = task.batch("train", 1, seed=0, step=0).inputs[0, :, :-1]
        fixed = slice(None, -1) if inputs == "fixed_context" else slice(-1, None)
        assert (batch.inputs[:, fixed, :-1].cpu() == here[fixed]).all()


@pytest.mark.parametrize("inputs", fuzzy_logic.INPUTS)
def test_batches_drawn_together_are_the_batches_of_their_seeds(inputs):
    task = FuzzyLogic(length=6, inputs=inputs)
    for split in SPLITS:
        found = task.batches(split, 5, seeds=[3, 0, 3], step=2)
        wanted = config.Task.batches(task, split, 5, seeds=[3, 0, 3], step=2)
        for i, seed in enumerate((3, 0, 3)):
            alone = task.batch(split, 5, seed=seed, step=2)
            for batches in (found, wanted):
                one = batches.map(lambda array, i=i: array[i])
                assert one.mask is None
                assert one.latents.keys() == alone.latents.keys()
                for name in ("inputs", "targets", "scored"):
                    assert torch.equal(getattr(one, name), getattr(alone, name))
                assert all(torch.equal(one.latents[name], alone.latents[name]) for name in alone.latents)
