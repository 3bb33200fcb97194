"""Whether native code can be built and tested here."""

from polyhead.ops import registry
from polyhead.ops.native import library

READY = library._find_compiler() is not None
"""Whether there is a compiler."""

IMPLS = {op: tuple(impl for impl in impls if READY or impl != "native") for op, impls in registry.IMPLS.items()}
"""Op -> impls that can be called here."""
