"""Groups of heads, each around one op: groups.py (values from tokens), symbolic.py (values are symbols), own.py (a
user's mechanism) and functions.py (the function of a group, and its code)."""
