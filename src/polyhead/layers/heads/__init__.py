"""Groups of heads, what surrounds one op each: groups.py (values from tokens), symbolic.py (values are symbols),
functions.py (what a group computes, and its code), sizes.py (how wide it is)."""
