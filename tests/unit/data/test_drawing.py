"""What a checkpoint says of its rows, their order and what answers come from: one thing changed at a time."""

import json
import shutil

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
from msgspec.structs import asdict

from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from areal_megatron.controller import state
from areal_megatron.controller.schedule import Schedule
from areal_megatron.data.drawing import Drawing, goes_on, saved_in
from areal_megatron.data.prompts import drawing_of, read_prompts
from areal_megatron.data.supervised import SupervisedData, write
from areal_megatron.data.tokenizer import Tokenizer
from tests.support.adapter_oracle import write_adapter

TEMPLATE = "{% for m in messages %}{{ strftime_now('%Y') }} {{ m['content'] }}={% endfor %}"


@pytest.fixture
def folder(tmp_path, world):
    """A model with a chat template, and eight rows of messages, one of them twice."""
    shutil.copytree(world / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    save(tmp_path / "rows.jsonl", rows_of("1+{}"))
    return tmp_path


def rows_of(prompt):
    said = [prompt.format(number % 7) for number in range(8)]
    return [{"prompt": [{"role": "user", "content": text}], "answer": "5", "level": 3} for text in said]


def save(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config_of(folder, **changes):
    return Config(
        **{
            "name": "x",
            "updates": 9,
            "batch_size": 4,
            "model": ModelConfig(path=str(folder / "model")),
            "data": DataConfig(train=str(folder / "rows.jsonl")),
            "rollout": RolloutConfig(group_size=2, max_new_tokens=16),
            **changes,
        }
    )


def drawn(config):
    tokenizer = Tokenizer(config.model.path)
    prompts = read_prompts(config, "train", tokenizer)
    return drawing_of(config, prompts, tokenizer), prompts


def saved_by(config, checkpoint, **changes):
    """What the launcher reads of a controller's checkpoint."""
    schedule = Schedule(batch_size=4, group_size=2, max_staleness=1, updates=9).save()
    drawing = asdict(drawn(config)[0]) | {"cursor": (1, 3)} | changes
    said = state.ControllerState(
        **drawing, again=[], schedule=schedule, trajectories={}, group_size=2, prompts_too_long=0
    )
    state.write(said, checkpoint / "controller.msgpack")
    assert asdict(saved_in(checkpoint)).items() <= asdict(state.read(checkpoint / "controller.msgpack")).items()
    return saved_in(checkpoint)


def edit(change):
    """A change of the rows in place."""

    def changed(folder, config):
        lines = (folder / "rows.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        save(folder / "rows.jsonl", change(rows) or rows)

    return changed


def set_key(key, value):
    def changed(folder, config):
        *sections, name = key.split(".")
        for section in sections:
            config = getattr(config, section)
        setattr(config, name, value)

    return changed


def replace_in(file, old, new):
    def changed(folder, config):
        path = folder / "model" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return changed


def with_json(file, **values):
    def changed(folder, config):
        path = folder / "model" / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=1))

    return changed


def weigh(folder, config):
    save(folder / "others.jsonl", rows_of("2+{}"))
    config.data.train = f"{folder / 'rows.jsonl'}:1,{folder / 'others.jsonl'}:1"


def divide(folder, config):
    config.environments = [EnvironmentConfig(name="a", train=config.data.train)] * 2


def teach(folder, config):
    config.data.train = save(folder / "others.jsonl", rows_of("Spell {}"))


REFUSED = {
    "another file of as many rows": (teach, "data.train: 8 of 8 rows are not those of the checkpoint, the first is "),
    "an edited prompt": (edit(lambda rows: rows[3]["prompt"][0].update(content="9")), r"1 of 8 rows .*rows\.jsonl:4: "),
    "an edited role": (edit(lambda rows: rows[3]["prompt"][0].update(role="system")), r"1 of 8 rows .*:4: "),
    "an edited answer": (edit(lambda rows: rows[7].update(answer="6")), r"data.train: 1 of 8 rows .*rows\.jsonl:8: "),
    "a forced length": (edit(lambda rows: rows[2].update(response_tokens=3)), r"data.train: 1 of 8 rows .*:3: "),
    "another order": (edit(lambda rows: rows[::-1]), "data.train: 6 of 8 rows are not those"),
    "rows that are exchanged": (edit(lambda rows: [*rows[:2], rows[3], rows[2], *rows[4:]]), r"2 of 8 rows .*:3: "),
    "a row more": (
        edit(lambda rows: [*rows, rows[0]]),
        r"9 rows, but the .* with 8; 1 are other ones, the first is .*:9: ",
    ),
    "a row less": (edit(lambda rows: rows[:7]), "data.train: 7 rows, but the checkpoint was made with 8: "),
    "another seed": (set_key("seed", 2), "seed: 2, but the checkpoint was made with 1"),
    "weights": (weigh, "data.train: 16 rows, but the checkpoint was made with 8"),
    "another template": (replace_in("chat_template.jinja", "=", "?"), "model.path: .* another chat template"),
    "an end token more": (with_json("generation_config.json", eos_token_id=[2, 3]), "model.path: .*another tokenizer"),
    "another vocabulary": (replace_in("tokenizer.json", '"+"', '"~"'), "model.path: .*another tokenizer"),
    "longer answers": (
        set_key("rollout.max_new_tokens", 32),
        "rollout.max_new_tokens: 32, but the checkpoint was made with 16: ",
    ),
    "another limit of prompts": (set_key("data.max_prompt_tokens", 99), "data.max_prompt_tokens: 99"),
    "another temperature": (set_key("rollout.temperature", 0.5), "rollout.temperature: 0.5"),
    "another workflow": (set_key("rollout.workflow", "multi_turn"), "rollout.workflow: multi_turn, .* single_turn: "),
    "more turns": (set_key("rollout.turns", 2), "rollout.turns: 2"),
    "another reward": (set_key("reward.function", "a.b:c"), "reward.function: a.b:c, .* math: "),
    "another reward of groups": (set_key("reward.group_function", "a.b:c"), "reward.group_function: a.b:c, .*none: "),
    "another value of right answers": (set_key("reward.right", 1.0), "reward.right: 1.0"),
    "another value of wrong answers": (set_key("reward.wrong", 0.0), "reward.wrong: 0.0"),
    "another rule for cut answers": (set_key("reward.truncated", "masked"), "reward.truncated: masked"),
    "environments": (divide, "environments: 2, but the checkpoint was made with 1"),
}


@pytest.mark.parametrize(("change", "problem"), REFUSED.values(), ids=REFUSED)
def test_a_run_with_anything_else_is_refused_and_a_new_one_begins_its_epochs_anew(folder, change, problem):
    config, checkpoint = config_of(folder), folder / "version-000002"
    saved = saved_by(config, checkpoint)
    change(folder, config)
    now, prompts = drawn(config)
    cure = f"continue with the same, or have a new run begin there, with epochs of its own: name=… resume={checkpoint}"
    with pytest.raises(ConfigError, match=rf"{problem}.*{cure}$"):
        goes_on(saved, now, prompts, checkpoint, own=True)
    said = []
    assert not goes_on(saved, now, prompts, checkpoint, own=False, say=said.append)
    assert len(said) == 1 and said[0].endswith("the epochs begin anew, and answers that it holds are not trained")


def move(folder, config):
    config.data.train = shutil.move(config.data.train, folder / "elsewhere.jsonl")
    config.model.path = shutil.move(config.model.path, folder / "moved")


def convert(folder, config):
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    config.data.train = str(folder / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), config.data.train)


def divide_files(folder, config):
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "a.jsonl").write_text("".join(lines[:3]))
    (folder / "b.jsonl").write_text("".join(lines[3:]))
    config.data.train = f"{folder / 'a.jsonl'},{folder / 'b.jsonl'}"


def spread(folder, config):
    lines = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "rows.jsonl").write_text("\n \n" + "\n\n".join(lines) + "\n\n\n")


CUT = {"direction": "Right", "max_length": 300, "strategy": "LongestFirst", "stride": 0}

ACCEPTED = {
    "nothing": lambda folder, config: None,
    "other places": move,
    "another format": convert,
    "several files": divide_files,
    "blank lines": spread,
    "the order of keys": edit(lambda rows: [dict(reversed(row.items())) for row in rows]),
    "what no answer depends on": edit(lambda rows: [row | {"level": 4, "id": "x"} for row in rows]),
    "a number for a text": edit(lambda rows: [row | {"answer": 5} for row in rows]),
    "a tokenizer that truncates": with_json("tokenizer.json", truncation=CUT),
    "batches": set_key("batch_size", 8),
    "groups": set_key("rollout.group_size", 4),
    "the bound": set_key("rollout.max_staleness", 1),
    "which groups are left out": set_key("rollout.filter_groups", True),
    "the evaluation": set_key("data.eval", "other.jsonl"),
    "reward workers": set_key("reward.workers", 3),
    "parallel sizes": set_key("trainer.tp", 2),
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_a_run_whose_answers_do_not_depend_on_what_has_changed_goes_on(folder, change):
    config = config_of(folder)
    saved = saved_by(config, folder / "version-000002")
    change(folder, config)
    now, prompts = drawn(config)
    assert goes_on(saved, now, prompts, "x", own=True) and saved.cursor == (1, 3)


def test_a_column_that_only_a_reward_function_of_the_user_reads_must_be_the_same(folder):
    said = [row | {"extra": {"index": 1} | ({"split": "a"} if n == 3 else {})} for n, row in enumerate(rows_of("1+{}"))]
    save(folder / "rows.jsonl", said)
    config = config_of(folder, reward=RewardConfig(function="own.module:score"))
    saved = saved_by(config, folder / "version-000002")
    convert(folder, config)  # which gives every row a split, of nothing
    now, prompts = drawn(config)
    assert goes_on(saved, now, prompts, folder, own=True)
    for other in ({"level": 4}, {"extra": {"index": 2}}, {"further": 1}):
        config.data.train = save(folder / "rows.jsonl", [*said[:5], said[5] | other, *said[6:]])
        now, prompts = drawn(config)
        with pytest.raises(ConfigError, match=r"1 of 8 rows are not those of the checkpoint, the first is .*:6: "):
            goes_on(saved, now, prompts, folder, own=True)


def test_edited_code_of_the_user_is_named_and_refuses_nothing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "own").mkdir()
    (folder / "own" / "__init__.py").write_text("from .scores import score\n")
    (folder / "own" / "scores.py").write_text("import json, areal_megatron.config, helping\nraise SystemExit\n")
    (folder / "helping.py").write_text("import own.scores\n")
    (folder / "agent.py").write_text("from own import world as w\n")
    (folder / "own" / "world.py").write_text("SIZE = 3\n")
    (folder / "areal_megatron").mkdir()  # as in a checkout
    (folder / "areal_megatron" / "config.py").write_text("")
    reward = RewardConfig(function="own:score", group_function="agent:terms")
    config = config_of(folder, reward=reward, rollout=RolloutConfig(workflow="agent:run", max_new_tokens=16))
    saved = saved_by(config, folder / "version-000002")

    def told():
        said, (now, prompts) = [], drawn(config)
        assert goes_on(saved, now, prompts, folder, own=True, say=said.append)
        return said

    assert told() == []
    (folder / "areal_megatron" / "config.py").write_text("another = 'release'\n")
    assert told() == []
    (folder / "helping.py").write_text("import own.scores  # mended\n")
    after = "edited since the checkpoint was made; answers of the old code and of the new are trained"
    assert told() == [f"helping.py: {after}"]
    (folder / "own" / "scores.py").write_text("")
    (folder / "agent.py").write_text("async def run(episode ...\n")  # which the launcher refuses
    assert told() == [f"own/scores.py, agent.py: {after}"]


def test_an_environment_is_named_by_its_number(folder):
    own = [EnvironmentConfig(name=name, train=save(folder / f"{name}.jsonl", rows_of(name + "{}"))) for name in "ab"]
    config = config_of(folder, environments=own)
    saved = saved_by(config, folder)
    own[1].reward = "choice"
    now, prompts = drawn(config)
    with pytest.raises(ConfigError, match=r"^environments\.1: reward\.function: choice, but .* made with math: "):
        goes_on(saved, now, prompts, folder, own=True)
    own[1].reward, own[1].train, own[0].train = "", own[0].train, own[1].train
    now, prompts = drawn(config)
    with pytest.raises(ConfigError, match=r"^data\.train: 16 of 16 rows are not those of the checkpoint"):
        goes_on(saved, now, prompts, folder, own=True)


def test_weights_and_order_that_differ_are_refused(folder):
    save(folder / "others.jsonl", rows_of("2+{}"))
    train = f"{folder / 'rows.jsonl'}:1,{folder / 'others.jsonl'}:"
    config = config_of(folder, data=DataConfig(train=f"{train}1"))
    saved = saved_by(config, folder)
    config.data.train = f"{train}0.5"
    now, prompts = drawn(config)
    with pytest.raises(ConfigError, match=r"^data.train: the checkpoint was made with other weights"):
        goes_on(saved, now, prompts, folder, own=True)
    other = msgspec.structs.replace(saved, order=7)
    with pytest.raises(ConfigError, match=r"^rollout.easiest_first: the checkpoint was made with prompts in another"):
        goes_on(other, saved, prompts, folder, own=True)


def test_a_reward_model_is_known_wherever_it_is(folder, world):
    scorer = folder / "scorer"
    shutil.copytree(world / "model", scorer)
    config = config_of(folder)
    config.reward.function, config.served.reward.path = "model", str(scorer)
    saved = saved_by(config, folder)
    config.served.reward.path = shutil.move(scorer, folder / "moved")
    now, prompts = drawn(config)
    assert goes_on(saved, now, prompts, folder, own=True)
    weights = folder / "moved" / "model.safetensors"
    held = bytearray(weights.read_bytes())
    held[len(held) // 2] ^= 1
    weights.write_bytes(held)
    now, prompts = drawn(config)
    with pytest.raises(ConfigError, match=r"served\.reward\.path: the checkpoint was made with another model"):
        goes_on(saved, now, prompts, folder, own=True)


def test_the_adapter_of_a_served_model_stays_the_same(folder, world):
    adapters = [write_adapter(folder / name, world / "model", 2, 4, [name]) for name in ("q_proj", "v_proj")]
    config = config_of(folder)
    config.served.judge.path, config.served.judge.adapter = str(world / "model"), str(adapters[0])
    saved = saved_by(config, folder)
    now, prompts = drawn(config)
    assert goes_on(saved, now, prompts, folder, own=True)
    for other in (str(adapters[1]), ""):
        config.served.judge.adapter = other
        now, prompts = drawn(config)
        with pytest.raises(ConfigError, match=r"served\.judge\.adapter: the checkpoint was made with another model"):
            goes_on(saved, now, prompts, folder, own=True)


SUPERVISED = {
    "sft": {"prompt": "1+{}=", "response": "5"},
    "dpo": {"prompt": "1+{}=", "chosen": "5", "rejected": "6"},
    "reward_model": {"prompt": "1+{}=", "chosen": "5", "rejected": "6"},
}


@pytest.mark.parametrize(("mode", "field"), [(mode, field) for mode, row in SUPERVISED.items() for field in row])
def test_supervised_runs_are_held_to_their_rows_too(folder, mode, field):
    def rows(**changes):
        said = [SUPERVISED[mode] | {"prompt": f"1+{number}="} for number in range(8)]
        said[4] |= changes
        return save(folder / "rows.jsonl", said)

    rows()
    config = config_of(folder, mode=mode)
    tokenizer = Tokenizer(config.model.path)
    data = SupervisedData(config, tokenizer)
    first = [item.where for item in data.next()]
    write(data.drawing, folder / "saved")
    assert isinstance(saved_in(folder / "saved"), Drawing)
    assert [item.where for item in SupervisedData(config, tokenizer, folder / "saved").next()] != first
    rows(**{field: "7"})
    with pytest.raises(ConfigError, match=r"data.train: 1 of 8 rows are not those of the checkpoint, .*rows.jsonl:5: "):
        SupervisedData(config, tokenizer, folder / "saved")
    anew = SupervisedData(config, tokenizer, folder / "saved", own=False)
    assert [item.where for item in anew.next()] == first
