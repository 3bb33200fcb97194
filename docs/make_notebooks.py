"""Makes notebooks with their output from scripts with `# %%` cells: `python docs/make_notebooks.py [NAME ...]`.

docs/tutorial.py and docs/notebooks/*.py become docs/notebooks/*.ipynb.  GitHub shows them as they are.
"""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

DOCS = Path(__file__).parent
SCRIPTS = [DOCS / "tutorial.py", *sorted((DOCS / "notebooks").glob("*.py"))]


def cells(script: Path) -> list[nbformat.NotebookNode]:
    """The cells of a script: Markdown behind `# %% [markdown]`, code behind `# %%`."""
    text = script.read_text(encoding="utf-8")
    if script.parent == DOCS:
        text = re.sub(r"\]\((?!http)", "](../", text)  # the notebook lies one folder deeper
    notebook_cells = []
    for part in re.split(r"^# %%", text, flags=re.M)[1:]:
        head, _, body = part.partition("\n")
        if "markdown" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            cell = new_markdown_cell("\n".join(lines))
        else:
            cell = new_code_cell(body.strip())
        cell["id"] = f"cell-{len(notebook_cells)}"  # the same in every run
        notebook_cells.append(cell)
    return notebook_cells


def make(script: Path) -> Path:
    """Execute a script as a notebook and write it with its output."""
    notebook = new_notebook(cells=cells(script))
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(DOCS.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of this machine
        if any(output.output_type == "display_data" for output in cell.get("outputs", [])):
            # Beside a picture, what the last call to matplotlib returned is of no use.
            cell.outputs = [output for output in cell.outputs if output.output_type != "execute_result"]
    path = DOCS / "notebooks" / f"{script.stem}.ipynb"
    nbformat.write(notebook, path)
    return path


if __name__ == "__main__":
    for script in SCRIPTS:
        if not sys.argv[1:] or script.stem in sys.argv[1:]:
            path = make(script)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
