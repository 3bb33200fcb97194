"""Turns the boxed errors of the command-line library into one line."""

import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WORDS = {"INT": "an integer", "FLOAT": "a number", "{None}": "None"}
"""The library's names of types -> ours."""


@dataclass(frozen=True)
class ErrorBox:
    """The text of a box, about the `arguments` of `prog`; `options()` are those that it takes."""

    text: str
    prog: str
    arguments: Sequence[str]
    options: Callable[[], Sequence[str]]


def one_line(box: str, prog: str, arguments: Sequence[str] = (), options: Callable[[], Sequence[str]] = tuple) -> str:
    """The text of a box without its frame, in our words where we know it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│| ") for line in plain.splitlines() if "──" not in line and "---" not in line]
    said = ErrorBox(_whole(" ".join(" ".join(lines).split()), arguments), prog, arguments, options)
    for pattern, told in MISTAKES.items():
        if found := re.search(pattern, said.text):
            return told(said, *found.groups())
    return f"{prog}: {said.text.partition(' For full helptext')[0]}"


def _whole(text: str, arguments: Sequence[str]) -> str:
    """`text` with long arguments in one piece: the box breaks them at its edge and at hyphens."""
    for word in (part for given in arguments for part in given.split("=", 1) if len(part) > 8):
        text = re.sub(" ?".join(map(re.escape, word)), word.replace("\\", r"\\"), text)
    return text


def _unknown(box: ErrorBox, word: str) -> str:
    flags = [one for one, other in itertools.pairwise(box.arguments) if other == word and one.startswith("--")]
    if flags and not word.startswith("-"):
        return f"{box.prog}: {flags[0]} takes no value but {word!r} came: give {flags[0]} or {opposite(flags[0])} alone"
    what = "option" if word.startswith("-") else "argument"
    near = nearest(word, box.options()) if word.startswith("-") else None
    return f"{box.prog}: unknown {what} {word}; " + (f"did you mean {near}?" if near else f"see {box.prog} --help")


def nearest(word: str, options: Sequence[str]) -> str | None:
    """The option that `word` probably means.

    Candidates have the last name of `word`, the most similar one wins.

    >>> nearest("--heads", ["--model.dim", "--model.heads.0.heads"])
    '--model.heads.0.heads'
    """
    last = word.lstrip("-").rpartition(".")[2].replace("-", "_")
    names = {name.replace("_", "-") for name in (last,)}
    same = [option for option in options if option.lstrip("-").rpartition(".")[2] in names]
    found = difflib.get_close_matches(word, same or options, n=1, cutoff=0.0 if same else 0.6)
    return found[0] if found else None


def _no_value(box: ErrorBox, option: str, count: str) -> str:
    return f"{box.prog}: {option} needs {'a value' if count == '1' else f'{count} values'}"


def _no_choice(box: ErrorBox, value: str, option: str, choices: str) -> str:
    wanted = _either(re.findall(r"'([^']*)'", choices))
    return f"{box.prog}: {option} must be {wanted} but is {value!r}"


def _missing(box: ErrorBox, option: str) -> str:
    return f"{box.prog}: {option} is missing; see {box.prog} --help"


def _wrong_kind(box: ErrorBox, option: str, reason: str, kinds: str) -> str:
    came = re.findall(r"'([^']*)'", reason.partition("Got errors")[0])
    wanted = _either([WORDS.get(kind, kind) for kind in kinds.lstrip("[").split("|")])  # "[INT [INT ...]]": several
    return f"{box.prog}: {option} must be {wanted} but is {came[-1] if came else 'not'!r}"


def _refused(box: ErrorBox, reason: str) -> str:
    """A configuration refused a value: its message names itself already."""
    return reason


MISTAKES: dict[str, Callable[..., str]] = {
    r"Unrecognized options: ([^\s,]+)": _unknown,
    r"Missing value for argument '(?:\(')?([^',]+)(?:',\))?'. Expected (\S+)": _no_value,  # tyro 1.0.0: ('--seed',)
    r"invalid choice '(.*?)' for argument '([^']+)'. Expected one of \(([^)]*)\)": _no_choice,
    r"Missing from [^:]+: (\S+)": _missing,
    r"Error parsing (\S+): ((?:(?! For full helptext).)*?) Argument helptext: \S+ (\S+)": _wrong_kind,
    r"Error parsing \S+: (.*?) For full helptext": _refused,
}
"""By what the library says; the first that fits."""


def _either(names: Sequence[str]) -> str:
    """ "True or False or None": in a fixed order, None last."""
    return " or ".join(sorted(names, key=lambda name: (name == "None", name == "False", name)))


def opposite(flag: str) -> str:
    """The option that sets a Boolean field to its other value.

    >>> opposite("--model.causal"), opposite("--no-compile")
    ('--model.no-causal', '--compile')
    """
    path, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{path}{dot}{name.removeprefix('no-') if name.startswith('no-') else f'no-{name}'}"
