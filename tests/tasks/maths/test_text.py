"""Mathematics from other sources: published files, the authors' generator."""

import importlib.util
import random
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest
import torch
from maths_checker import fault
from refusals import refusing
from some import some

from polyhead.tasks import Maths
from polyhead.tasks.maths import task as maths, text as maths_text

MODULE = "polynomials__expand"


def forget():
    for cached in (maths._pool, maths_text.from_files, maths_text.from_package):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    yield
    forget()


# -------------------------------------------------------------------------------------------------------------- files
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


def test_tokens_of_many_questions_take_a_byte_each_on_the_way_too():
    pairs = [("What is 2*x?", "-2")] * 5000
    tracemalloc.start()
    questions, answers = maths_text.tokens(pairs, (160, 30))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5000 * 160 * 5, peak
    assert questions.dtype == torch.uint8
    torch.testing.assert_close(questions[7:9].long(), maths_text.encode(["What is 2*x?"] * 2, 160))
    assert maths_text.decode(answers[:1].long()) == ["-2"]


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
    found = {split: numbers(task, split) for split in task.splits}
    assert set().union(*found.values()) == {*range(300), *range(400, 430), *range(500, 520)}
    assert sum(map(len, found.values())) == 350  # no question twice


def test_a_difficulty_reads_the_files_of_windows_and_ones_without_a_last_newline(tmp_path):
    folder = write(tmp_path)
    path = tmp_path / "train-easy" / f"{MODULE}.txt"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n")[:-2])
    task = Maths(MODULE, "easy", data="original", folder=folder)
    assert numbers(task, "train") | numbers(task, "validation") == set(range(90))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"What is 1?\n1\nWhat is 2?\n", r"has 3 lines, but a question and an answer in turn were wanted"),
        (b"", r"has 0 lines, but"),
        (b"What is 1?\n\n", r"line 2: answer of 1 to 30 characters wanted, 0 came"),
        (b"What is 1?\n1\n" + b"a" * 161 + b"\n1\n", r"line 3: question of 1 to 160 characters wanted, 161 came"),
        (b"What\tis 1?\n1\n", r"line 1: question of 1 to 160 characters wanted, 'What\\tis 1\?' came"),
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


# ------------------------------------------------------------------------------------------------------------ package
OLD = """
    import numpy as np
    from sympy.solvers.diophantine import base_solution_linear

    def table(n):
        cells = np.zeros((n,), dtype=np.object)
        place, value = 1, 5
        cells.itemset(place, value)
        return list(cells)
"""
MODULES = """
    import random
    import numpy as np
    from mathematics_dataset.sample import polynomials

    class Problem:
        def __init__(self, low, high):
            number = random.randrange(int(low), int(high)) + polynomials.table(2)[1] * 0 + np.random.randint(2)
            self.question, self.answer = "n" * 500 if number % 7 == 0 else f"add {number}?", number

    def train(entropy):
        return {"polynomials": {"expand": lambda: Problem(*entropy((0.0, 3000.0)))}}

    def test():
        return {"polynomials": {"expand": lambda: Problem(0.0, 3000.0)}}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with the faults of the real one, in the place of the real one."""
    for name, text in {"sample/polynomials.py": OLD, "modules/modules.py": MODULES}.items():
        path = tmp_path / "mathematics_dataset" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(text))
    (tmp_path / "mathematics_dataset" / "__init__.py").touch()
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("mathematics_dataset")}
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.startswith("mathematics_dataset")]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("difficulty", "span"),
    [("easy", (0, 1001)), ("medium", (1000, 2001)), ("hard", (2000, 3001)), ("mixed", (0, 3001))],
)
def test_the_authors_generator_is_mended_seeded_and_asked_by_difficulty(difficulty, span):
    task = Maths(MODULE, difficulty, data="package", pool=300, question=20)
    assert task.splits == ("train", "validation", "iid")
    found = {split: numbers(task, split) for split in task.splits}
    train = found["train"] | found["validation"]
    assert train <= set(range(span[0], span[1] + 1))
    assert max(train) - min(train) > 0.9 * (span[1] - span[0])
    assert sum(map(len, found.values())) == len(set().union(*found.values())) > 200
    first = task.batch("train", 50, seed=0, step=0).source
    forget()
    random.seed(9)
    np.random.seed(9)
    assert torch.equal(first, task.batch("train", 50, seed=0, step=0).source)


@pytest.mark.usefixtures("package")
def test_the_global_generators_are_put_back(monkeypatch):
    """Python's is watched, not read: the checks of annotations in a test run draw from it, too."""
    back = []
    monkeypatch.setattr(random, "getstate", lambda: "as it was")
    monkeypatch.setattr(random, "setstate", back.append)
    np.random.seed(4)
    wanted = np.random.rand()
    np.random.seed(4)
    Maths(MODULE, data="package", pool=20).batch("train", 1, seed=0, step=0)
    assert back == ["as it was"]
    assert np.random.rand() == wanted


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("module", "question", "message"),
    [
        ("polynomials__expnd", 160, "unknown module 'polynomials__expnd'; did you mean 'polynomials__expand'"),
        (MODULE, 4, "1000 draws gave no question within 4 characters and an answer within 30; allow more$"),
    ],
)
def test_questions_that_the_package_cannot_draw(module, question, message):
    with pytest.raises(ValueError, match=f"^Maths: {message}"):
        Maths(module, data="package", pool=10, question=question).batch("train", 1, seed=0, step=0)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mathematics_dataset", None)
    for name in [name for name in sys.modules if name.startswith("mathematics_dataset.")]:
        monkeypatch.delitem(sys.modules, name)
    with refusing("Maths: data='package' needs mathematics-dataset; pip install mathematics-d"):
        Maths(MODULE, data="package", pool=10).batch("train", 1, seed=0, step=0)


@pytest.mark.skipif(importlib.util.find_spec("mathematics_dataset") is None, reason="mathematics-dataset not installed")
@pytest.mark.parametrize("module", ["algebra__linear_1d", "calculus__differentiate", "arithmetic__mixed"])
def test_the_package_itself(module):
    task = Maths(module, "mixed", data="package", pool=30)
    for split in some(task.splits):
        pairs = task.texts(task.batch(split, 20, seed=0, step=0))
        assert len(pairs) == 20
        assert all(1 <= len(q) <= 160 and 1 <= len(a) <= 30 for q, a in pairs)
        if module != "arithmetic__mixed":
            assert not [fault(module, *pair) for pair in pairs if fault(module, *pair)]
