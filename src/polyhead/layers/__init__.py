"""nn.Modules: the parameters around the ops.  They take plain keyword arguments.

Of the configurations only those of heads, positions and sources of symbols are needed, such as `Hyla(4)`.
"""

from polyhead.layers import attention, block, cache, feedforward, heads, norms, positions, symbols, taps, testing

__all__ = ["attention", "block", "cache", "feedforward", "heads", "norms", "positions", "symbols", "taps", "testing"]
