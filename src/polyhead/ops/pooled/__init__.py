"""HYLA with another pooling of its keys: the equation (reference.py)."""
