"""A task of a user whose first training process is killed at step 7."""

import os
import pathlib
import signal
from dataclasses import dataclass

from polyhead.tasks import FuzzyLogic


@dataclass(frozen=True)
class DiesOnce(FuzzyLogic):
    """Fuzzy logic; while the file `marker` does not exist, training makes it at step 7 and kills its process."""

    marker: str = ""

    def batch(self, split, size, *, seed, step, **options):
        marker = pathlib.Path(self.marker)
        if split == "train" and step == 7 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(split, size, seed=seed, step=step, **options)
