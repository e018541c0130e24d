"""Bands of learning curves."""

import json

import pytest

from tests.support import bands


def write(folder, accuracies):
    folder.mkdir()
    lines = [
        json.dumps({"time": 1.0, "kind": "update", "version": version, "accuracy": accuracy})
        for version, accuracy in enumerate(accuracies, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_curve_inside_its_band_passes_and_another_leaves_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(bands, "FILE", tmp_path / "bands.json")
    seeds = [write(tmp_path / f"seed{seed}", [(n + seed) / 40 for n in range(32)]) for seed in range(3)]
    monkeypatch.setattr("sys.argv", ["bands", "rising", *map(str, seeds)])
    bands.main()
    first, *_, last = json.loads((tmp_path / "bands.json").read_text())["rising"]
    # means of the first four and last four updates of the three seeds, and four deviations of 1/40
    assert first == pytest.approx([0, 0.1625], abs=1e-3) and last == pytest.approx([0.6625, 0.8625], abs=1e-3)
    for seed in seeds:
        bands.check("rising", seed)
    fallen = write(tmp_path / "fallen", [(n if n < 24 else 2) / 40 for n in range(32)])
    with pytest.raises(AssertionError, match=r"rising leaves its band in part 7 of 8: .*band\.svg"):
        bands.check("rising", fallen)
    assert (fallen / "band.svg").read_text().startswith("<?xml")
