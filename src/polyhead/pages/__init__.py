"""HTML pages: `report` (scores, codes and attention of runs) and `explore` (one text)."""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import lazy

if TYPE_CHECKING:
    from polyhead.pages import explore, report

__all__ = ["explore", "report"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__)
