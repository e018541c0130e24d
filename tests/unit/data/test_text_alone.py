"""Rows with images, videos or sound, in data of every mode: a model that is trained here gets texts alone."""

import json

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, RewardConfig
from areal_megatron.data.check import check_data

PICTURE = {"type": "image_url", "image_url": {"url": "https://a.example/1.png"}}
ASKED = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "How many?"}]}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "3"}]
ROWS = {
    "rl": {"prompt": "1+1=", "answer": "2"},
    "sft": {"prompt": "1+1=", "response": "2"},
    "dpo": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
}
OTHERS = {
    "rl": {"prompt": "2+1=", "answer": "3"},
    "sft": {"prompt": "2+1=", "response": "3"},
    "dpo": {"prompt": "2+1=", "chosen": "3", "rejected": "4"},
}
PARTS = {
    "rl": ({"prompt": ASKED, "answer": "3"}, "message 1 of 'prompt'"),
    "sft": ({"messages": ANSWERED}, "message 1 of 'messages'"),
    "dpo": ({"prompt": ASKED, "chosen": "3", "rejected": "4"}, "message 1 of 'prompt'"),
}


@pytest.fixture
def problem(world, tmp_path):
    """Checks the data of a run; returns what is wrong with it, "" if nothing is."""

    def found(mode, train, held_out=(), **data):
        for name, rows in (("train", train), ("eval", held_out)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "eval") if name == "train" or held_out}
        data, model = DataConfig(**files, **data), ModelConfig(path=str(world / "model"))
        config = Config(
            name="x", mode=mode, updates=1, batch_size=2, model=model, data=data, reward=RewardConfig(function="math")
        )
        try:
            check_data(config)
        except ConfigError as error:
            return str(error)
        return ""

    return found


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize(
    ("field", "value"), [("image", "a.png"), ("images", [{"bytes": None, "path": "a.png"}]), ("video", {"path": "b"})]
)
def test_a_field_that_is_no_text_is_named(problem, tmp_path, mode, field, value):
    row, other = ROWS[mode], OTHERS[mode]
    for train, held_out, file in (
        ([other, row | {field: value}], (), "train"),
        ([row], [other, {field: value}], "eval"),
    ):
        said = problem(mode, train, held_out)
        assert said.startswith(
            f"{tmp_path}/{file}.jsonl:2: field {field!r} is no text, and models get texts alone here"
        )
        assert "\n" not in said


@pytest.mark.parametrize("mode", PARTS)
@pytest.mark.parametrize("part", [PICTURE, {"type": "image", "image": "a.png"}, {"image": "a.png"}, {"type": "video"}])
def test_a_part_of_a_message_that_is_no_text_is_named(problem, tmp_path, mode, part):
    row, place = PARTS[mode]
    row = json.loads(json.dumps(row).replace(json.dumps(PICTURE), json.dumps(part)))
    kind = part.get("type", "image")
    for train, held_out, file in (([OTHERS[mode], row], (), "train"), ([OTHERS[mode]], [row, row], "eval")):
        said = problem(mode, train, held_out)
        line = 2 if file == "train" else 1
        assert said.startswith(
            f"{tmp_path}/{file}.jsonl:{line}: {place} has a part {kind!r}, and models get texts alone"
        )
        assert "\n" not in said


@pytest.mark.parametrize("field", ["Image", "image_0", "decoded_image", "multi_modal_data", "pixel_values"])
def test_a_field_of_another_spelling_is_named(problem, field):
    said = problem("rl", [OTHERS["rl"], ROWS["rl"] | {field: "a.png"}])
    assert f":2: field {field!r} is no text" in said


def test_a_message_with_a_picture_beside_its_text_is_named(problem, tmp_path):
    asked = [{"role": "user", "content": "How many?", "images": ["a.png"]}]
    said = problem("rl", [OTHERS["rl"], {"prompt": asked, "answer": "3"}])
    assert said.startswith(f"{tmp_path}/train.jsonl:2: message 1 of 'prompt' has 'images', and models get texts alone")
    said = problem("rl", [OTHERS["rl"], {"prompt": [asked[0] | {"images": []}], "answer": "3"}])
    assert "images" not in said  # but that this model has no chat template


@pytest.mark.parametrize("mode", ROWS)
@pytest.mark.parametrize("value", [None, "", [], {"bytes": None, "path": None}, [{"bytes": None, "path": None}]])
def test_an_empty_field_is_none(problem, mode, value):
    assert problem(mode, [ROWS[mode] | {"image": value}, OTHERS[mode]]) == ""


def test_rows_with_images_can_be_left_out(problem):
    assert problem("rl", [OTHERS["rl"], ROWS["rl"] | {"image": "a.png"}], unusable_rows="skip") == ""
    assert problem("sft", [OTHERS["sft"], ROWS["sft"] | {"image": "a.png"}], unusable_rows="skip") == ""
