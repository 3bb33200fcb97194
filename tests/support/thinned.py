"""Of a table of cases the few that differ most: what the mark `thinned` leaves in `make test` (tests/conftest.py)."""

import itertools
import re


def spread(names, count):
    """`count` of the names.  Each is the one with most pairs of words that no earlier one has."""
    pairs = {name: set(itertools.combinations(re.findall(r"\w+", name), 2)) for name in names}
    remaining, chosen, covered = list(names), [], set()
    for _ in range(count):
        best = max(remaining, key=lambda name: len(pairs[name] - covered))
        if pairs[best] <= covered:  # every pair is there, so it begins again
            covered = set()
        remaining.remove(best)
        chosen.append(best)
        covered |= pairs[best]
    return chosen
