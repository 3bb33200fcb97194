"""HYLA with another pooling of its keys, or with another owner of the value network (op.py)."""
