"""Every place in the source that reads a file is listed, and none can run code from a file."""

import ast
import pathlib
import re

from some import some

import polyhead as ph

SOURCE = pathlib.Path(ph.__file__).parent

LOADS = (
    r"torch\.load\(|\bpickle\b|marshal|shelve|joblib|np\.load\(|fromfile|memmap\(|safe_open\(|load_file\(|yaml\.|"
    r"json\.loads?\(|read_bytes\(|read_text\(|from_pretrained\(|Image\.open\(|JournalFileBackend\(|load_dataset\("
)
KNOWN = {
    "own files": "cli/text.py pages/document.py papers/page.py analysis/canvas.py tasks/task.py",
    "own files that have the digest noted for them": "ops/native/library.py train/store/shipped.py",
    "nothing: it writes, copies or explains": "cli/files.py compat/huggingface/attention.py compat/huggingface/card.py "
    "compat/huggingface/heads.py compat/huggingface/tokens.py train/checks.py train/store/files.py",
    "numbers and text as such": "ops/cards.py train/store/state.py train/store/claims.py train/tracking.py "
    "pages/report/runs.py papers/study.py scale/records.py scale/sweep/job.py scale/sweep/engines/slurm.py",
    "what test_hostile_files.py spoils": "compat/foreign.py compat/dual_attention/load.py cli/generate.py "
    "compat/huggingface/explore.py compat/huggingface/model.py config/serial.py papers/redraw.py papers/reproduce.py "
    "tasks/images/data.py tasks/maths/text.py tasks/relational_games/original.py tasks/record.py "
    "tasks/text/sources.py tasks/text/tokens.py train/store/bad_batch.py train/store/checkpoint.py "
    "train/store/folder.py",
    "what other tests spoil": "train/store/sharded.py scale/tune/search.py tasks/text/corpus.py",
}
"""Every file that reads something, by what it reads, which shows that it is safe."""


def test_every_loader_is_known():
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if re.search(LOADS, path.read_text())}
    assert found == {name for names in KNOWN.values() for name in names.split()}


def test_no_source_runs_code_from_a_file():
    forbidden = (
        r"torch\.load\(|import pickle|pickle\.|allow_pickle=True|yaml\.(?:unsafe_)?load\(|\bexec\(|[^.\w]eval\(|"
    )
    forbidden += r"weights_only=False|shell=True|os\.system\("
    for path in some(sorted(SOURCE.rglob("*.py"))):
        text = path.read_text()
        code = "\n".join(line.partition("#")[0] for line in text.splitlines())
        installed = "exec(compile(text, spec.origin"  # a package that its user has installed is mended as it is read
        assert re.findall(forbidden, code.replace(installed, "")) == [], path
        if "trust_remote_code" in text:  # words to a reader may speak of it
            assert "trust_remote_code" not in [getattr(x, "arg", None) for x in ast.walk(ast.parse(text))], path
