"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def drop_torn_line(path: Path) -> None:
    """A writer that died in the middle of a line must not spoil the first line of the next writer."""
    if path.exists():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Whoever reads `path` sees the old report or the new one, never a part."""
    write_atomically(path, json.dumps(report, indent=2) + "\n")


def new_folder(kind: str, chosen: Path | None = None) -> Path:
    """`chosen`, or the first runs/KIND-N that does not exist; made."""
    folders = (Path("runs") / f"{kind}-{number}" for number in range(1, 10**6))
    folder = (chosen or next(folder for folder in folders if not folder.exists())).absolute()
    folder.mkdir(parents=True)
    return folder
