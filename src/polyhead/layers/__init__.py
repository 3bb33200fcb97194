"""nn.Modules: the parameters around the ops.  They take plain keyword arguments.

Of the configurations only those of parts are needed, such as `Hyla(4)`: heads, positions, feed-forward, symbols.
"""

from polyhead.layers import attention, block, cache, feedforward, heads, norms, positions, symbols, taps, testing

__all__ = ["attention", "block", "cache", "feedforward", "heads", "norms", "positions", "symbols", "taps", "testing"]
