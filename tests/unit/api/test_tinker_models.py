"""Which models of tinker's clients have a place, and which of their samplers stay."""

import pytest

from areal_megatron.api.tinker_models import KEPT_UNNAMED, SILENT_S, Models, Samplers
from areal_megatron.config import ConfigError


def test_a_place_is_free_when_its_session_is_over_or_silent():
    at = [0.0]
    models = Models(2, lambda: at[0])
    one, other = models.begin_session(), models.begin_session()
    assert models.begin(one, "a") == (0, "") and models.begin(other, "b") == (1, "")
    third = models.begin_session()
    with pytest.raises(ConfigError, match="2 models are trained here, and no more"):
        models.begin(third, "c")
    assert models.place("a") == 0 and models.place("b") == 1
    models.finish(other)
    assert not models.hear(other) and models.place("b") == 1  # until somebody needs the place
    assert models.begin(third, "c") == (1, "b")
    with pytest.raises(ConfigError, match="model b is not trained here"):
        models.place("b")
    at[0] = SILENT_S - 1
    assert models.hear(third)
    at[0] = SILENT_S
    assert models.begin(third, "d") == (0, "a")
    with pytest.raises(ConfigError, match="session stranger is none of this server"):
        models.begin("stranger", "e")


def test_of_samplers_without_a_name_the_last_ones_stay_and_those_in_use(tmp_path):
    samplers = Samplers(tmp_path)
    folders = [samplers.new_folder() for _ in range(KEPT_UNNAMED + 3)]
    for folder in folders:
        folder.mkdir()
    samplers.begin("base", "", folders[0])
    samplers.name("tinker://m/sampler_weights/x", folders[1])
    samplers.begin("named", "tinker://m/sampler_weights/x", samplers.of_path("tinker://m/sampler_weights/x"))
    with pytest.raises(ConfigError, match="/y is no path of weights for samplers"):
        samplers.of_path("tinker://m/sampler_weights/y")
    samplers.begin("0", "", folders[2], owner="m")
    with samplers.using("0") as folder:
        for number, own in enumerate(folders[3:], 1):
            samplers.begin(str(number), "", own, owner="m")
        assert folder == folders[2] and folder.exists()
    samplers.begin("more", "", samplers.new_folder(), owner="m")
    assert [each.exists() for each in folders] == [True, True, False, False, *[True] * (KEPT_UNNAMED - 1)]
    with pytest.raises(ConfigError, match="0 is no sampling session of this server; of those without a name"):
        samplers.path_of("0")
    samplers.forget("m")
    assert [each.exists() for each in folders[:2]] == [True, True] and not any(each.exists() for each in folders[2:])
    assert samplers.path_of("named") == "tinker://m/sampler_weights/x" and samplers.path_of("base") == ""
    assert Samplers(tmp_path).new_folder() == tmp_path / "000002"  # those of a server before it stay
