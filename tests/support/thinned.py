"""Of a table of cases the few that differ most: what the mark `thinned` leaves in `make test` (tests/conftest.py)."""

import re


def spread(names, count):
    """`count` of the names.  Each is the one with most words that no earlier one has; of several such, the last."""
    left, chosen, known_words = [(set(re.findall(r"\w+", name)), name) for name in reversed(names)], [], set()
    for _ in range(count):
        best = max(left, key=lambda pair: len(pair[0] - known_words))
        left.remove(best)
        chosen.append(best[1])
        known_words |= best[0]
    return chosen
