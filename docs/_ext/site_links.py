"""Links that are right in the repository, made right on the site.

README, CONTRIBUTING and CHANGELOG lie beside docs/ and are included by pages in it.  Folders of results are copied,
each with an index.
"""

import html
import os
import pathlib
import re
import shutil
from typing import Any

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
COPIED = ("results/small", "results/fuzzy", "results/sraven")
LINK = re.compile(r"(!?\[[^]]*\]\()([^)\s#]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.M | re.S)


def rewritten(text: str, folder: pathlib.Path, docs: pathlib.Path, page: pathlib.Path) -> str:
    """`text`, whose links start from `folder`, for a page that lies in `page`."""

    def link(found: re.Match[str]) -> str:
        before, target, anchor, after = found[1], found[2], found[3] or "", found[4]
        if ":" in target:
            return found[0]
        there = pathlib.Path(os.path.normpath(folder / target))
        if there.parent == docs.parent and there.name in PAGES:
            there = docs / PAGES[there.name]
        if there == docs / "results":
            there /= "index.md"
        scheme = ""
        if there.is_dir() and docs in there.parents:
            scheme, there = "site:", there / "index.html"
        elif there.suffix == ".md" and docs not in there.parents:
            scheme = "path:"  # a page outside docs/ (of the record, of tests) is offered as the file it is
        return before + scheme + os.path.relpath(there, page) + anchor + after

    return "".join(part if part.startswith("`") else LINK.sub(link, part) for part in CODE.split(text))


def read(app: Any, docname: str, content: list[str]) -> None:
    """For source-read: a page of docs/."""
    docs = pathlib.Path(app.srcdir)
    page = (docs / docname).parent
    content[0] = rewritten(content[0], page, docs, page)


def include(app: Any, path: pathlib.Path, parent: str, content: list[str]) -> None:
    """For include-read: a page beside docs/, included by one that lies in docs/ itself."""
    docs = pathlib.Path(app.srcdir)
    content[0] = rewritten(content[0], pathlib.Path(os.path.normpath(docs / path)).parent, docs, docs)


def listing(folder: pathlib.Path) -> str:
    """A page of links to what lies in a folder."""
    names = sorted(p.name + ("/index.html" if p.is_dir() else "") for p in folder.iterdir())
    rows = "\n".join(f'<li><a href="{html.escape(n)}">{html.escape(n.split("/")[0])}</a></li>' for n in names)
    style = "body{font:1rem/1.6 system-ui,sans-serif;margin:2rem auto;max-width:44rem;padding:0 1rem}"
    head = f'<meta charset="utf-8"><meta name="color-scheme" content="light dark"><style>{style}</style>'
    body = f"<h1>{folder.name}</h1><ul>{rows}</ul>"
    return f"<!doctype html><html lang='en'>{head}<title>{folder.name}</title>{body}</html>\n"


def copy(app: Any, exception: Exception | None) -> None:
    """For build-finished: the folders of results, as they are."""
    if exception or app.builder.format != "html":
        return
    for name in COPIED:
        made = pathlib.Path(app.outdir, name)
        shutil.copytree(pathlib.Path(app.srcdir, name), made, dirs_exist_ok=True)  # beside the pages of the site
        for folder in [made, *(p for p in made.rglob("*") if p.is_dir())]:
            if not (folder / "index.html").exists():
                (folder / "index.html").write_text(listing(folder), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Hooks into reading and into the end."""
    app.connect("source-read", read)
    app.connect("include-read", include)
    app.connect("build-finished", copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
