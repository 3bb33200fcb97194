"""Names from a stranger's file neither steer the terminal nor lead a run out of its folder."""

import json
import pathlib

import pytest
from commands import mistake, small

import polyhead as ph
from polyhead.cli import main
from polyhead.cli.output import escape
from polyhead.train.messages import print_notice

STEERING = "red\x1b[31m\x07\x9b2J\u202e"


@pytest.fixture
def runs(tmp_path):
    """Two run folders, one with control characters in a field that may have any text."""
    for seed, data in enumerate(("text", STEERING)):
        task = ph.tasks.Text(data=data, length=8)
        model = ph.TransformerConfig(ph.Tokens(256), ph.Logits(256), dim=8, layers=1, heads=ph.Softmax(2), causal=True)
        folder = tmp_path / f"run-{seed}"
        folder.mkdir()
        run = ph.Run(task, model, name="mine", seed=seed, train=ph.Train(evaluate=("iid",)))
        ph.config.save(run, folder / "config.json")
    return tmp_path


def spoil(folder, field, value):
    """The configuration of a small run with another value of a field of its top level."""
    config = ph.config.to_dict(small())
    config[field] = value
    path = folder / "mine.json"
    path.write_text(json.dumps(config))
    return path


def is_clean(text):
    return all(character.isprintable() or character in "\n\t " for character in text)


@pytest.mark.parametrize("command", ["list runs {0}", "eval {0}/run-1", "resume {0}/run-1"])
def test_what_a_command_prints_is_escaped(runs, capsys, command):
    main(command.format(runs).split())
    out, err = capsys.readouterr()
    assert "red" in out + err or "run-1" in out + err
    assert is_clean(out)
    assert is_clean(err)


@pytest.mark.parametrize("name", ["../../x", "a/b", "a\\b", "..", "", STEERING, "a\0b", "a\nb"])
def test_a_name_is_no_path_and_has_no_control_characters(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    line = mistake(capsys, f"train {spoil(tmp_path, 'name', name)}")
    assert "name must be printable, without slashes" in line
    assert is_clean(line)
    assert [path.name for path in pathlib.Path().iterdir()] == ["mine.json"]


def test_a_folder_with_a_zero_byte_is_refused_in_one_line(tmp_path, capsys):
    assert "folder must be a path" in mistake(capsys, f"train {spoil(tmp_path, 'folder', 'a' + chr(0))}")


def test_an_unknown_field_with_control_characters_is_escaped(tmp_path, capsys):
    assert is_clean(mistake(capsys, f"train {spoil(tmp_path, STEERING, 1)}"))


def test_escapes_keep_letters_of_all_scripts():
    assert escape("é 中 ± R²\tx\n") == "é 中 ± R²\tx\n"
    assert escape("\x1b[2J\r") == "\\x1b[2J\\r"


def test_a_notice_is_escaped(capsys):
    print_notice(STEERING)
    assert is_clean(capsys.readouterr().err)
