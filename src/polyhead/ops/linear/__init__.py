"""Linear attention: the equation, parallel and recurrent (reference.py), chunks in PyTorch
(chunked.py)."""
