"""Pages that are scripts: `# %% [markdown]` cells are text, `# %%` cells are code (the percent format of Jupytext).

`sphinx-build -D percent_execute=1` runs the code and shows what it prints and draws; otherwise the page shows the code.
"""

import contextlib
import io
import os
import pathlib
import re
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser

CELL = re.compile(r"^# %%(.*)\n", re.M)


def cells(text: str) -> list[tuple[bool, str]]:
    """(is it text, content) of every cell that is not empty.

    >>> cells("# %% [markdown]\\n# # Heading\\n#\\n# Text.\\n# %%\\nprint(1)\\n")
    [(True, '# Heading\\n\\nText.'), (False, 'print(1)')]
    """
    parts = CELL.split(re.sub(r"\A# ---\n.*?^# ---\n", "", text, flags=re.M | re.S))
    made = [(False, parts[0].strip())]
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        prose = "[markdown]" in head
        made.append((prose, re.sub(r"^# ?", "", body, flags=re.M).strip() if prose else body.strip()))
    return [(prose, body) for prose, body in made if body]


def run(code: str, namespace: dict[str, Any], folder: pathlib.Path, stem: str) -> str:
    """What a cell prints and draws, as Markdown; pictures go to `folder`."""
    import matplotlib.pyplot as plt

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, stem, "exec"), namespace)
    made = f"```text\n{said.getvalue().rstrip()}\n```\n" if said.getvalue().strip() else ""
    for number in plt.get_fignums():
        folder.mkdir(parents=True, exist_ok=True)
        plt.figure(number).savefig(folder / f"{stem}-{number}.svg", bbox_inches="tight")
        made += f"\n![]({folder.name}/{stem}-{number}.svg)\n"
    plt.close("all")
    return made


def markdown(text: str, page: pathlib.Path, *, execute: bool) -> str:
    """The page as Markdown."""
    namespace: dict[str, Any] = {"__name__": "__document__", "__file__": str(page)}
    made = []
    for number, (prose, body) in enumerate(cells(text)):
        made.append(body if prose else f"```python\n{body}\n```")
        if execute and not prose:
            made.append(run(body, namespace, page.parent / "_executed", f"{page.stem}-{number}"))
    return "\n\n".join(made) + "\n"


class PercentParser(MystParser):  # type: ignore[misc]
    """Reads a script as a page."""

    supported = ("percent",)

    def parse(self, inputstring: str, document: Any) -> None:
        """Its Markdown, as any other."""
        os.environ.setdefault("MPLBACKEND", "agg")
        page, execute = pathlib.Path(document["source"]), bool(int(document.settings.env.config.percent_execute))
        super().parse(markdown(inputstring, page, execute=execute), document)


def setup(app: Any) -> dict[str, bool]:
    """Registers `.py` pages."""
    app.add_config_value("percent_execute", "0", "env", types=(str,))
    app.add_source_suffix(".py", "percent")
    app.add_source_parser(PercentParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
