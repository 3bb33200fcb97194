"""The site: every warning of the build is an error, pages request no other host, and they agree with the code."""

import ast
import doctest
import importlib
import importlib.util
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from scripts import PACKAGE, ROOT, loaded

from polyhead import spec

DOCS = ROOT / "docs"
needs_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo", "transformers", "flax")),
    reason="the site needs polyhead[docs,hf,flax]",
)


def sphinx(source, made, *options):
    """(exit code, what it said) of a build."""
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", f"{made}.trees", *options]
    quiet = {**os.environ, "JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*words, str(source), str(made)], env=quiet, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


class Page(HTMLParser):
    """What a page loads, where it leads, and the places in it that one can lead to."""

    LOADS = ("script", "img", "iframe", "source", "video", "audio")

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.places = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        have = dict(attrs)
        self.places |= {have[name] for name in ("id", "name") if have.get(name)}
        if tag == "link" and have.get("rel") not in ("canonical", "next", "prev", "index", "search"):
            self.loads.append(have["href"])
        if tag in self.LOADS and have.get("src"):
            self.loads.append(have["src"])
        if tag == "a" and have.get("href"):
            self.links.append(have["href"])
        self.loads += re.findall(r"url\(\s*['\"]?([^'\")]+)", have.get("style") or "")


def elsewhere(address):
    return re.match(r"(?:\w+:)?//", address) is not None


# ------------------------------------------------------------------------------------------------------------- the site
@needs_sphinx
@pytest.mark.campaign  # `make docs` builds it, too, and a page of it is below
@pytest.mark.timeout(900)
def test_the_site(tmp_path):
    """One test, as the site takes seconds to build."""
    site = tmp_path / "site"
    code, said = sphinx(DOCS, site)
    assert not said
    assert code == 0
    found = {path: Page(path.read_text()) for path in site.rglob("*.html") if not {"small", "_static"} & {*path.parts}}
    check_that_nothing_is_loaded_from_elsewhere(site, found)
    check_that_links_lead_somewhere(site, found)
    check_the_formulas(site)
    check_the_api(site, found)
    check_the_results(site)


def check_that_nothing_is_loaded_from_elsewhere(site, found):
    assert len(found) > 40
    assert not {(p.name, load) for p, page in found.items() for load in page.loads if elsewhere(load)}
    for path in site.rglob("*.css"):
        loads = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", path.read_text())
        assert not [a or b for a, b in loads if elsewhere(a or b)], path
    assert not [p for p in site.rglob("*") if "mathjax" in p.name.lower() or "katex" in p.name.lower()]


def check_that_links_lead_somewhere(site, found):
    lost = []
    for path, page in found.items():
        for link in [*page.links, *page.loads]:
            if elsewhere(link) or link.startswith(("mailto:", "data:")):
                continue
            file, _, anchor = link.partition("#")
            there = pathlib.Path(os.path.normpath(path.parent / file.partition("?")[0])) if file else path
            if not there.is_file() or (anchor and there in found and anchor not in found[there].places):
                lost.append((str(path.relative_to(site)), link))
    assert not lost


def check_the_formulas(site):
    for row in spec.MECHANISMS:
        page = site / "mechanisms" / f"{row.config.lower()}.html"
        text = page.read_text()
        assert text.count("<math ") >= len(facts_script()["tex"](row.equation))
        assert not re.search(r"\$\$|\\mathrm|\\sum|notranslate nohighlight", text), page


def check_the_api(site, found):
    text = (site / "api" / "ops.html").read_text()
    words = re.sub(r"<[^>]+>", "", text[text.index('id="polyhead.ops.hyla"') :])
    words = re.sub(r"\s+", " ", words.replace("&#39;", "'"))
    assert "q: Float[Tensor, 'b t h d']" in words[:400]
    assert "Float[Tensor, 'b t h e']" in words[:3000]
    assert {f"polyhead.{name}" for name in ("Hyla", "TransformerConfig")} <= found[site / "api" / "config.html"].places
    assert "[jaxlib." not in (site / "api" / "jaxside.html").read_text()
    assert "polyhead.MultiHeadAttention.forward" in found[site / "api" / "layers.html"].places


def check_the_results(site):
    """Folders of results are there as they are in the repository, and load nothing from elsewhere either."""
    here = DOCS / "results" / "small"
    for page in here.glob("*/index.html"):
        copy = site / "results" / "small" / page.relative_to(here)
        text = copy.read_text()
        assert text == page.read_text()
        assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//", text)
    assert "table-a1/index.html" in (site / "results" / "small" / "index.html").read_text()


# ------------------------------------------------------------------------------------------- pages that come of scripts
TINY = """# ---
# jupyter: {}
# ---
# %% [markdown]
# # A script
#
# With $k_s < a^2 + q_{t_1}$.

# %%
print("six", 2 * 3)

# %%
import matplotlib.pyplot as plt
plt.plot([1, 2])
"""


@pytest.mark.thinned(2)
@needs_sphinx
@pytest.mark.timeout(300)
@pytest.mark.parametrize("execute", [False, True])
def test_a_script_is_a_page(tmp_path, execute):
    (tmp_path / "index.py").write_text(TINY)
    extensions = "extensions = ['myst_parser', 'mathml', 'percent']\nmyst_enable_extensions = ['dollarmath']\n"
    paths = f"import sys\nsys.path.insert(0, {str(DOCS / '_ext')!r})\nexclude_patterns = ['conf.py']\n"
    (tmp_path / "conf.py").write_text(paths + extensions + "html_math_renderer = 'mathml'\nhtml_theme = 'furo'\n")
    code, said = sphinx(tmp_path, tmp_path / "out", "-D", f"percent_execute={int(execute)}")
    assert not said
    assert code == 0
    text = (tmp_path / "out" / "index.html").read_text()
    assert "<h1>A script" in text
    assert "<msup>" in text
    assert text.count("<mspace") == text.count("<msub>") == 3  # every subscript stands low
    assert ("six 6" in text) == execute
    assert (".svg" in text) == execute
    assert "jupyter" not in text


def extension(name):
    return loaded("docs", "_ext", f"{name}.py")


@needs_sphinx
@pytest.mark.parametrize("name", ["plain_docstrings", "percent", "mathml"])
def test_examples_of_the_extensions(name):
    failed, attempted = doctest.testmod(extension(name))
    assert (failed, attempted > 0) == (0, True)


def test_docstrings_keep_their_layout():
    made = extension("plain_docstrings").restructured
    assert made(["A |pair| of `code`s, lr_ and *.", "    y = x", "More."]) == [
        r"A \|pair\| of ``code``\ s, lr\_ and \*.",
        *("", ".. code-block:: text", "", "       y = x", "", "More.", ""),
    ]
    assert made([">>> f(1)", "2", "", "Text."])[:5] == ["", ".. code-block:: pycon", "", "   >>> f(1)", "   2"]


def test_links_are_right_on_the_site():
    made = extension("site_links").rewritten
    assert made("[a](docs/speed.md#x) [c](CHANGELOG.md)", ROOT, DOCS, DOCS) == "[a](speed.md#x) [c](changelog.md)"
    assert made("[r](../../README.md)", DOCS / "results", DOCS, DOCS / "results") == "[r](../index.md)"
    assert made("[s](small/)", DOCS / "results", DOCS, DOCS / "results") == "[s](site:small/index.html)"
    assert made("`[s](small/)` [w](https://a.b/)", DOCS, DOCS, DOCS) == "`[s](small/)` [w](https://a.b/)"
    assert made("[all](docs/results/)", ROOT, DOCS, DOCS) == "[all](results/index.md)"


# ------------------------------------------------------------------------------------------------- pages of mechanisms
def facts_script():
    return runpy.run_path(str(DOCS / "figures" / "mechanisms.py"))


def test_the_api_pages_name_what_is_there():
    asked = re.compile(r"^\.\. auto(?:function|class|exception|data|module):: (polyhead[\w.]+)", re.M)
    for path in sorted((DOCS / "api").rglob("*.md")):
        for name in asked.findall(path.read_text(encoding="utf-8")):
            module, _, last = name.rpartition(".")
            if importlib.util.find_spec(module) is None or not hasattr(importlib.import_module(module), last):
                assert importlib.util.find_spec(name), f"{path.name}: {name} is not there"


def test_pages_of_mechanisms_are_the_spec(capsys):
    """If this fails: python docs/figures/mechanisms.py"""
    script = facts_script()
    doctest.run_docstring_examples(script["tex"], script, name="tex")
    assert not capsys.readouterr().out  # which examples fail is printed
    for row in spec.MECHANISMS:
        between = re.findall(r"<!-- spec -->\n(.*?)<!-- /spec -->", script["page"](row).read_text(), re.S)
        assert between == [script["facts"](row)]
        assert script["image"](row).read_text() == script["picture"](row)
    softmax, hyla = (script["ROWS"][name] for name in ("Softmax", "Hyla"))
    assert script["PAIR"].read_text() == script["picture"](softmax, hyla)
    assert {p.stem for p in (DOCS / "mechanisms").glob("*.md")} == {m.config.lower() for m in spec.MECHANISMS} | {
        "index"
    }


def test_every_page_of_a_mechanism_has_all_parts():
    for row in spec.MECHANISMS:
        text = (DOCS / "mechanisms" / f"{row.config.lower()}.md").read_text()
        assert "![" in text
        for part in ("## When to use it", "## Notes", "```python", "$$", row.source, f"`{row.size}`", f"`{row.work}`"):
            assert part in text, part
        order = [text.index(part) for part in ("\n\n", "![", "## When to use it", "<!-- spec -->", "## Notes")]
        assert order == sorted(order)
        assert text[order[0] + 2] not in "!<$|"  # the idea comes first, in words
        assert f"`{row.config}`" in (DOCS / "mechanisms" / "index.md").read_text()


# -------------------------------------------------------------------------------------------------- the patch of a page
def test_the_mechanism_of_ones_own_works_as_the_page_says(tmp_path):
    patch = DOCS / "howto" / "energy.patch"
    unfinished = shutil.ignore_patterns("*.pyc.*")  # what is compiled is copied, too: it takes a second
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.relative_to(ROOT), ignore=unfinished)
    subprocess.run(["git", "apply", "-p1", str(patch)], cwd=tmp_path, check=True)
    use = """if True:
        import runpy, torch, polyhead as ph
        tests = runpy.run_path("tests/ops/test_energy.py")
        ran = [tests[name]() for name in tests if name.startswith("test_")]
        task = ph.tasks.FuzzyLogic(length=8)
        model = ph.Transformer(ph.TransformerConfig(*task.ends, dim=16, heads=[ph.Energy(2), ph.Hyla(2)]))
        batch = task.batch("train", 4, seed=0, step=0)
        task.loss(model(batch.inputs), batch).backward()
        taps = ph.analysis.capture(model, batch)[0]
        print(len(ran), tuple(ph.analysis.codes(taps, -1, -1).shape))
        print(ph.spec.mechanism("energy_attention").config, "Energy" in dir(ph), "Energy" in ph.config.__all__)
        try:
            ph.analysis.value_network(taps, -1, -1, group=0)  # no sum of code times value
        except ValueError as error:
            print(error)
    """
    clean = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "JAXTYPING_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", use], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, refused = done.stdout.splitlines()
    assert (first, second) == ("2 (4, 4)", "Energy True True")
    assert refused.startswith("value_network: the output of these heads must be the sum of code times value")


# -------------------------------------------------------------------------------------------------------------- the API
SHOWN = {
    name: kind
    for page in sorted((DOCS / "api").glob("*.md"))
    for kind, name in re.findall(r"^\.\. auto(function|class|module):: (\S+)", page.read_text(), re.M)
}


def definitions(path):
    """(name, node, names of its bases) of every public class and function of a file, and of the methods of classes."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            yield node.name, node
            for child in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
                    yield f"{node.name}.{child.name}", child


def silent(found, names):
    """Of definitions (file, name, node) those of `names` whose docstring does not say what they are.

    A method may be silent where its name says it all in this project (`forward`), or where the class it implements
    speaks for it.
    """
    bases = ("Task.", "Codec.", "Taps.", "GroupTaps.", "Mechanism.")
    spoken = {name.partition(".")[2] for _, name, node in found if name.startswith(bases) and ast.get_docstring(node)}
    for path, name, node in found:
        owner, _, method = name.partition(".")
        says = not (ast.get_docstring(node) or ">>>").startswith(">>>") or method in {"forward", "extra_repr", *spoken}
        if owner in names and not says and path.name != "writer.py":  # which has another function `digest`
            yield name


def test_what_the_api_shows_says_what_it_is(tmp_path):
    """Docstrings of every function, class and method there, read from the sources."""
    names = {name.rpartition(".")[2] for name, kind in SHOWN.items() if kind != "module"}
    planted = tmp_path / "planted.py"
    planted.write_text('class Hyla:\n    def f(self): ...\n    def forward(self): ...\ndef plan():\n    """>>> 1"""\n')
    found = [(path, *d) for path in (*PACKAGE.rglob("*.py"), planted) for d in definitions(path)]
    assert list(silent(found, names)) == ["Hyla", "Hyla.f", "plan"]
