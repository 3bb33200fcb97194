"""Formulas as MathML, made when the site is built: browsers draw it themselves; no script and no font is loaded."""

from typing import Any

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)


def _mathml(node: nodes.Node, *, block: bool) -> str:
    try:
        return latex2mathml.tex2mathml(node.astext(), as_block=block)
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
