"""Formulas: what the converter would misread is a warning, with which a build fails."""

import logging

import pytest
from docutils import nodes

from pages.mathml import _converted


@pytest.mark.parametrize(
    "formula", [r"\frac{1}{2} M", r"\tfrac{2}{3} C", r"\frac{n-1}{n}S", "2^{10}", "x_1^2"]
)
def test_braces(formula, caplog):
    assert _converted(nodes.math(formula, formula), as_block=False).startswith("<math")
    assert not caplog.records


@pytest.mark.parametrize("formula", [r"\frac12 M", r"\tfrac23 C", r"\frac wL", "2^10"])
def test_no_braces(formula, caplog):
    with caplog.at_level(logging.WARNING):
        _converted(nodes.math(formula, formula), as_block=False)
    assert "expected braces in a formula" in caplog.text
