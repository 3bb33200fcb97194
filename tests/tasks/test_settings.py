"""Settings that no task can meet; tests/config has the bounds and choices of single fields."""

import pytest

from polyhead import tasks

REFUSED = {
    tasks.FuzzyLogic: [
        ({"unknown": 0.1}, "2 terms a function need as many known and unknown ones.*15 known and 1 unknown"),
        ({"held_out": 0.01}, "held_out=0.01 of 66 combinations leaves one split empty"),
        ({"held_out": 0.95}, "held_out=0.95 leaves 4 training functions of 2 terms, too few to cover 12 known terms"),
        ({"variables": 12}, "combinations of 2 in 3072 terms, but at most 2000000 can be listed"),
        ({"split": "legacy", "split_seed": 3}, "split='legacy' exists for split_seed 0, 1, 2, 2024, not for 3"),
        ({"split": "legacy", "variables": 5}, "exists for 4 variables, 2 terms and unknown=0.25, not for 5, 2 and 0.2"),
    ],
    tasks.Sraven: [
        ({"values": 2}, "needs 3 distinct symbols, so values must be at least 3, the grid, but is 2"),
        ({"held_out": 0.999}, "held_out=0.999 leaves 1 training multisets of 4 rules, too few to cover all 8 rules"),
        ({"features": 30}, "10295472 multisets of 30 rules, but at most 1500000 can be listed"),
        ({"split": "partitionable", "features": 3}, "split='partitionable' exists for 4 features, not for 3"),
    ],
    tasks.RelationalGames: [({"examples": 30_001}, "examples must be at most 30000 but is 30001")],
    tasks.ObjectSorting: [
        ({"length": 49}, "length must be int <= 48 but is 49"),
        ({"length": 2, "examples": 1129}, r"examples must be at most 1128 \(half of all sequences\) but is 1129"),
    ],
    tasks.PairwiseOrder: [({"examples": 2017}, r"examples must be at most 2016 \(pairs\) but is 2017")],
    tasks.SetCards: [({"examples": 1081}, "examples must be int <= 1080 but is 1081")],
    tasks.Maths: [
        ({"module": "polynomials__ad"}, r"unknown module 'polynomials__ad'; did you mean 'polynomials__add'\?")
    ],
    tasks.Images: [
        ({"shift": 8}, "shift must be below 8, the image's side, but is 8"),
        ({"patch": 3}, "patches of 3 x 3 do not divide an image of 8 x 8"),
    ],
    tasks.Text: [
        ({"data": "hub:c4", "limit": 9}, r"'hub:OWNER/NAME\[/CONFIG\]', not 'hub:c4'"),
        ({"data": "hub:allenai/c4"}, "limit is the bytes to take of a data set of the Hub; hub:allenai/c4 has None"),
        ({"limit": 9}, "limit is the bytes to take of a data set of the Hub; stdlib has 9"),
        *(({"tokenizer": t}, "tokenizer must be 'bytes', 'bpe:N'") for t in ("gpt2", "bpe:256", "bpe:many", "hub:")),
    ],
}


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [(task, *row) for task, rows in REFUSED.items() for row in rows],
    ids=lambda part: part.__name__ if isinstance(part, type) else str(part)[:60],
)
def test_settings_that_cannot_be_met(task, settings, message):
    with pytest.raises(ValueError, match=rf"^(Patches|{task.__name__}): [^\n]*{message}[^\n]*$"):
        task(**settings)
