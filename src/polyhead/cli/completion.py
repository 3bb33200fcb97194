"""The verb completion: a script for bash, zsh or fish that completes `polyhead` and its arguments.

The script contains plain words, because starting Python at every tab would be slow.  So it knows the recipes and
figures that existed when it was written.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import tyro

from polyhead.cli.output import FLAGS, emit
from polyhead.cli.verbs import VERBS
from polyhead.spec.home import home
from polyhead.spec.shapes import one_of

EVERYWHERE = ("--help", *FLAGS, "--import")
DEVICES = ("auto", "cpu", "cuda", "mps")


def place(shell: str) -> tuple[pathlib.Path, str]:
    """The path where `shell` looks for a command's script, and the remaining step for the user.

    Raises ValueError for a user without a home folder.
    """
    try:
        return _place(shell)
    except RuntimeError as error:
        raise ValueError(f"polyhead completion: {error}") from None


def _place(shell: str) -> tuple[pathlib.Path, str]:
    if shell == "bash":
        data = pathlib.Path(os.environ.get("XDG_DATA_HOME") or home("XDG_DATA_HOME") / ".local" / "share")
        return data / "bash-completion" / "completions" / "polyhead", "start a new shell (bash-completion 2 reads it)"
    if shell == "zsh":
        folder = pathlib.Path(os.environ.get("ZDOTDIR") or home("ZDOTDIR")) / ".zfunc"
        line = f"fpath+=({folder}); autoload -Uz compinit; compinit"
        return folder / "_polyhead", f"in .zshrc there must be: {line}"
    settings = pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or home("XDG_CONFIG_HOME") / ".config")
    return settings / "fish" / "completions" / "polyhead.fish", "start a new shell"


@dataclass(frozen=True)
class CompletionWords:
    """The words to complete: `verbs`; for each verb its `options` and the `names` of its first argument; and the
    `values` of options with few values."""

    verbs: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    names: Mapping[str, tuple[str, ...]]
    values: Mapping[str, tuple[str, ...]]


def words() -> CompletionWords:
    """The words of the installed version, with the recipes of installed extensions."""
    from polyhead.cli import sweep, train
    from polyhead.cli.listing import KINDS
    from polyhead.papers.hyla.singles import LONG
    from polyhead.papers.recipes import FIGURES, every
    from polyhead.papers.sizes import SCALES

    of_runs = {
        "train": (*_flags(train.training()), "--scale", "--print"),
        "sweep": (*_flags(sweep.sweeping()), "--scale", "--status"),
    }
    kinds = {name: verb.load() for name, verb in VERBS.items()}
    options = of_runs | {name: _flags(kind) for name, kind in kinds.items() if isinstance(kind, type)}
    names = dict.fromkeys(of_runs, tuple(sorted(every())))
    names |= {"reproduce": tuple(FIGURES), "list": KINDS, "completion": tuple(SHELLS)}
    return CompletionWords(
        tuple(VERBS),
        {verb: tuple(dict.fromkeys((*flags, *EVERYWHERE))) for verb, flags in options.items()},
        names,
        {"--scale": tuple(dict.fromkeys((*SCALES, *LONG))), "--device": DEVICES},
    )


def _fields() -> tuple[str, ...]:
    """The options for the fields of a run, its training, a transformer, and all tasks."""
    from polyhead import tasks
    from polyhead.config import Run, Train, TransformerConfig

    kinds = [getattr(tasks, name) for name in dir(tasks)]
    asked = [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    parts: dict[str, list[type]] = {"": [Run], "train.": [Train], "model.": [TransformerConfig], "task.": asked}
    found = [
        f"--{prefix}{_dashed(field.name)}"
        for prefix, those in parts.items()
        for kind in those
        for field in dataclasses.fields(kind)
        if field.init and (prefix or field.name not in ("task", "model", "train"))
    ]
    return tuple(dict.fromkeys(found))


def _flags(kind: type) -> tuple[str, ...]:
    """The options of a verb: its fields that are not positional; those of a field without a name are its options."""
    hints = get_type_hints(kind, include_extras=True)
    found: list[str] = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        name = next((mark.name for mark in marks if getattr(mark, "name", None) is not None), _dashed(field.name))
        if field.name == "run" and not name:
            found += _fields()
        elif not name:
            found += _flags(hint.__origin__)
        elif tyro.conf.Positional not in marks:
            found.append(f"--{name}")
    return tuple(found)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


# -------------------------------------------------------------------------------------------------------------- scripts
def script(shell: str) -> str:
    """The script for `shell`.  Raises ValueError for an unknown shell."""
    return SHELLS[one_of("polyhead completion", "shell", shell, SHELLS)](words())


def _cases(table: Mapping[str, Iterable[str]], name: str) -> str:
    return "\n".join(f"        {key}) {name}='{' '.join(values)}' ;;" for key, values in table.items())


def _choose(known: CompletionWords) -> str:
    """Code for bash and zsh that sets `offered`, the words for position `place`, from the words before it."""
    return f"""\
    case "$before" in
{_cases(known.values, "offered")}
    esac
    case "$verb" in
{_cases(known.options, "options")}
    esac
    case "$verb" in
{_cases(known.names, "names")}
    esac
    if [ -n "$offered" ]; then :
    elif [ "$place" -eq 1 ]; then offered='{" ".join(known.verbs)}'
    else
        case "$current" in
            -*) offered=$options ;;
            *) [ "$place" -eq 2 ] && offered=$names ;;
        esac
    fi
"""


def _bash(known: CompletionWords) -> str:
    return f"""\
# polyhead completion bash
_polyhead() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}}
    local place=$COMP_CWORD offered= options= names=
{_choose(known)}\
    COMPREPLY=($(compgen -W "$offered" -- "$current"))
}}
complete -o default -F _polyhead polyhead
"""


def _zsh(known: CompletionWords) -> str:
    return f"""\
#compdef polyhead
_polyhead() {{
    local current=${{words[CURRENT]}} before=${{words[CURRENT-1]}} verb=${{words[2]}}
    local place=$((CURRENT - 1)) offered= options= names=
{_choose(known)}\
    compadd -- ${{=offered}} || _files
}}
_polyhead "$@"
"""


def _fish(known: CompletionWords) -> str:
    lines = ["# polyhead completion fish"]
    lines += [f"complete -c polyhead -n __fish_use_subcommand -f -a '{' '.join(known.verbs)}'"]
    for verb, names in known.names.items():
        second = f"__fish_seen_subcommand_from {verb}; and test (count (commandline -opc)) -eq 2"
        lines.append(f"complete -c polyhead -n '{second}' -a '{' '.join(names)}'")
    for verb, options in known.options.items():
        for option in options:
            values = f" -x -a '{' '.join(known.values[option])}'" if option in known.values else ""
            asked = f"complete -c polyhead -n '__fish_seen_subcommand_from {verb}' -l {option.removeprefix('--')}"
            lines.append(asked + values)
    return "\n".join(lines) + "\n"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}


# ----------------------------------------------------------------------------------------------------------------- verb
@dataclass(frozen=True)
class Completion:
    """Print the script that completes commands, recipes, figures and options in a shell; or install it.

    >>> polyhead completion bash --install
    >>> polyhead completion fish
    """

    shell: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]
    """bash, zsh or fish."""
    install: bool = False
    """Write the script to the path where the shell looks for it, and print the path."""

    def __call__(self) -> int:
        from polyhead.train.store.files import check_place

        text = script(self.shell)
        if not self.install:
            emit(lambda: {"script": text}, lambda: print(text, end=""))
            return 0
        path, then = place(self.shell)
        check_place("polyhead completion", path)
        path.write_text(text, encoding="utf-8")
        emit(lambda: {"completion": str(path)}, lambda: print(f"completion: {path}; {then}"))
        return 0
