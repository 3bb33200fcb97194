"""`polyhead sweep`: grids on the command line and in files, its table, and its errors."""

import shlex
from unittest import mock

import pytest
from commands import small

from polyhead.cli import dispatch as cli, sweep as cli_sweep
from polyhead.cli.sweep import train_side_by_side
from polyhead.config import digest
from polyhead.papers import recipes
from polyhead.papers.recipes import STUDIES
from polyhead.scale.sweep import Failure
from polyhead.scale.sweep.engines import Resources


@pytest.fixture
def sweeps(monkeypatch, tmp_path):
    """What would be trained: (runs, folder, options)."""
    calls = []

    def train(*args):
        calls.append(args)
        return []  # no failures

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(recipes.RECIPES, "small", small)
    monkeypatch.setattr(cli_sweep, "train_side_by_side", train)
    return calls


def sweep(words):
    return cli.main(["sweep", *shlex.split(words)])


def test_a_grid_on_the_command_line(sweeps, capsys):
    assert sweep("small --seed 0,1,2 --train.lr=1e-3,3e-3 --workers 2 --folder a,b") == 0
    ((runs, folder, options),) = sweeps
    assert {(run.seed, run.train.lr) for run in runs} == {(seed, lr) for seed in (0, 1, 2) for lr in (1e-3, 3e-3)}
    assert len({digest(run) for run in runs}) == 6
    assert (folder, options.workers) == ("a,b", 2)
    table = capsys.readouterr().out
    assert table.count("waiting") == 6
    assert "0.003" in table


def test_truth_values_in_a_grid(sweeps):
    assert sweep("small --name a=True --model.causal=True,False --model.final-norm True,None") == 0
    ((runs, _, _),) = sweeps
    pairs = [(run.model.causal, run.model.final_norm) for run in runs]
    assert pairs == [(True, True), (True, None), (False, True), (False, None)]


def test_a_figure_lies_where_reproduce_looks_for_it(sweeps, capsys, tmp_path):
    """To look at the table trains nothing."""
    assert sweep("fig-5c --scale=smoke --status") == 0
    assert not sweeps
    assert capsys.readouterr().out.count("waiting") == len(STUDIES["fig-5c"]("smoke"))
    assert not list(tmp_path.iterdir())
    assert sweep("fig-5c --scale smoke") == 0
    ((runs, folder, _),) = sweeps
    assert [digest(run) for run in runs] == [digest(run) for run in STUDIES["fig-5c"]("smoke")]
    assert folder == "runs/reproduce/smoke"


def test_options_choose_the_engine_and_its_resources(monkeypatch, sweeps):
    sweep_jobs = mock.Mock(return_value=[])
    monkeypatch.setattr(cli_sweep, "train_side_by_side", train_side_by_side)
    monkeypatch.setattr("polyhead.scale.sweep.jobs.sweep", sweep_jobs)
    assert sweep("small --seed 0,1") == 0
    assert sweep("small --seed 0,1 --ray 10.0.0.1:6379 --gpus 0.5 --cpus 2 --workers 3") == 0
    assert sweep("small --slurm --partition=gpu,long --account us --minutes 7 --cpus 3 --gpus 2 --again") == 0
    assert sweep("small --slurm --memory 4") == 0
    local, ray, slurm, with_memory = (call.kwargs for call in sweep_jobs.call_args_list)
    assert local == {"engine": None, "workers": None, "again": False}
    assert (ray["engine"].address, ray["engine"].resources) == ("10.0.0.1:6379", Resources(cpus=2, gpus=0.5))
    assert ray["workers"] == 3
    parameters = {"slurm_partition": "gpu,long", "slurm_account": "us", "timeout_min": 7, "cpus_per_task": 3}
    parameters |= {"slurm_gpus_per_node": 2, "mem_gb": None}  # the memory is the cluster's, unless it is asked for
    assert parameters.items() <= slurm["engine"].parameters.items()
    assert with_memory["engine"].parameters["mem_gb"] == 4.0
    assert slurm["again"]


def test_failures_make_the_exit_code(monkeypatch, sweeps, tmp_path, capsys):
    failure = Failure("small", tmp_path, 1, "it broke")
    monkeypatch.setattr(cli_sweep, "train_side_by_side", lambda *_: [failure])
    assert sweep("small --seed 0,1") == 1
    assert "small failed: it broke" in capsys.readouterr().err
