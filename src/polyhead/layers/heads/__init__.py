"""Groups of heads, what surrounds one op each: groups.py (values from tokens), symbolic.py (values are symbols),
own.py (those of a user's mechanism), functions.py (what a group computes, and its code), sizes.py (how wide it is)."""
