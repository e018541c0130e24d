"""What pipeline stages send each other, and what they wait for."""

import pytest

from areal_megatron.run.folder import RunFolder
from tests.support.tiny_models import save_model

CASES = {
    2: {"stages": ["qwen2", {"pp": 2}], "virtual": ["qwen3", {"pp": 2, "vpp": 2}]},
    4: {"sharded": ["qwen3_moe", {"tp": 2, "pp": 2}], "sharded-virtual": ["qwen3", {"tp": 2, "pp": 2, "vpp": 2}]},
}
"""World size → run folder → model, layout."""


@pytest.mark.parametrize("ranks", CASES)
def test_stages_know_the_shapes_of_their_messages(tmp_path, on_ranks, ranks):
    for run, (model, _) in CASES[ranks].items():
        RunFolder(tmp_path / run).create()
        save_model(model, tmp_path / model)
    on_ranks("pipeline_checks:check_messages", ranks, cases=CASES[ranks])


def test_an_engine_that_hangs_delays_no_pipeline_step(tmp_path, on_ranks):
    RunFolder(tmp_path / "run").create()
    save_model("qwen3", tmp_path / "qwen3")
    on_ranks("pipeline_checks:check_hanging_engine", 2, layout={"pp": 2})
    print((tmp_path / "rank-0.out").read_text())
