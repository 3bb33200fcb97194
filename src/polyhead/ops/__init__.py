"""Pure functions on (b t h d) tensors: no parameters, no configuration, no modules.

Each mechanism has a folder with its equation (reference.py) and its faster implementations.  Four names are both a
function and a folder or file: `hyla`, `softmax`, `latent_code` and `rope`.  `polyhead.ops.hyla` is the function;
`from polyhead.ops.hyla.reference import ...` imports from the folder.
"""

import polyhead.ops.softmax  # noqa: F401  (first, so that the function of textbook.py takes its name and keeps it)
from polyhead.ops.abstractor.reference import abstractor_attention as abstractor_attention
from polyhead.ops.cross_entropy import chunked_cross_entropy as chunked_cross_entropy
from polyhead.ops.disentangled.reference import disentangled_attention as disentangled_attention
from polyhead.ops.hyla.reference import hyla as hyla
from polyhead.ops.hyla.state import hyla_step as hyla_step
from polyhead.ops.latent_code import latent_code, relations
from polyhead.ops.linear.reference import linear_attention as linear_attention, linear_step as linear_step
from polyhead.ops.norms import rms_norm
from polyhead.ops.pooled.reference import pooled_attention as pooled_attention
from polyhead.ops.relational.reference import relational_attention as relational_attention
from polyhead.ops.rope import rope
from polyhead.ops.softmax.reference import softmax_attention as softmax_attention
from polyhead.ops.textbook import scaled_dot_product_attention, silu, softmax
from polyhead.spec import MECHANISMS

__all__ = [
    *(row.op for row in MECHANISMS),
    "chunked_cross_entropy",
    "hyla_step",
    "latent_code",
    "linear_step",
    "relations",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
]
