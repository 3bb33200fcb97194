"""The report's section on single inputs: heat maps, chosen by example, layer, head and relation."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from polyhead.pages import document
from polyhead.pages.document import escape
from polyhead.pages.report.attention import KINDS, CheckpointExamples, Example, Map, maps
from polyhead.pages.report.figures import FAINT, blank
from polyhead.pages.report.headline import sample
from polyhead.pages.report.page import STEPS, Page
from polyhead.spec.optional import optional

WORDS = {
    "attention": ("head", "Attention: how much each token (row) takes from each (column)."),
    "relations": ("relation", "Relations: how each token (row) compares with each (column)."),
    "symbols": ("symbols by head", "Symbols: how much of each symbol (column) a token (row) has."),
}
AXES = {"attention": ("from token", "token"), "relations": ("token", "token"), "symbols": ("symbol", "token")}


def section(out: Page, looked: Sequence[CheckpointExamples]) -> None:
    """One block per mechanism.  The first with relations is open, the others are closed."""
    shown = [one for one in looked if one.examples]
    if not shown:
        return
    first = next((one for one in shown if one.related), shown[0])
    heading = "Where does it look, and what does it compare?" if first.related else "Where does it look?"
    out.section("looks", heading, "Attention")
    out.add(document.paragraphs(_words(first)))
    for one in [first, *(other for other in shown if other is not first)]:
        body = _block(out, one)
        out.add(f"<h3>{escape(one.name)}</h3>{body}" if one is first else document.details(one.name, body))


def _words(one: CheckpointExamples) -> list[str]:
    lines = [
        f"Examples: {sample(one.entry.run.task, one.split)}. Attention is the latent code of a pair of tokens; of "
        "softmax heads each row adds up to 1."
    ]
    if one.related:
        lines[0] += (
            " Relational heads retrieve no content: weighted by their attention, they add up symbols of the tokens "
            "they look at and relations to them."
        )
    return lines


def _block(out: Page, one: CheckpointExamples) -> str:
    """Controls, the input, and a figure for each kind of matrix."""
    name = f"look-{len(out.looks) + 1}"
    every = [[(layer.name, maps(layer)) for layer in example.layers] for example in one.examples]
    kinds = [kind for kind in KINDS if any(found[kind] for layers in every for _, found in layers)]
    plots, figures = "", {}
    for kind in kinds:
        plots += out.plot(figure(kind), WORDS[kind][1])
        figures[kind] = out.figures[-1]["id"]
    examples = [[{"name": layer, **_packed(found)} for layer, found in layers] for layers in every]
    out.looks.append({"id": name, "figures": figures, "examples": examples})
    counts = [str(i + 1) for i in range(len(one.examples))]
    choices = _select("example", "example", counts) + _select("layer", "layer", [layer for layer, _ in every[0]])
    choices += "".join(_select(kind, WORDS[kind][0], []) for kind in kinds)
    seen = "".join(_seen(i, example) for i, example in enumerate(one.examples))
    body = f'<div class="choices">{choices}</div>{seen}<div class="row">{plots}</div>'
    if (last := next((example.last for example in one.examples if example.last), None)) is not None:
        body += f'<p class="note">Of sequences longer than {last} tokens the last {last} are shown.</p>'
    return f'<div class="look" id="{name}">{body}</div>'


def _select(name: str, label: str, options: Sequence[str]) -> str:
    inner = "".join(f"<option>{escape(option)}</option>" for option in options)
    return f'<label>{escape(label)} <select name="{name}">{inner}</select></label>'


def _packed(found: dict[str, list[Map]]) -> dict[str, list[dict[str, Any]]]:
    """The matrices of a layer as integers in units of `limit` / STEPS."""
    return {
        kind: [
            {
                "name": each.name,
                "limit": float(f"{each.limit:.6g}"),
                "signed": each.signed,
                "rows": each.rows,
                "columns": each.columns,
                "z": np.rint(each.values * (STEPS / each.limit)).astype(int).tolist(),
            }
            for each in every
        ]
        for kind, every in found.items()
        if every
    }


def _seen(i: int, example: Example) -> str:
    image = "" if example.image is None else svg(*example.image)
    return f'<div class="seen" data-example="{i}"{" hidden" * bool(i)}>{image}<p>{escape(example.text)}</p></div>'


def figure(kind: str) -> go.Figure:
    """A heat map without values; the page's script fills in the chosen matrix."""
    made = blank(300, x=AXES[kind][0], y=AXES[kind][1], legend=False)
    bar = {"thickness": 8, "len": 1.0, "outlinewidth": 0, "tickfont": {"size": 10, "color": FAINT}, "nticks": 5}
    made.add_heatmap(z=[], colorbar=bar, hovertemplate="%{text}: %{z:.3f}<extra></extra>", hoverongaps=False)
    quiet = {"showgrid": False, "zeroline": False, "ticks": "", "showline": False, "title": {"font": {"size": 12}}}
    made.update_xaxes(**quiet)
    made.update_yaxes(**quiet, autorange="reversed")
    return made


# -------------------------------------------------------------------------------------------------------------- images
def svg(pixels: np.ndarray, rows: int, columns: int) -> str:
    """An image as SVG, with its patches numbered like tokens, from 1, row by row."""
    lines = [f'<path d="M0 {10 * i}h{10 * columns}"/>' for i in range(1, rows)]
    lines += [f'<path d="M{10 * i} 0v{10 * rows}"/>' for i in range(1, columns)]
    numbers = [
        f'<text x="{10 * (i % columns) + 0.6}" y="{10 * (i // columns) + 2.9}">{i + 1}</text>'
        for i in range(rows * columns)
    ]
    picture = f'<image href="{png(pixels)}" width="{10 * columns}" height="{10 * rows}" preserveAspectRatio="none"/>'
    box = f'viewBox="0 0 {10 * columns} {10 * rows}" role="img" aria-label="the image, its patches numbered"'
    return f'<svg class="patches" {box}>{picture}{"".join(lines + numbers)}</svg>'


def png(pixels: np.ndarray) -> str:
    """An image (height width 3) of colours in [0, 1] as a data URL of PNG."""
    with optional("report", "polyhead[report]"):
        from PIL import Image
    Image.fromarray(np.rint(pixels * 255).astype(np.uint8)).save(file := io.BytesIO(), "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def still(example: Example) -> dict[str, tuple[str, list[Any]]]:
    """Panels for figure files, by layer and kind: (scale label, (title, values, row names, column names))."""
    found: dict[str, tuple[str, list[Any]]] = {}
    for layer in example.layers:
        for kind, every in maps(layer).items():
            panels = [(f"{layer.name}, {m.name}", m.values, m.rows, m.columns or _counted(m)) for m in every]
            if panels:
                found[f"{kind}-{layer.name.replace(' ', '')}"] = (kind, panels)
    return found


def _counted(one: Map) -> tuple[str, ...]:
    """Names of symbols: their numbers, for many symbols only every eighth."""
    count = one.values.shape[1]
    return tuple(str(i + 1) if count <= 16 or (i + 1) % 8 == 0 else "" for i in range(count))
