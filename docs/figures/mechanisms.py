"""The pages of mechanisms: equation and cost are read off `polyhead.spec`, pictures are drawn here.

    python docs/figures/mechanisms.py        writes both

A picture shows the code of one query as the op computes it, and where it enters.
"""

import dataclasses
import pathlib
import re
from html import escape

import torch

import polyhead as ph
from polyhead import spec
from polyhead.ops.registry import IMPLS

DOCS = pathlib.Path(__file__).parents[1]
SIZES = {"m": 512, "h": 8, "d": 64, "e": 64, "s": 1024, "r": 8, "p": 64}
NAMES = {"out": r"\mathrm{out}", "rel": r"\mathrm{rel}"}


# ------------------------------------------------------------------------------------------------------------ equations
def tex(equation: str) -> list[str]:
    """The lines of an equation of the table, for a page.

    >>> tex("y_t = sum_h W_out_h a_hts,   a = softmax_s(q_th . k_sh / sqrt(d))")[1]
    'a = \\\\mathrm{softmax}_{s}\\\\left(\\\\frac{q_{th} \\\\cdot k_{sh}}{\\\\sqrt{d}}\\\\right)'
    """
    return [_line(line) for line in re.split(r",\s{2,}", equation)]


def _line(line: str) -> str:
    if " as in " in line:
        name, _, words = line.partition(" ")
        return rf"{name}\ \text{{ {words}}}"
    line = re.sub(r"(\w+) \. (\w+) / sqrt\((\w)\)", r"\\frac{\1 \\cdot \2}{\\sqrt{\3}}", line)
    line = re.sub(r"(?<![\\\w])[A-Za-z]\w*", lambda found: _name(found[0]), line)
    line = re.sub(r"(?<=[\w})]) (?=\\mathrm)", r" \\, ", line)  # a word, after what it is multiplied with
    return re.sub(r" +", " ", line.replace("(", r"\left(").replace(")", r"\right)"))


def _name(name: str) -> str:
    base, *marks = name.split("_")
    if base == "sum":
        return rf"\sum_{{{marks[0]}}}"
    if name in ("rms_heads", "sqrt", "frac", "cdot"):
        return r"\mathrm{rms}_{\mathrm{heads}}" if name == "rms_heads" else name
    above = "".join(f"^{{{NAMES[mark]}}}" for mark in marks if mark in NAMES)
    below = "".join(f"_{{{mark}}}" for mark in marks if mark not in NAMES)
    return (base if len(base) == 1 else rf"\mathrm{{{base}}}") + above + below


# ---------------------------------------------------------------------------------------------------------------- facts
def facts(row: spec.MechanismRow) -> str:
    """What stands between the markers of its page."""
    common = {f.name for f in dataclasses.fields(ph.config.SymbolHeads)} - {"heads"}
    fields = [f for f in dataclasses.fields(getattr(ph, row.config)) if f.name not in common]
    table = {
        "heads": f"`ph.{row.config}({', '.join(f'{f.name}={f.default!r}' for f in fields)})`; "
        f"[all fields](../api/config.md#mechanisms)",
        "function": f"`ph.ops.{row.op}`; [arguments](../api/ops.md#attention)",
        "tensors": ", ".join(f"`{name}` `({axes})`" for name, axes in {**row.tensors, **row.optional}.items()),
        **{f"`{name}`": ", ".join(f"`{v}`" for v in values) for name, values in row.choices.items()},
        "parameters": f"`{row.size}` a head" + _example(row.size),
        "multiply-adds": f"`{row.work}` a head, for a token that looks at s keys" + _example(row.work),
        "state dict of a layer with `bias=True`": ", ".join(f"`{name}` `[{axes}]`" for name, axes in row.layer.items()),
        "of its own": "; ".join(f"`{n}`: {axes.replace(';', ',')}" for n, axes in row.parameters.items()) or "nothing",
        "`impl`": ", ".join(f"`{i}`" for i in ("auto", *IMPLS[row.folder])),
        "source": row.source,
    }
    equations = "\n\n".join(f"$$\n{line}\n$$" for line in tex(row.equation))
    return "\n".join([equations, "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in table.items()), ""])


def _example(formula: str) -> str:
    letters = [letter for letter in SIZES if re.search(rf"\b{letter}\b", formula)]
    return f"; {spec.amount(formula, SIZES):,} at " + ", ".join(f"{letter} {SIZES[letter]:,}" for letter in letters)


# ------------------------------------------------------------------------------------------------------------- pictures
INK, FAINT, PAPER, LINE = "#24292f", "#6e7781", "#ffffff", "#afb8c1"
LOOKS = {  # how its code is normalised, in words; the steps after it, and into which of them the code goes
    "Softmax": (
        "every row adds up to 1",
        [
            ("value of a key, for each head", "v_sh", 0),
            ("mixed over keys, for each head", "sum_s a_hts v_sh", 1),
            ("output of all heads, added up", "y_t", 0),
        ],
    ),
    "Linear": (
        "the scores, not normalised",
        [
            ("value of a key, for each head", "v_sh", 0),
            ("summed over keys, for each head", "sum_s a_hts v_sh", 1),
            ("output of all heads, added up", "y_t", 0),
        ],
    ),
    "Hyla": (
        "every column has root mean square 1",
        [
            ("layer 1: values, mixed over heads", "act(sum_h a_hts v_sh)", 1),
            ("layer 2: outputs, mixed over heads", "sum_h a_hts W_out_h", 1),
            ("summed over keys", "y_t", 0),
        ],
    ),
    "Relational": (
        "every row adds up to 1",
        [
            ("which token: its symbol", "sum_s a_hts symbol_sh", 1),
            ("how the two compare: r relations", "W_rel_h sum_s a_hts rel_ts", 1),
            ("output: the sum of both", "y_t", 0),
        ],
    ),
    "Disentangled": (
        "every row adds up to 1",
        [
            ("one relation for each head and pair", "rel_hts", 0),
            ("relation times code weights symbols", "sum_s a_hts rel_hts symbol_sh", 1),
            ("output of all heads, added up", "y_t", 0),
        ],
    ),
    "Abstractor": (
        "every row adds up to 1",
        [
            ("symbol of a key, without content", "symbol_sh", 0),
            ("mixed over keys, for each head", "sum_s a_hts symbol_sh", 1),
            ("output of all heads, added up", "y_t", 0),
        ],
    ),
    "Pooled": (
        "every column has root mean square 1",
        [
            ("layer 1: values, mixed over heads", "act(sum_h a_hts v_sh)", 1),
            ("times the code, for each head", "a_hts act(sum_h a_hts v_sh)", 1),
            ("largest over keys, for each head", "max_s a_hts act(sum_h a_hts v_sh)", 0),
        ],
    ),
}


def code(normalise: str, keys: int = 5, heads: int = 4) -> list[list[float]]:
    """The code of the last of five tokens, [head][key], for queries and keys that are sines."""
    n = torch.arange(keys * heads * 4, dtype=torch.float64).reshape(1, keys, heads, 4)
    q, k = 1.5 * torch.sin(1.7 * n + 1), 1.5 * torch.cos(2.3 * n)
    return ph.ops.latent_code(q, k, normalise=normalise)[0, :, -1].tolist()


def picture(*rows: spec.MechanismRow) -> str:
    """An SVG of mechanisms, one below the other: the code of one query on the left, where it enters on the right."""
    height = 276 * len(rows)
    drawn = [f'<g transform="translate(0 {276 * i})">\n{_drawing(row)}\n</g>' for i, row in enumerate(rows)]
    title = " ".join(f"{row.config}: {row.summary}" for row in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720" height="{height}" '
        f'role="img">\n'
        f"<title>{escape(title)}</title>\n"
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'markerUnits="userSpaceOnUse" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker></defs>\n'
        f'<rect width="720" height="{height}" rx="8" fill="{PAPER}"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _drawing(row: spec.MechanismRow) -> str:
    looks, steps = LOOKS[row.config]
    values = code(row.normalise)
    top = max(abs(v) for line in values for v in line)
    name = "HYLA" if row.config == "Hyla" else row.config
    parts = [_text(24, 34, f"{name}: the code of one query t", size=14, weight=600), _text(24, 54, looks, colour=FAINT)]
    for h, line in enumerate(values):
        parts.append(_text(24, 106 + 38 * h, f"head {h + 1}", colour=FAINT))
        for s, value in enumerate(line):
            parts.append(_cell(84 + 50 * s, 82 + 38 * h, value, top))
    parts += [_text(105 + 50 * s, 252, f"s={s + 1}", colour=FAINT, anchor="middle") for s in range(len(values[0]))]
    for i, (name, formula, enters) in enumerate(steps):
        y = 24 + 84 * i
        parts.append(f'<rect x="420" y="{y}" width="276" height="56" rx="6" fill="{PAPER}" stroke="{LINE}"/>')
        parts += [_text(434, y + 22, name, colour=FAINT), _text(434, y + 43, formula, mono=True)]
        if i:
            parts.append(_arrow(558, y - 27, 558, y - 3))
        if enters:
            parts.append(_arrow(338, 156, 417, y + 28, strong=True))
    return "\n".join(parts)


def _text(
    x: int,
    y: int,
    words: str,
    *,
    size: int = 13,
    colour: str = INK,
    anchor: str = "start",
    weight: int = 400,
    mono: bool = False,
) -> str:
    family = "ui-monospace, Menlo, Consolas, monospace" if mono else "system-ui, sans-serif"
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}" '
        f'font-family="{family}">{escape(words)}</text>'
    )


def _cell(x: int, y: int, value: float, top: float) -> str:
    strength = (abs(value) / top) ** 0.5
    warm, cold = (213, 94, 0), (0, 114, 178)
    mixed = [round(255 - strength * 0.8 * (255 - c)) for c in (warm if value > 0 else cold)]
    ink = PAPER if strength > 0.85 else INK
    fill = "#{:02x}{:02x}{:02x}".format(*mixed)
    box = f'<rect x="{x}" y="{y}" width="46" height="34" rx="4" fill="{fill}"/>'
    return box + _text(x + 23, y + 22, f"{value:.2f}".replace("-", "−"), colour=ink, anchor="middle")


def _arrow(x1: int, y1: int, x2: int, y2: int, *, strong: bool = False) -> str:
    width = 2 if strong else 1.2
    return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{FAINT}" stroke-width="{width}" marker-end="url(#tip)"/>'


# ------------------------------------------------------------------------------------------------------------------ all
ROWS = {row.config: row for row in spec.MECHANISMS}
PAIR = DOCS / "figures" / "softmax-and-hyla.svg"
"""What HYLA changes, for the README."""


def page(row: spec.MechanismRow) -> pathlib.Path:
    """Where it is described."""
    return DOCS / "mechanisms" / f"{row.config.lower()}.md"


def image(row: spec.MechanismRow) -> pathlib.Path:
    """Where it is drawn."""
    return DOCS / "figures" / f"mechanism-{row.config.lower()}.svg"


def main() -> None:
    """Write what is read off the table."""
    for row in spec.MECHANISMS:
        old = page(row).read_text(encoding="utf-8")
        new = re.sub(r"(<!-- spec -->\n).*?(<!-- /spec -->)", lambda m, r=row: m[1] + facts(r) + m[2], old, flags=re.S)
        if new != old:
            page(row).write_text(new, encoding="utf-8")
        image(row).write_text(picture(row), encoding="utf-8")
    PAIR.write_text(picture(*(ROWS[name] for name in ("Softmax", "Hyla"))), encoding="utf-8")


if __name__ == "__main__":
    main()
