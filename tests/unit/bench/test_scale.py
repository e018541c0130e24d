"""The command that tells how the design scales, at its smallest."""

import json
import sys
from xml.etree import ElementTree

import pytest

from tools.bench import scale


def test_the_best_sizes_are_listed_with_what_they_ask_for_and_drawn(tmp_path, monkeypatch, capsys):
    written, drawn = tmp_path / "scale.json", tmp_path / "scale.svg"
    asked = ["--gpus", "8", "--models", "1.5B,671B", "--json", str(written), "--svg", str(drawn)]
    monkeypatch.setattr(sys, "argv", ["scale", *asked])
    monkeypatch.setattr(scale, "FEWEST_ANSWERS", 32)  # for a test that is short
    scale.main()
    *_, row, refused = capsys.readouterr().out.splitlines()
    assert refused.startswith("671B on 8 GPUs: --best: ") and "no engine has room for an answer" in refused
    (best,) = json.loads(written.read_text())
    assert row.startswith(f"| 1.5B | 8 | {best['trainer']} | {best['engines']} × {best['engine_tp']} |")
    ranks = int(best["trainer"].partition(":")[0])
    assert ranks + best["engines"] * best["engine_tp"] == 8 and best["batch"] == 128
    assert best["answers_per_s"] * best["update_s"] == pytest.approx(128)
    assert 0 < best["in_flight"] <= (scale.ETA + 1) * 128
    ElementTree.parse(drawn)
    assert "<!-- 1.5B -->" in drawn.read_text() and "671B" not in drawn.read_text()
