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
    "cli/files.py": "writes only",
    "cli/text.py": "own table",
    "compat/foreign.py": "package/config.json",
    "compat/huggingface/card.py": "the text of a card",
    "pages/document.py": "own styles and scripts",
    "train/store/state.py": "run/ended.json, with its checksum",
    "compat/dual_attention/load.py": "package/config.json, package/model.safetensors",
    "compat/huggingface/explore.py": "test_a_model_of_hugging_face_is_not_unpickled",
    "compat/huggingface/heads.py": "a docstring",
    "compat/huggingface/model.py": "docstrings; test_a_model_of_hugging_face_is_not_unpickled",
    "compat/huggingface/tokens.py": "a docstring; what our own codec has written",
    "cli/generate.py": "prompt.txt",
    "pages/report/runs.py": "run/metrics.jsonl, counted by line",
    "pages/report/page.py": "own figures",
    "jaxside/convert.py": "run/checkpoint.safetensors: tests/jaxside/test_convert.py",
    "papers/redraw.py": "results.json",
    "papers/reproduce.py": "results.json",
    "papers/page.py": "own pictures",
    "papers/study.py": "run/data.json; files for their digest",
    "analysis/canvas.py": "own pictures",
    "config/serial.py": "run/config.json, mine.yaml, grid.yaml",
    "tasks/images/data.py": "pictures; CIFAR's binary version is numbers",
    "tasks/maths/text.py": "questions",
    "tasks/relational_games/original.py": "same_pentos.npz",
    "tasks/task.py": "own tables",
    "tasks/text/task.py": "run/data.json",
    "tasks/text/data.py": "tokens",
    "tasks/text/sources.py": "documents, as bytes; the Hub without code",
    "tasks/text/tokens.py": "run/tokenizer.json, mine.model, run/data.json",
    "tasks/text/writer.py": "tokens",
    "ops/native/library.py": "own sources; a library is loaded only if it has the digest noted when it was built",
    "train/store/bad_batch.py": "run/bad_batch.safetensors",
    "train/store/claims.py": "run/config.json, compared byte by byte",
    "train/store/checkpoint.py": "run/checkpoint.safetensors and the kept ones",
    "train/store/sharded.py": "tests/train/test_checkpoint_sharded.py",
    "scale/sweep/engines/slurm.py": "own records, as JSON and numbers",
    "train/store/shipped.py": "own index; a file is loaded only if it has the digest noted there",
    "train/store/files.py": "a copy, byte for byte",
    "train/store/folder.py": "run/config.json, run/result.json, run/metrics.jsonl",
    "scale/records.py": "run/config.json, looked through for a word before it is read as one",
    "scale/sweep/job.py": "run/metrics.jsonl and logs, as text",
    "train/tracking.py": "what was told to a tracker, as text",
    "scale/tune/search.py": "test_tune",
}
"""Every file that reads something, and the case of test_hostile_files.py, or the test, that shows that it is safe."""


def test_every_loader_is_known():
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        if calls := sorted(set(re.findall(LOADS, text))):
            found[str(path.relative_to(SOURCE))] = calls
    assert found.keys() - KNOWN.keys() == set(), {name: found[name] for name in found.keys() - KNOWN.keys()}
    assert KNOWN.keys() - found.keys() == set(), "these read nothing any more"


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
