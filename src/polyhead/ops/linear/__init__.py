"""Linear attention: the equation (reference.py), and chunks in PyTorch (chunked.py)."""
