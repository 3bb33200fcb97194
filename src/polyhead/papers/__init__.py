"""The papers' experiments: for each of `hyla`, `dual` and `language` its models, runs, claims and figures.

recipes.py names all runs.  reproduce.py makes a figure with one command.  study.py, outcome.py and page.py help both.
"""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.papers import demo, dual, hyla, language, recipes, reproduce, study

__all__ = ["demo", "dual", "hyla", "language", "recipes", "reproduce", "study"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
