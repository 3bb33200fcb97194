"""Formulas as MathML, made when the site is built: browsers draw it themselves; no script and no font is loaded."""

import html
import re
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

MATHML = "http://www.w3.org/1998/Math/MathML"
ENTITY = re.compile(r"&(?!amp;|lt;|gt;|quot;|apos;|#)\w+;")
logger = logging.getLogger(__name__)


def lowered(formula: str) -> str:
    """A formula whose subscripts stand low also where no font has a table for mathematics.

    There a browser goes by how deep the letter before is, and s in k_s would stand beside k: each gets a little depth.

    >>> lowered("<math><msub><mi>k</mi><mi>s</mi></msub></math>")
    '<math><msub><mrow><mi>k</mi><mspace depth="0.25em" /></mrow><mi>s</mi></msub></math>'

    Entities of HTML, which XML does not know, become what they stand for; log is written with one.

    >>> lowered("<math><mi>log</mi><mo>&ApplyFunction;</mo><mn>2</mn></math>") == (
    ...     "<math><mi>log</mi><mo>\u2061</mo><mn>2</mn></math>"
    ... )
    True
    """
    known = ENTITY.sub(lambda found: html.unescape(found[0]), formula)
    whole = ElementTree.fromstring(known.replace(f' xmlns="{MATHML}"', ""))  # a page of HTML knows what math is
    for script in [*whole.iter("msub")]:
        base = ElementTree.Element("mrow")
        base.extend((script[0], ElementTree.Element("mspace", depth="0.25em")))
        script[0] = base
    return ElementTree.tostring(whole, encoding="unicode")


def _mathml(node: nodes.Node, *, block: bool) -> str:
    try:
        return lowered(latex2mathml.tex2mathml(node.astext(), as_block=block))
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return ""


def inline(writer: Any, node: nodes.math) -> None:
    """$a$"""
    writer.body.append(_mathml(node, block=False))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    """$$a$$"""
    writer.body.append(f'<div class="formula">{_mathml(node, block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Registers the renderer that `html_math_renderer` names."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
