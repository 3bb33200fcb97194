"""Groups of heads, each around one op: groups.py (values from tokens), symbolic.py (values are symbols), own.py (a
user's mechanism), functions.py (the function of a group, and its code), sizes.py (widths)."""
