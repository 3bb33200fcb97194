"""Of a table of cases the few that differ most: what the mark `thinned` leaves in `make test` (tests/conftest.py)."""

import re


def spread(names, count):
    """`count` of the names.  Each is the one with most words that no earlier one has; of several such, the last."""
    left, chosen, seen = [(set(re.findall(r"\w+", name)), name) for name in reversed(names)], [], set()
    for _ in range(count):
        best = max(left, key=lambda pair: len(pair[0] - seen))
        left.remove(best)
        chosen.append(best[1])
        seen |= best[0]
    return chosen
