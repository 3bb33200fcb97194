"""The same layers and models as Flax NNX modules; `import polyhead.jaxside` alone needs no Flax.

    from polyhead.jaxside import nnx
    model = nnx.Transformer(config)                       # a polyhead.TransformerConfig
    model(inputs)                                         # under jax.jit or nnx.jit, nnx.grad, ...

Parameters have the names, shapes and layouts ([out, in]) of the PyTorch modules; `convert.py` copies them.  Each module
draws its parameters from `rngs` (nnx.Rngs).  Dropout is active only if a call is given `rngs`.
"""

from typing import TYPE_CHECKING

from polyhead.spec.lazy import renamed
from polyhead.spec.optional import optional

with optional("polyhead.jaxside.nnx", "polyhead[flax]"):
    import flax as _flax  # noqa: F401

from polyhead.jaxside.nnx.attention import MultiHeadAttention
from polyhead.jaxside.nnx.components import MlpLayer, Norm, SwigluLayer
from polyhead.jaxside.nnx.model import Transformer, TransformerBlock

__all__ = ["MlpLayer", "MultiHeadAttention", "Norm", "SwigluLayer", "Transformer", "TransformerBlock"]


if not TYPE_CHECKING:
    __getattr__ = renamed(__name__, {"MLP": "MlpLayer", "SwiGLU": "SwigluLayer"})


def __dir__() -> list[str]:
    return sorted(__all__)
