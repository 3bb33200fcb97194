"""Time and memory of an op's impls, parity first: measure.py, sides.py (what is timed beside what)."""
