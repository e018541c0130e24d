"""The figures of the comparison of trainer and engine; tests/engine and tests/parallel test what it measures."""

import numpy as np
import pytest

from tools.bench import precision


def test_differences_are_absolute_and_their_99th_percentile_is_one_of_them():
    found = precision.difference(np.zeros(200, np.float32), np.arange(-100, 100, dtype=np.float32) / 1000)
    assert found == pytest.approx({"mean": 0.05, "p99": 0.099, "max": 0.1})


def test_a_row_names_each_pair():
    found = {"mean": 0.001234, "p99": 0.0204, "max": 0.4}
    row = {"name": "float16, logits in float32", "tokens": 12345}
    table = precision.table([row | {f"{a} − {b}": found for a, b in precision.PAIRS}])
    last = table.split("\n")[-1]
    assert last == "| float16, logits in float32 | 12,345 |" + " 0.0012, **0.02**, 0.4 |" * 3


def test_wrong_input_ends_with_one_line(tmp_path, capsys):
    assert precision.main([str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "nowhere" in error
    with pytest.raises(SystemExit) as ended:
        precision.main([str(tmp_path), "--dtypes", "float8"])
    assert ended.value.code == 2
