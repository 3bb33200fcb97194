"""The mechanisms as pure functions in JAX, with the names, letters, masks and errors of `polyhead.ops`, on (b t h d).

    from polyhead import jaxside
    jaxside.hyla(q, k, v, causal=True)

Everything works under jit, grad and vmap, and on sharded arrays.  `impl` is "auto", "blocked" or "reference".  This
package imports jax and never torch.  As in `polyhead.ops`, `jaxside.hyla` is the function; `from polyhead.jaxside.hyla
import ...` imports from the file.
"""

from polyhead.spec.optional import optional

with optional("polyhead.jaxside", "polyhead[jax]"):
    import jax as _jax  # noqa: F401

from polyhead.jaxside.abstractor import abstractor_attention
from polyhead.jaxside.disentangled import disentangled_attention
from polyhead.jaxside.hyla import hyla
from polyhead.jaxside.latent_code import latent_code, relations
from polyhead.jaxside.linear import linear_attention
from polyhead.jaxside.pooled import pooled_attention
from polyhead.jaxside.relational import relational_attention
from polyhead.jaxside.rope import rope
from polyhead.jaxside.softmax import softmax_attention

__all__ = ["abstractor_attention", "disentangled_attention", "hyla", "latent_code", "linear_attention"]
__all__ += ["pooled_attention", "relational_attention", "relations", "rope", "softmax_attention"]
