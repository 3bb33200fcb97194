"""Reasoning tasks and language: data, loss and metrics.  They import no network."""

from polyhead.tasks.base import Batch, Task
from polyhead.tasks.fuzzy_logic.task import FuzzyLogic
from polyhead.tasks.images.task import Images
from polyhead.tasks.maths.task import Maths
from polyhead.tasks.object_sorting import ObjectSorting
from polyhead.tasks.pairwise_order import PairwiseOrder
from polyhead.tasks.relational_games.task import RelationalGames
from polyhead.tasks.scores import Score
from polyhead.tasks.set_cards import SetCards
from polyhead.tasks.sraven.task import Sraven
from polyhead.tasks.text.task import Text

# The classes that a configuration file may name as its task.
KINDS: tuple[type[Task], ...] = (
    FuzzyLogic, Sraven, RelationalGames, ObjectSorting, PairwiseOrder, SetCards, Maths, Images, Text
)  # fmt: skip

__all__ = ["KINDS", "Batch", "FuzzyLogic", "Images", "Maths", "ObjectSorting", "PairwiseOrder", "RelationalGames"]
__all__ += ["Score", "SetCards", "Sraven", "Text"]
