"""What a kernel is made of, without its prose: results of an earlier run stay valid where only words have changed."""

import ast
import inspect
import textwrap
from typing import Any

import triton
import triton.language as tl


def bare(text: str) -> str:
    """The syntax tree of a module or a function: no docstrings, comments and line numbers.

    >>> bare("def f(x): return x + 1") == bare('# why\\ndef f(x):\\n    "What."\\n    return (x + 1)')
    True
    >>> bare("def f(x): return x + 1") == bare("def f(x): return x + 2")
    False
    """
    tree = ast.parse(textwrap.dedent(text))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [line for line in body if not _words(line)]
    return ast.dump(tree)


def _words(line: ast.AST) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str)


def written(kernel: Any) -> list[str]:
    """The syntax trees of a kernel and of all kernels that it calls, and the constants that they name."""
    found, functions = [], [kernel.fn]
    for f in functions:  # which grows
        found.append(bare(inspect.getsource(f)))
        for name in f.__code__.co_names:
            x = f.__globals__.get(name)
            if isinstance(x, triton.JITFunction) and x.fn not in functions:
                functions.append(x.fn)
            if isinstance(x, (bool, int, float, str, tl.constexpr)):
                found.append(f"{name} = {x}")
    return found
