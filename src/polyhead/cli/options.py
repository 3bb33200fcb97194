"""Types of options that several commands share."""

from pathlib import Path
from typing import Annotated

import tyro

RUN_HELP = "A run folder, or a trained model of `polyhead list models`."
RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help=RUN_HELP)]
RunFolders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
Device = Annotated[str, tyro.conf.arg(help="auto, cpu, cuda or mps.")]
