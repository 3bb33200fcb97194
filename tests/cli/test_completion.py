"""The completions of a shell; the script is run by the shell itself if it is installed."""

import pathlib
import shutil
import subprocess

import pytest

from polyhead.cli.completion import SHELLS, words
from polyhead.cli.dispatch import main
from polyhead.cli.verbs import VERBS

BASH = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_polyhead
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_every_verb_and_its_options_are_known():
    known = words()
    assert known.verbs == tuple(VERBS)
    assert set(known.options) == set(VERBS)
    assert all({"--help", "--json", "--quiet", "--import"} <= set(options) for options in known.options.values())
    assert {"--from", "--scale"} <= set(known.options["reproduce"])
    assert "--results" not in known.options["reproduce"]
    assert "--figure" not in known.options["reproduce"]  # given by its place
    for option in ("--seed", "--train.lr", "--model.norm-order", "--task.held-out", "--model.heads", "--print"):
        assert option in known.options["train"], option
    assert "fuzzy-hyla" in known.names["train"]
    for verb, option in (("sweep", "--ray"), ("sweep", "--status"), ("tune", "--trials"), ("plan", "--card")):
        assert {option, "--train.lr"} <= set(known.options[verb])
    assert not {"--again", "--print", "--run"} & {*known.options["tune"], *known.options["plan"]}
    assert "fig-2c" in known.names["reproduce"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_offers_them(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "try").write_text(BASH)

    def offered(*typed):
        asked = ["bash", str(tmp_path / "try"), str(tmp_path / "script"), "polyhead", *typed]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()

    assert offered("t") == ["train", "tune", "table"]
    assert offered("train", "fuzzy-h") == ["fuzzy-hyla"]
    assert offered("train", "fuzzy-hyla", "--train.l") == ["--train.lr", "--train.log-every"]
    assert offered("train", "fuzzy-hyla", "--scale", "s") == ["short", "small", "smoke"]
    assert offered("list", "r") == ["recipes", "runs"]
    assert offered("train", "fuzzy-hyla", "runs") == []  # files are the shell's


@pytest.mark.parametrize("shell", SHELLS)
def test_it_is_installed_where_the_shell_looks(shell, tmp_path, monkeypatch, capsys):
    for name in ("HOME", "ZDOTDIR", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    assert main(["completion", shell, "--install"]) == 0
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    wanted = {"bash": "bash-completion/completions/polyhead", "zsh": ".zfunc/_polyhead"}
    assert path.relative_to(tmp_path) == pathlib.Path(wanted.get(shell, "fish/completions/polyhead.fish"))
    assert f"completion: {path}; " in capsys.readouterr().out
    assert "fuzzy-hyla" in path.read_text()
