"""A figure of matplotlib as an SVG in the colours that the reader's browser prefers, light or dark."""

from __future__ import annotations

import io

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

VARIABLES = {"#ffffff": "var(--paper)", "#000000": "var(--ink)", "#e2e8f0": "var(--line)"}
"""Matplotlib's colours of ground and writing, and the grid's → the page's. Curves keep theirs: they show on both."""
STYLE = """<style>
:root { --paper: #ffffff; --ink: #1f2328; --line: #e2e8f0; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --line: #30363d; } }
#figure_1 { fill: var(--ink); }
</style>"""
"""As in docs/pictures/run.svg. A letter's path names no colour: it has the figure's."""


def svg(figure: Figure) -> str:
    """Returns a figure as text, and closes it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return for_light_and_dark(buffer.getvalue())


def for_light_and_dark(text: str) -> str:
    for color, variable in VARIABLES.items():
        text = text.replace(color, variable)
    return text.replace("<defs>", f"{STYLE}\n <defs>", 1)
