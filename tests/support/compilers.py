"""Whether native code can be built and tested here."""

from polyhead.ops import registry
from polyhead.ops.native import library

READY = library.status("hyla") in ("built", "not built yet: compiled on first use")
"""It is built, or there is a compiler."""

IMPLS = {op: tuple(impl for impl in impls if READY or impl != "native") for op, impls in registry.IMPLS.items()}
"""Op -> impls that can be called here."""
