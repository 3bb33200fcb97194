"""Linear attention: the equation, parallel and recurrent (reference.py), and chunk by chunk in PyTorch and Triton."""
