"""Runs trained together equal runs trained alone: losses, folders, and ends."""

import dataclasses
import math
import os
import signal

import pytest
import torch
from run_folders import alone, copied, losses, same
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import polyhead as ph
from polyhead.scale.population import stacked, training as population
from polyhead.scale.population.stacked import Stack
from polyhead.scale.population.training import groups
from polyhead.train import Interrupted, device, evaluate, load_model, run
from polyhead.train.network import Single
from polyhead.train.store.folder import read_metrics


@pytest.fixture
def double(monkeypatch):
    """Everything in float64, batches included; learning rates are sent to the device six at a time."""
    monkeypatch.setattr(stacked, "WINDOW", 6)
    for task in (ph.tasks.FuzzyLogic, ph.tasks.Sraven):

        def batch(self, *args, plain=task._batch):
            return plain(self, *args).map(lambda array: array.double() if array.is_floating_point() else array)

        monkeypatch.setattr(task, "_batch", batch)
    monkeypatch.setattr(device, "DTYPE", torch.float64)
    torch.set_default_dtype(torch.float64)


# --------------------------------------------------------------------------------------------------------------- parity
SRAVEN = ph.tasks.Sraven(features=2, values=4)
EXPERTS = ph.Experts(3, 2, hidden=4, balance=0.5)
MODELS = {
    "softmax": {"heads": (ph.Softmax(2),), "dropout": 0.0},
    "linear, experts": {"heads": (ph.Linear(2),), "feedforward": EXPERTS, "dropout": 0.0},
    "hyla, experts, dropout": {"heads": (ph.Hyla(2),), "feedforward": ph.Experts(3, 1, hidden=4), "dropout": 0.2},
    "deep, shared dropout": {"heads": (ph.Hyla(2, value_depth=2),), "dropout": 0.3, "dropout_shared": True},
    "competing, causal": {"heads": (ph.Linear(2, normalise="softmax_heads", act="relu"),), "causal": True},
    "a mixture per layer": {
        "heads": ((ph.Softmax(1), ph.Hyla(1)), (ph.Hyla(2, dim=2, value_dim=6),)),
        "positions": ph.Rotary(),
        "norm": "rms",
        "norm_order": "post",
    },
    "a projection without rows, dropout": {"heads": (ph.Relational(2, hidden=4),), "dropout": 0.1},
    "other splits, dropout": {"dropout": 0.1, "task": ph.tasks.FuzzyLogic(length=8)},
    "sraven": {"task": SRAVEN, "inputs": SRAVEN.ends[0], "outputs": SRAVEN.ends[1], "max_length": 18, "batch_size": 3},
}


SPLITS = ((2, 5), (0, 6), (2, 6))
"""The split and the seed of each member where they differ in both, in no common order."""


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", MODELS)
def test_together_is_alone_in_float64(name, members, double, tmp_path):
    """Losses, norms, scores, parameters and moments, in 8 steps of the three mechanisms and 5 of other variants."""
    steps = 8 if name in list(MODELS)[:3] else 5
    runs = members(**{"steps": steps, "eval_every": 8, "save_every": 8, "eval_batches": 1, **MODELS[name]})
    if name.startswith("other splits"):
        given = zip(runs, SPLITS, strict=True)
        runs = [dataclasses.replace(r, seed=b, task=dataclasses.replace(r.task, split_seed=a)) for r, (a, b) in given]
    assert len(groups(runs)) == 1
    wanted = alone(runs, tmp_path / "alone")
    for at_once in (1, 2) if "dropout" in name else (2,):
        results = population.train(runs, tmp_path / str(at_once), progress=False, at_once=at_once)
        for config, result, one in zip(runs, results, wanted, strict=True):
            assert result.folder == tmp_path / str(at_once) / f"{config.name}-{ph.digest(config)}"
            same(one.folder, result.folder, rel=1e-9)


def test_in_bf16_it_is_alone_to_rounding(members, tmp_path):
    how = {"steps": 1, "heads": (ph.Softmax(2),), "lr": 1e-3}
    runs = members(precision="bf16", **how)
    together = population.train(runs, tmp_path, progress=False, at_once=3)
    ways = (together, alone(runs, tmp_path / "alone"), alone(members(**how), tmp_path / "fp32"))
    found, wanted, exact = ([losses(result.folder)[0] for result in results] for results in ways)
    assert found == pytest.approx(wanted, rel=0.02)
    assert found != pytest.approx(exact, rel=1e-5)
    assert not any(torch.tensor(loss).bfloat16().item() == loss for loss in found)  # the loss itself is in float32


# -------------------------------------------------------------------------------------------------------------- folders
def test_a_member_is_an_ordinary_run_afterwards(members, tmp_path):
    runs = members()
    results = population.train(runs, tmp_path, at_once=3)
    for config, result in zip(runs, results, strict=True):
        found, model = load_model(result.folder)
        assert ph.digest(found) == ph.digest(config) == result.digest
        for split in ("iid", "compositional"):
            scores = evaluate(model, config.task, split, batches=2, batch_size=4, seed=config.seed)
            assert scores == pytest.approx(result.scores[split], rel=1e-4, abs=1e-5)
        assert run(found, progress=False) == result  # done: nothing is trained
        assert result.environment["population"] == 3
        assert result.parameters == sum(p.numel() for p in model.parameters())
        assert result.command == f"python -m polyhead.train {result.folder / 'config.json'}"
        assert [(row["kind"], row["step"]) for row in read_metrics(result.folder)] == [
            (kind, step) for step in range(1, 7) for kind in ("train", *("eval", "eval") * (step in (4, 6)))
        ]
    assert all(results[0].seconds == result.seconds > 0 for result in results)  # each its share
    assert population.train(runs, tmp_path) == results
    before = [copied(result.folder, tmp_path / "before" / result.name) for result in results[:2]]
    for result in results[:2]:
        (result.folder / "result.json").unlink()  # killed between the last checkpoint and the result
    anew = population.train(runs, tmp_path, progress=False, at_once=3)
    assert anew[2] == results[2]
    for folder, result in zip(before, anew[:2], strict=True):
        same(folder, result.folder, rel=1e-5)  # two in a pass where three were: oneDNN then rounds otherwise
    (again, *_) = population.train(runs[:1], tmp_path, again=True, progress=False)
    assert "population" not in again.environment


def test_from_alone_to_together_and_back(members, double, tmp_path, at_step, at_update, monkeypatch):
    """Two begin alone, are joined by a third that is at another step, and end alone."""
    runs = members(dropout=0.2, steps=8)
    folders = [tmp_path / f"{config.name}-{ph.digest(config)}" for config in runs]
    for config, folder in zip(runs[:2], folders, strict=False):
        at_step(2, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Interrupted):
            run(dataclasses.replace(config, folder=str(folder)), progress=False)
    sizes: list[int] = []
    plain = Stack.__init__
    monkeypatch.setattr(Stack, "__init__", lambda self, *args: (sizes.append(len(args[0])), plain(self, *args))[1])
    at_update(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted, match=r"0 of 3 runs"):
        population.train(runs, tmp_path, progress=False, at_once=2)
    assert sizes == [2]  # the third waits: it is at another step
    for wanted, config, folder in zip(alone(runs, tmp_path / "alone"), runs, folders, strict=True):
        run(dataclasses.replace(config, folder=str(folder)), progress=False, resume=True)
        same(wanted.folder, folder, rel=1e-9)


def test_the_last_window_of_a_text_counts_as_alone(tiny, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} is {i**2 % 97}\n" for i in range(400)))
    task = ph.tasks.Text(str(tmp_path / "text.txt"), length=24, folder=str(tmp_path / "tokens"))
    count = task.count("iid")
    assert not task.batch("iid", count, seed=0, step=0).scored.all()
    ends = {"inputs": task.ends[0], "outputs": task.ends[1], "max_length": 24, "residual_dropout": 0.0, "causal": True}
    ends |= {"steps": 1, "eval_every": 1, "eval_batches": count, "task": task, "evaluate": ("iid",)}
    runs = [tiny(None, name=f"r{seed}", seed=seed, **ends) for seed in (0, 1)]
    for result in population.train(runs, tmp_path / "together", progress=False, at_once=2):
        scores = result.scores["iid"]
        assert scores["sequences"] == count
        assert scores["bits_per_byte"] == pytest.approx(scores["loss"] / math.log(2), rel=1e-6)


# --------------------------------------------------------------------------------------------------------------- groups
@dataclasses.dataclass(frozen=True)
class Forgetful(ph.FeedForward):
    """A layer of a user with dropout of its own."""

    def module(self, dim):
        return torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.Dropout(0.5))


def test_groups_are_what_can_be_trained_together(tiny, members, monkeypatch):
    a, b, c = members()
    wider, longer, halves = members(dim=16)[0], members(steps=7)[1], members(precision="fp16")[:2]
    dropped = tiny(None, name="dropped")  # with residual dropout
    assert groups([a, wider, b, dropped, longer, dropped, c, *halves]) == [
        *([a, b, c], [wider], [dropped], [longer], [dropped]),
        *([half] for half in halves),
    ]
    own = members(feedforward=Forgetful())
    assert groups(own) == [[run] for run in own]
    threaded, placed = dataclasses.replace(a, threads=2), dataclasses.replace(b, folder="x")
    assert groups([threaded, a, placed]) == [[threaded], [a, placed]]
    assert len(groups([a, dataclasses.replace(b, task=dataclasses.replace(b.task, held_out=0.3))])) == 2
    monkeypatch.setattr(population, "LARGEST_STACK", 2)
    assert groups([a, b, c]) == [[a, b], [c]]


def test_what_fits_nowhere_is_trained_alone(tiny, members, tmp_path):
    lonely, bad = tiny(None, name="lonely", steps=2), tiny(None, name="bad", lr=1e38, warmup=0)
    done, failed, *_ = population.train([lonely, bad, *members(steps=1)], tmp_path, progress=False)
    assert "population" not in done.environment
    assert failed.error.startswith("train: the loss of bad is nan at step 2")


def test_a_cpu_takes_as_many_as_its_cache_holds(members):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    small, demo = members()[0], ph.recipes.demo.fuzzy()[0]
    assert population.networks_at_once(small, cpu) == (1 << 20) // (4 * 8 * 32)
    assert population.networks_at_once(demo, cpu) == 1
    assert population.networks_at_once(demo, gpu) == population.LARGEST_STACK
    assert population.networks_at_once(dataclasses.replace(demo, compile=True), cpu) == population.LARGEST_STACK


# ----------------------------------------------------------------------------------------------------------------- step
class Watch(TorchDispatchMode):
    """Refuses to hand a number to Python: a GPU would be waited for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*args, **(kwargs or {}))


def test_a_step_does_not_wait_for_the_device(members):
    stack = Stack(members(heads=(ph.Hyla(2),), dropout=0.2), torch.device("cpu"), 3)
    stack.step(0)
    with Watch():
        stack.step(1)
        with pytest.raises(AssertionError):
            stack.step(2, wanted=True)["loss"][0].item()


def test_a_pass_too_large_is_made_smaller(members):
    runs = members(heads=(ph.Hyla(2),), dropout=0.2)
    plain, small, tried = Stack(runs, torch.device("cpu"), 3), Stack(runs, torch.device("cpu"), 3), []
    whole = small.losses

    def limited(rows, *rest):
        tried.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        return whole(rows, *rest)

    small.losses = limited
    for number in range(2):
        a, b = (stack.step(number, wanted=True) for stack in (plain, small))
        assert_close(a, b)
    assert tried == [3, 2, 1, 2, 1]
    assert_close(plain.rows, small.rows, rtol=1e-4, atol=1e-5)
    small.losses = lambda *_: limited(torch.zeros(3))
    with pytest.raises(torch.OutOfMemoryError):
        small.step(2)


def test_a_metric_may_be_a_truth_value_or_a_count(members, monkeypatch):
    def metrics(task, outputs, batch):
        first = torch.arange(len(outputs)) == 0
        return {"r2": first, "hits": 2 * first.long()}

    monkeypatch.setattr(ph.tasks.FuzzyLogic, "metrics", metrics)
    runs, cpu = members(), torch.device("cpu")
    for network in (Single(runs[0], cpu), Stack(runs, cpu, 3)):
        row = network.step(0, wanted=True)
        assert (row["r2"][0], row["hits"][0]) == (0.25, 0.5)


def test_a_row_has_the_losses_of_every_pass(members):
    """A replayed graph overwrites the outputs of the pass before."""
    runs, cpu, last = members(dropout=0.0), torch.device("cpu"), []
    plain, replayed = Stack(runs, cpu, 2), Stack(runs, cpu, 2)
    losses = replayed.losses

    def overwritten(*args):
        for output in last:
            output.detach().fill_(torch.nan)
        last[:] = losses(*args)
        return last

    replayed.losses = overwritten
    assert_close(*(stack.step(0, wanted=True)["loss"] for stack in (plain, replayed)))


@pytest.mark.compile
def test_compiled_it_is_the_same(members, tmp_path, monkeypatch):
    """Traced whole, forward and backward, and run by the eager backend; experts leave nothing behind in the modules."""
    plain, seen = torch.compile, []

    def traced(function, **options):
        seen.append(options)
        return plain(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", traced)
    experts = {
        "heads": (ph.Hyla(2),),
        "layers": 1,
        "feedforward": ph.Experts(2, 1, hidden=4),
        "dropout": 0.2,
        "steps": 3,
    }
    results = {
        compiled: population.train(
            members(compile=compiled, **experts), tmp_path / str(compiled), progress=False, at_once=3
        )
        for compiled in (True, False)
    }
    assert len(seen) == 2  # passes and updates
    for one, two in zip(results[True], results[False], strict=True):
        same(one.folder, two.folder, rel=1e-5)
