"""Styles and scripts of the pages, as they lie in this folder."""

import importlib.resources


def resource(name: str) -> str:
    """The text of a file such as `report/report.css`."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
