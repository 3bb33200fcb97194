"""For loops with assertions: raises if there is nothing to loop over, because such a test would always pass."""


def some(items):
    """All of them, of which there is at least one."""
    collected = list(items)
    assert collected, "there is nothing to look at"
    return collected
