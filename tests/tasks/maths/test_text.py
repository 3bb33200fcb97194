"""Mathematics from published files."""

import pytest

from polyhead.tasks import Maths

MODULE = "polynomials__expand"


def write(folder, module=MODULE, extrapolate=""):
    """Questions `add N` with the answer N: 0 to 99 easy, 100 to 199 medium, 200 to 299 hard, 90 to 119 interpolated."""
    parts = {"train-easy": range(100), "train-medium": range(100, 200), "train-hard": range(200, 300)}
    parts["interpolate"] = [*range(90, 110), *range(400, 430)]
    if extrapolate:
        parts["extrapolate"] = [*range(100, 105), *range(500, 520)]
    for part, numbers in parts.items():
        (folder / part).mkdir()
        suffix = extrapolate if part == "extrapolate" else ""
        lines = [f"add {n}?\n{n}\n" for n in numbers]
        (folder / part / f"{module}{suffix}.txt").write_text("".join(lines))
    return str(folder)


def numbers(task, split):
    pairs = task.texts(task.batch(split, 3000, seed=0, step=0))
    assert all(question == f"add {answer}?" for question, answer in pairs)
    return {int(answer) for _, answer in pairs}


@pytest.mark.parametrize(
    ("difficulty", "span"), [("easy", (0, 100)), ("medium", (100, 200)), ("hard", (200, 300)), ("mixed", (0, 300))]
)
def test_published_files_by_difficulty_and_split(tmp_path, difficulty, span):
    iid = {*range(90, 110), *range(400, 430)}
    task = Maths(MODULE, difficulty, data="original", folder=write(tmp_path), question=20, answer=5)
    assert task.splits == ("train", "validation", "iid")
    train, validation = numbers(task, "train"), numbers(task, "validation")
    assert numbers(task, "iid") == iid
    assert train | validation == set(range(*span)) - iid
    assert not train & validation
    assert 0.03 < len(validation) / len(train) < 0.2
    assert task.batch("train", 3, seed=0, step=0).source.shape == (3, 20)


def test_files_that_extrapolate(tmp_path):
    folder = write(tmp_path, "arithmetic__mixed", "_longer")
    task = Maths("arithmetic__mixed", "mixed", data="original", folder=folder)
    assert task.splits == ("train", "validation", "iid", "novel")
    assert numbers(task, "novel") == {*range(100, 105), *range(500, 520)}
    by_split = {split: numbers(task, split) for split in task.splits}
    assert set().union(*by_split.values()) == {*range(300), *range(400, 430), *range(500, 520)}
    assert sum(map(len, by_split.values())) == 350  # no question twice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"What is 1?\n1\nWhat is 2?\n", r"must have a question and an answer in turn, got 3 lines"),
        (b"What is 1?\n\n", r"line 2: answer must have 1 to 30 characters: ''"),
        (b"What is 1?\n1\n" + b"a" * 161 + b"\n1\n", r"line 3: question must have 1 to 160 characters: 'a+'"),
        (b"What\tis 1?\n1\n", r"line 1: question must have 1 to 160 characters: 'What\\tis 1\?'"),
        (b"What is \xe9?\n1\n", r"byte 9 is no ASCII character"),
        (None, r"cannot be read \(No such file"),
    ],
)
def test_lines_that_are_no_questions(tmp_path, text, message):
    folder = write(tmp_path)
    path = tmp_path / "train-easy" / f"{MODULE}.txt"
    path.unlink() if text is None else path.write_bytes(text)
    with pytest.raises(ValueError, match=rf"^Maths: {path}[^\n]*{message}[^\n]*$"):
        Maths(MODULE, data="original", folder=folder).batch("train", 1, seed=0, step=0)
