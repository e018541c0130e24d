"""How `make docs` turns README.md and docs/ into pages: Sphinx reads the Markdown files as they are.

Links between files and to headings are those of GitHub; one that leads nowhere fails the build. The pages load nothing
from other hosts.
"""

project = "areal_megatron"
author = "The areal_megatron developers"
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "RELEASING.md",
    "SECURITY.md",
    "docs/**.md",
    "examples/**.md",
]
extensions = ["myst_parser"]
myst_heading_anchors = 6
html_theme = "furo"
html_title = "areal_megatron"
html_copy_source = False
html_show_sphinx = False
pygments_style = "sphinx"
pygments_dark_style = "monokai"
suppress_warnings = [
    "misc.highlighting_failure",  # JSON with a comment, a shell line with an ellipsis
    "myst.header",  # a page may go from # to ### where that reads better
]

CONTENTS = {
    "Start": [
        "start",
        "tutorials/laptop",
        "tutorials/reward",
        "tutorials/workflow",
        "tutorials/slurm",
        "tutorials/model_family",
        "coming_from",
        "troubleshooting",
    ],
    "Guides": [
        "data",
        "difficulty",
        "rewards",
        "sandbox",
        "workflows",
        "agents",
        "environments",
        "served",
        "staleness",
        "supervised",
        "adapters",
        "watching",
        "evaluation",
        "trajectories",
        "launching",
        "operations",
        "surviving",
        "security",
        "checkpoints",
        "sites",
        "python",
        "loop",
        "tinker",
    ],
    "Reference": [
        "keys",
        "commands",
        "options",
        "metrics",
        "algorithms",
        "graders",
        "published_runs",
        "measurements",
    ],
    "How it works": [
        "design",
        "packing",
        "resharding",
        "hardware",
        "adding_a_family",
    ],
}
"""Heading → pages of docs/, as README.md groups them; what is not listed comes at the end of the second."""


def _add_contents(app, name, source):
    if name != root_doc:
        return
    listed = {page for pages in CONTENTS.values() for page in pages}
    others = {page.removeprefix("docs/") for page in app.env.found_docs if page.startswith("docs/")} - listed
    sections = {**CONTENTS, "Guides": [*CONTENTS["Guides"], *sorted(others)]}
    blocks = {title: [f"docs/{page}" for page in pages] for title, pages in sections.items()}
    blocks["Examples"] = sorted(page for page in app.env.found_docs if page.startswith("examples/"))
    blocks["The project"] = ["CONTRIBUTING", "CHANGELOG", "RELEASING", "SECURITY"]
    for title, pages in blocks.items():
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"


def setup(app):
    app.connect("source-read", _add_contents)
