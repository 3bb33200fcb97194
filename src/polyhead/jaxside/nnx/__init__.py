"""The same layers and models as Flax NNX modules; `import polyhead.jaxside` alone needs no Flax.

    from polyhead.jaxside import nnx
    model = nnx.Transformer(config)                       # a polyhead.TransformerConfig
    model(inputs)                                         # under jax.jit or nnx.jit, nnx.grad, ...

Parameters have the names, shapes and layouts ([out, in]) of the PyTorch modules: `convert.py` brings them over.  Each
module draws its own from `rngs` (nnx.Rngs); dropout is there where a call is given `rngs`, and only there.
"""

from polyhead.spec.optional import optional

with optional("polyhead.jaxside.nnx", "polyhead[flax]"):
    import flax as _flax  # noqa: F401

from polyhead.jaxside.nnx.attention import MultiHeadAttention
from polyhead.jaxside.nnx.components import MLP, Norm, SwiGLU
from polyhead.jaxside.nnx.model import Transformer, TransformerBlock

__all__ = ["MLP", "MultiHeadAttention", "Norm", "SwiGLU", "Transformer", "TransformerBlock"]


def __dir__() -> list[str]:
    return sorted(__all__)
