"""Pure functions on (b t h d) tensors: no parameters, no configuration, no modules.

Three files are called like their function (hyla.py, softmax.py, rope.py).  All files are loaded here, and the names
bound after that, so `polyhead.ops.hyla` is always the function; import from `polyhead.ops.hyla` to reach into the
file.
"""

import polyhead.ops.softmax  # noqa: F401  (first, so that the function of plain.py takes its name and keeps it)
from polyhead.ops.abstractor import abstractor_attention
from polyhead.ops.code import latent_code, relations
from polyhead.ops.cross_entropy import chunked_cross_entropy
from polyhead.ops.disentangled import disentangled_attention
from polyhead.ops.hyla import hyla
from polyhead.ops.hyla_state import hyla_step
from polyhead.ops.linear import linear_attention, linear_step
from polyhead.ops.norms import rms_norm
from polyhead.ops.plain import scaled_dot_product_attention, silu, softmax
from polyhead.ops.relational import relational_attention
from polyhead.ops.rope import rope
from polyhead.ops.softmax import softmax_attention

__all__ = [
    "abstractor_attention",
    "chunked_cross_entropy",
    "disentangled_attention",
    "hyla",
    "hyla_step",
    "latent_code",
    "linear_attention",
    "linear_step",
    "relational_attention",
    "relations",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
    "softmax_attention",
]
