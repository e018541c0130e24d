"""Writes the page of a run into one file that needs neither a server nor a network: `areal report RUN [--out FILE]`.

It is the page that `areal status --web` serves, as the run is now, without its trajectories; of a folder of runs, all
side by side. timeline.json in the run folder has every process on one clock, for ui.perfetto.dev or
chrome://tracing. Works for finished, running and failed runs. Exit code 2: no such run.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from pathlib import Path
from typing import Any

from areal_megatron.config import config_file
from areal_megatron.observe.spans import Span, merge, read_spans, speeds_with_and_without
from areal_megatron.page.runs import WatchedRuns, holds_runs
from areal_megatron.page.watched import Watched, as_json
from areal_megatron.process.files import write_atomically
from areal_megatron.process.shown import guard
from areal_megatron.run.arguments import Parser
from areal_megatron.run.folder import RunFolder
from areal_megatron.run.process_names import is_trainer


def write_report(run: RunFolder, out: Path) -> None:
    """Writes the page and the run's timeline.json. Raises ConfigError if the folder is no run, and OSError."""
    config = config_file.load_run(run.folder)
    watched = Watched(run)
    watched.refresh()
    merge(run)
    overview = watched.overview()
    if overview["problem"]:
        print(f"warning: {overview['problem']}", file=sys.stderr)
    if overview["state"] == "silent":  # nobody waits for a sign of life
        overview["state"] = ""
    if overview["done"] < overview["updates"]:
        phase = overview["phase"] or watched.status.phase or "unknown"
        incomplete = f"This run is incomplete: {overview['done']} of {overview['updates']} updates, phase “{phase}”. "
        overview["problem"] = f"{incomplete}Its processes' logs are in logs/ of the run folder. {overview['problem']}"
    drawn = watched.drawn(config)
    if rows := _publish_rows(read_spans(run)):
        head = ("trainer, tokens/s of a rank", "steps that meet a publish", "other steps", "share kept")
        drawn["tables"].insert(1, {"title": "What publishing costs", "head": head, "rows": rows})
    write_atomically(out, inlined({"overview": overview, "curves": drawn, "answers": watched.answers()}))


def write_comparison(folder: Path, out: Path) -> None:
    """Writes the page of the runs in a folder, side by side. Raises OSError."""
    watched = WatchedRuns(folder)
    watched.refresh()
    overview = watched.overview()
    for line in overview["runs"]:
        line["state"] = "" if line["state"] == "silent" else line["state"]  # nobody waits for a sign of life
    curves = {name: one.drawn(one.config) for name, one in watched.runs.items() if one.config}
    write_atomically(out, inlined({"overview": overview, "curves": curves}))


def inlined(saved: dict[str, Any]) -> str:
    """Returns the page as one file that shows `saved`; a browser runs no other script in it, and loads nothing."""
    page, style, script = (
        Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    policy = f"default-src 'none'; img-src data:; script-src {_digest(script)}; style-src {_digest(style)}"
    data = as_json(saved).decode().replace("<", "\\u003c")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
        f'<script type="application/json" id="saved">{data}</script>'
    )
    page = page.replace('<link rel="stylesheet" href="page.css">\n<script src="page.js" defer></script>', head)
    return page.replace("</body>", f"<script>{script}</script>\n</body>")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _publish_rows(spans: list[Span]) -> list[tuple[str, ...]]:
    """Returns a row for each kind of step: a rank's tokens/s while weights are sent, in other steps, and the ratio."""
    trainers = [span for span in spans if is_trainer(span.process)]
    publishes = [span for span in trainers if span.name == "publish"]
    rows = []
    for name in ("train", "proximal"):
        if speeds := speeds_with_and_without([s for s in trainers if s.name == name and "tokens" in s.args], publishes):
            rows.append((name, f"{speeds[0]:,.0f}", f"{speeds[1]:,.0f}", f"{speeds[0] / speeds[1]:.0%}"))
    return rows


def main() -> int:
    guard()
    parser = Parser("areal_megatron.page.report", __doc__)
    parser.add_argument("run", type=Path, help="run folder, e.g. runs/demo, or a folder of runs")
    parser.add_argument("--out", type=Path, help="the file to write; default: report.html in that folder")
    options = parser.parse_args()
    out = options.out or options.run / "report.html"
    try:
        run = RunFolder(options.run)
        write_comparison(options.run, out) if holds_runs(run) else write_report(run, out)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
