"""The papers' experiments: for each of `hyla`, `dual` and `language` its models, runs, claims and figures.

recipes.py names all runs.  reproduce.py makes a figure with one command.  study.py, outcome.py and page.py help both.
"""

from polyhead.analysis import claims as claims
