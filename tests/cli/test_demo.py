"""The demo: what the terminal draws, and the page."""

import io
import itertools
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from polyhead.cli import demo as cli_demo
from polyhead.papers import demo

CURVES = {racer: {"0": [(0, 0.5), (25, 0.5 + i / 8)]} for i, racer in enumerate(demo.RACERS)}
LABELS = (*demo.KINDS.values(), *demo.BASELINES.values())
SCORES = dict.fromkeys(itertools.product(LABELS, demo.SPLITS), (0.8, 0.9))


def printed(picture):
    console = Console(width=120, file=io.StringIO())
    console.print(picture)
    return console.file.getvalue()


def test_the_board_draws_a_bar_for_each_score_between_guessing_and_one():
    lines = printed(cli_demo.race_board(CURVES)).splitlines()
    assert [line.split()[-4] for line in lines[-4:]] == ["0.50", "0.62", "0.75", "0.88"]
    assert "▄" in lines[-2], "0.75 is halfway between guessing and 1"
    assert not set(cli_demo.BARS[1:]) & set(lines[-4]), "guessing has no bar"
    curves = {"softmax": {"0": [(0, 0.6)], "1": []}}
    assert "0.60" in printed(cli_demo.race_board(curves)), "the mean is over the networks that have begun"


@pytest.mark.parametrize("racer", demo.RACERS)
def test_racers_have_the_heads_that_their_names_say(racer):
    config = demo.race_model(racer, demo.RelationalGames(demo.GAME))
    kinds = [type(group).__name__.lower() for group in config.heads]
    assert " + ".join(kinds) == racer.removesuffix(", rotary positions")
    assert sum(group.heads for group in config.heads) == 4


@pytest.fixture
def initialisers(monkeypatch):
    """The race in threads: what its worker processes would begin with."""
    calls = []

    def pool(workers, context, *initialiser):
        calls.append(initialiser)
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(cli_demo, "ProcessPoolExecutor", pool)
    return calls


def test_the_race_gathers_what_its_workers_send_and_ctrl_c_ends_them(initialisers, monkeypatch, capsys):
    monkeypatch.setattr(demo, "race", lambda racer, seed: [(0, 0.5), (25, 0.75)])
    curves = cli_demo.run_race(num_seeds=2, num_workers=1)
    assert curves == {racer: {"0": [(0, 0.5), (25, 0.75)], "1": [(0, 0.5), (25, 0.75)]} for racer in demo.RACERS}
    assert capsys.readouterr().err.endswith("0.75 to 0.75\n")
    assert initialisers == [(signal.signal, (signal.SIGINT, signal.SIG_DFL))]
    cli_demo.print_scores(curves, SCORES)
    assert capsys.readouterr().out.count("0.850") == len(SCORES)


def test_the_command_writes_a_page_with_both_pictures_and_every_number(tmp_path, monkeypatch, capsys):
    curves = {racer: {"0": [(0, 0.5), (demo.RACE_STEPS, 0.9)]} for racer in demo.RACERS}
    monkeypatch.setattr(cli_demo, "run_race", lambda seeds, workers: curves)
    monkeypatch.setattr(cli_demo, "score_models", lambda: SCORES)
    assert cli_demo.demo(tmp_path / "new" / "folder", workers=1) == 0
    path = tmp_path / "new" / "folder" / "demo.html"
    page = path.read_text()
    assert page.count("<svg") == 2
    assert page.count("0.850") == len(SCORES)
    assert len(page) < 1_500_000
    assert path.as_uri() in capsys.readouterr().out
    assert demo.page(curves, {}).count("<svg") == 1, "without trained models the race alone"
