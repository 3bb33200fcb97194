"""Pure functions on (b t h d) tensors: no parameters, no configuration, no modules.

Each mechanism has a folder with its signature (op.py), its equation and its faster implementations.  Four names are
both a function and a folder or file: `hyla`, `softmax`, `latent_code` and `rope`.  `polyhead.ops.hyla` is the function;
`from polyhead.ops.hyla.op import ...` imports from the folder.
"""

from polyhead.ops.abstractor.op import abstractor_attention
from polyhead.ops.cross_entropy import chunked_cross_entropy
from polyhead.ops.disentangled.op import disentangled_attention
from polyhead.ops.hyla.op import hyla
from polyhead.ops.latent_code import latent_code, relations
from polyhead.ops.linear.op import linear_attention, linear_step
from polyhead.ops.norms import rms_norm
from polyhead.ops.pooled.op import pooled_attention
from polyhead.ops.relational.op import relational_attention
from polyhead.ops.rope import rope
from polyhead.ops.softmax.op import softmax_attention
from polyhead.ops.textbook import scaled_dot_product_attention, silu, softmax

__all__ = [
    "abstractor_attention",
    "chunked_cross_entropy",
    "disentangled_attention",
    "hyla",
    "latent_code",
    "linear_attention",
    "linear_step",
    "pooled_attention",
    "relational_attention",
    "relations",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "silu",
    "softmax",
    "softmax_attention",
]
