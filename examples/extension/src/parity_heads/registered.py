"""What the command line knows by name after `--import parity_heads.registered`."""

import polyhead as ph
from parity_heads.heads import Cosine
from parity_heads.recipes import parity_heads, parity_hyla
from parity_heads.task import Parity

for extension in (Parity, Cosine, parity_hyla, parity_heads):
    ph.register(extension)
