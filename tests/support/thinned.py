"""Of a table of cases the few that differ most: what the mark `thinned` leaves in `make test` (tests/conftest.py)."""

import re


def spread(names, count):
    """`count` of the names.  Each is the one with most words that no earlier one has; of several such, the last."""
    words = {name: set(re.findall(r"\w+", name)) for name in names}
    remaining, chosen, known_words = list(reversed(names)), [], set()
    for _ in range(count):
        best = max(remaining, key=lambda name: len(words[name] - known_words))
        remaining.remove(best)
        chosen.append(best)
        known_words |= words[best]
    return chosen
