"""The text of a kernel as a list of instructions."""

import functools
import re
from dataclasses import dataclass, replace


class Fault(Exception):
    """A kernel does something forbidden, or something that this emulator does not know."""


@dataclass(frozen=True)
class Instruction:
    """`name` with its operands; where there is a `guard`, only for threads whose predicate is `wanted`."""

    name: str
    operands: tuple[str, ...]
    guard: str | None = None
    wanted: bool = True
    text: str = ""


NOTHING = Instruction("nop", ())
LINE = re.compile(r"^(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*);$")


def operands(text: str) -> tuple[str, ...]:
    """Cut at commas that are in no brackets.

    >>> operands("{%r1,%r2}, [%r3 + 4], 1")
    ('{%r1,%r2}', '[%r3 + 4]', '1')
    """
    return tuple(x.strip() for x in re.findall(r"(?:[{\[][^}\]]*[}\]]|[^,])+", text) if x.strip())


def listed(operand: str) -> list[str]:
    """The registers of a vector operand, or the one of another.

    >>> listed("{%r1, %r2}"), listed("%r1")
    (['%r1', '%r2'], ['%r1'])
    """
    return [x.strip() for x in operand.strip("{} ").split(",")]


@dataclass(frozen=True)
class Program:
    """A kernel: its parameters (name, type), instructions, and where labels are."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]

    def without(self, place: int) -> "Program":
        """The same with one instruction left out."""
        return replace(self, code=(*self.code[:place], NOTHING, *self.code[place + 1 :]))

    def places(self, start: str) -> list[int]:
        """Where the instructions are whose name begins so."""
        return [n for n, x in enumerate(self.code) if x.name.startswith(start)]

    @functools.cached_property
    def meetings(self) -> dict[int, int]:
        """Branch -> the first instruction that all ways from there have in common: its immediate post-dominator."""
        n = len(self.code)
        follow = [self._next(at) for at in range(n)]
        after, changed = [(1 << n + 1) - 1] * n + [1 << n], True
        while changed:
            changed = False
            for at in reversed(range(n)):
                common = functools.reduce(lambda x, y: x & y, (after[x] for x in follow[at])) | 1 << at
                changed |= common != after[at]
                after[at] = common
        branches = [at for at in range(n) if len(follow[at]) > 1]
        return {at: after.index(after[at] & ~(1 << at)) for at in branches}

    def _next(self, at: int) -> list[int]:
        x = self.code[at]
        if x.name.startswith("bra"):
            return [self.labels[x.operands[0]], *([at + 1] if x.guard else [])]
        return [len(self.code) if x.name in ("ret", "exit") else at + 1]


def parse(text: str) -> Program:
    """The first kernel of a module."""
    head = re.search(r"\.visible \.entry (\w+)\((.*?)\)\s*(?:\.\w+[^\n{]*\n)*\s*\{", text, re.S)
    if head is None:
        raise Fault("no kernel")
    given = re.findall(r"\.param \.(\w+)\s[^\n]*?(\w+)(?:\[\d+\])?,?\s*$", head[2], re.M)
    code: list[Instruction] = []
    labels = {}
    for raw in text[head.end() :].splitlines():
        line = raw.partition("//")[0].strip()
        if unused := re.match(r"^\{ \.reg \.b\d+ (\w+); (.*); \}$", line):  # an unused half
            line = re.sub(rf"(?<![%\w]){unused[1]}\b", "_", unused[2]) + ";"
        if line == "}":
            break
        if label := re.match(r"^(\$L\w+):$", line):
            labels[label[1]] = len(code)
        elif line and not line.startswith("."):
            code += map(instruction, (x.strip() + ";" for x in line.split(";") if x.strip(" {}")))
    return Program(head[1], tuple((name, kind) for kind, name in given), tuple(code), labels)


def instruction(text: str) -> Instruction:
    """One line, with its semicolon.

    >>> instruction("@!%p1 add.s32 %r1, %r2, 3;").operands
    ('%r1', '%r2', '3')
    """
    found = LINE.match(text)
    if found is None:
        raise Fault(f"cannot be parsed: {text}")
    negated, guard, name, rest = found.groups()
    return Instruction(name, operands(rest), guard, not negated, text)
