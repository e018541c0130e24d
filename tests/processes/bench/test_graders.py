"""The benchmark of graders, on texts that are too short to say anything about time."""

import json
import sys

from tools.bench import graders


def test_it_measures_every_grader_on_every_text(tmp_path, monkeypatch, capsys):
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["graders", "--characters=500", "--repetitions=2", f"--json={file}"])
    monkeypatch.setattr(graders, "MOST_MS", 1e6)
    assert graders.main() == 0
    found = json.loads(file.read_text())
    assert found.keys() == {"math", "choice", "code"} and all(
        own.keys() == graders.TEXTS.keys() for own in found.values()
    )
    assert all(figures["ms"]["median"] >= 0 < figures["ratio"] for own in found.values() for figures in own.values())
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3 * len(graders.TEXTS)


def test_what_takes_too_long_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["graders", "--characters=500", "--repetitions=1"])
    monkeypatch.setattr(graders, "GRADERS", {"slow": [lambda text: sum(range(200_000))]})
    monkeypatch.setattr(graders, "TEXTS", {"digits": "1"})
    assert graders.main() == 1 and "or longer: slow: digits" in capsys.readouterr().err
