"""areal_megatron.programs.trajectories on a run folder as a run leaves it, with a tokenizer whose tokens are bytes."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_megatron.config import Config, DataConfig, ModelConfig
from areal_megatron.config.config_file import save
from areal_megatron.controller.batches import describe
from areal_megatron.data.dumps import Dump, write
from areal_megatron.data.tokenizer import Tokenizer
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.programs import trajectories
from areal_megatron.run.folder import RunFolder
from tests.support.tiny_models import save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {token: i for i, token in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    library = Library(models.BPE(vocabulary, [], unk_token="<eos>"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<eos>").save_pretrained(folder)
    return folder


def answer(tokenizer, uid, text, **changes):
    (tokens,) = tokenizer.responses([text])
    n = len(tokens)
    own = {
        "uid": uid,
        "epoch": 0,
        "prompt_id": uid // 2,
        "admission_version": 0,
        "prompt": np.array(tokens[:2], np.int32),
        "response": np.array(tokens, np.int32),
        "logprobs": np.linspace(-6, 0, n, dtype=np.float32),
        "versions": np.zeros(n, np.int32),
        "loss_mask": np.ones(n, np.uint8),
        "reward": -5.0,
        "truncated": False,
    }
    return Trajectory(**own | changes)


@pytest.fixture
def run(tmp_path, model):
    run, tokenizer = RunFolder(tmp_path / "run"), Tokenizer(model)
    run.create()
    save(Config(name="run", updates=2, model=ModelConfig(str(model)), data=DataConfig("d")), run.config)
    first = [answer(tokenizer, 0, "eins"), answer(tokenizer, 1, "zwei, größer", reward=5.0)]
    versions = np.array([0, 0, 1, 1, 1], np.int32)
    second = [
        answer(tokenizer, 4, "drei", versions=versions, loss_mask=(versions == 1).astype(np.uint8)),
        answer(tokenizer, 5, "v" * 40, admission_version=1, truncated=True),
    ]
    for number, own in enumerate((first, second)):
        write(Dump(number=number, version=number, trajectories=own), run.trajectories)
    return run


def listed(capsys, *arguments):
    assert trajectories.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("filters", "uids"),
    [
        ([], [0, 1, 4, 5]),
        (["--version", "1"], [4, 5]),
        (["--reward", "5"], [1]),
        (["--reward=-6..0"], [0, 4, 5]),
        (["--staleness", "1.."], [4]),
        (["--length", "..5"], [0, 4]),
        (["--length", "41", "--version", "0..1"], [5]),
        (["--prompt", "2", "--truncated", "no"], [4]),
        (["--truncated", "yes"], [5]),
        (["--epoch", "3"], []),
    ],
)
def test_filters(run, capsys, filters, uids):
    header, *lines, total = listed(capsys, run.folder, *filters)
    assert header.split()[:2] == ["uid", "trained"] and [int(line.split()[0]) for line in lines] == uids
    assert total.startswith(f"{len(uids)} trajectories")
    as_json = [json.loads(line) for line in listed(capsys, run.folder, "--json", *filters)]
    assert [line["uid"] for line in as_json] == uids


def test_a_line_says_where_and_how_it_was_trained(run, capsys):
    _, line, _ = listed(capsys, run.folder / "trajectories" / "batch-000001.msgpack", "--staleness", "1")
    assert line.split() == ["4", "1", "0:2", "-5", "1", "5", "0–1", "drei"]
    (found,) = (json.loads(text) for text in listed(capsys, run.folder, "--show", 4, "--json"))
    assert (found["response"], found["versions"], found["loss_mask"], found["staleness"]) == (
        "drei",
        [0, 0, 1, 1, 1],
        [0, 0, 1, 1, 1],
        1,
    )
    assert found["logprobs"] == pytest.approx(np.linspace(-6, 0, 5)) and len(found["tokens"]) == 5


def test_an_episode_of_several_samples_counts_once_and_a_failed_one_not_at_all(run, capsys):
    """As in `reward_mean` of the batch."""
    tokenizer = Tokenizer(trajectories.config_of(run.folder).model.path)
    episode = {"of_samples": 7, "truncated": True}
    own = [answer(tokenizer, 8, "a", sample=k, returns=[(1, -5.0), (1, k / 2)], **episode) for k in range(7)]
    own += [answer(tokenizer, 9, "b", reward=5.0)]
    own += [answer(tokenizer, 10 + k, "c", reward=99.0, failed=True, loss_mask=np.zeros(2, np.uint8)) for k in (0, 1)]
    write(Dump(number=2, version=2, trajectories=own), run.trajectories)
    assert describe(own, 2)["reward_mean"] == 0
    *lines, total = listed(capsys, run.folder, "--version", 2)
    assert total == "10 trajectories, mean reward 0.000" and [line.split()[3] for line in lines[-2:]] == ["unknown"] * 2
    assert [line.split()[0] for line in lines[1:] if " cut " in line] == ["8.6"]
    assert listed(capsys, run.folder, "--prompt", "5")[-1] == "2 trajectories"
    assert listed(capsys, run.folder, "--reward", "99")[-1] == "0 trajectories"
    found = [json.loads(line) for line in listed(capsys, run.folder, "--json", "--version", 2)]
    assert [line["failed"] for line in found] == [False] * 8 + [True] * 2
    assert found[3]["returns"] == [[1, -5.0], [1, 1.5]] and found[7]["returns"] == []
    shown = listed(capsys, run.folder, "--show", 8)
    assert "reward -5 (returns -5, 1.5), 2 + 2 tokens" in "\n".join(shown)
    for name in ("8.0", "8.3"):
        shown = "\n".join(listed(capsys, run.folder, "--show", name))
        assert f"trajectory {name}: " in shown and shown.count("trajectory 8") == 1


def test_the_text_is_whole_whatever_its_tokens_are(model):
    tokenizer = Tokenizer(model)
    for text in ("größer", "≤ 数学\n🙂", "", "a" * 5):
        (tokens,) = tokenizer.responses([text])
        pieces = trajectories.pieces(tokenizer, tokens)
        assert "".join(piece for _, piece in pieces) == text + "<eos>" and sum(count for count, _ in pieces) == len(
            tokens
        )
        assert [piece for _, piece in pieces] == [*text, "<eos>"]
    torn = trajectories.pieces(tokenizer, tokenizer.responses(["🙂"])[0][:2])
    assert torn == [(2, "\ufffd")]


def test_tokens_are_coloured_by_their_version_and_by_how_likely_they_were(run, capsys):
    tokenizer = Tokenizer(trajectories.config_of(run.folder).model.path)
    (found,) = trajectories.chosen(run.folder, trajectories._options([str(run.folder), "--show", "4"]))
    text = trajectories.show(found, tokenizer, "version", None)
    answer = len(text.plain) - len("drei<eos>")
    assert text.plain.endswith("drei<eos>")
    assert "version 0: 0 trained  version 1: 3 trained  not trained: 2\n" in text.plain
    by_letter = {text.plain[span.start : span.end]: str(span.style) for span in text.spans if span.start >= answer}
    assert by_letter == {"d": "cyan strike", "r": "cyan strike", "e": "yellow", "i": "yellow", "<eos>": "yellow"}
    unlikely, *_, sure = trajectories.styles(found, "logprob", None)
    assert unlikely == "rgb(255,60,60) strike" and sure == "rgb(200,200,200)"
    ratios = np.array([-1, 0, 0, 0.25, 3], np.float32)
    assert trajectories.styles(found, "ratio", ratios)[2:] == [
        "rgb(200,200,200)",
        "rgb(140,180,228)",
        "rgb(80,160,255)",
    ]
    shown = listed(capsys, run.folder, "--show", 4, "--colour", "logprob")
    assert "log-probability: mean of trained tokens -1.5000, from -3.0000 to 0.0000" in shown[2]
    assert shown[-1] == "drdrei<eos>"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--show", "99"], "no trajectory 99"),
        (["--show", "4", "--staleness", "0"], "no trajectory 4"),
        (["--model", "nowhere", "--show", "4"], "nowhere"),
    ],
)
def test_wrong_input_is_one_line(run, capsys, arguments, problem):
    assert trajectories.main([str(run.folder), *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and problem in message


def test_a_model_that_lacks_tokens_of_the_run_is_refused_in_a_line(run, model, tmp_path, capsys):
    other = save_model("qwen3", tmp_path / "other", vocab_size=60)
    shutil.copytree(model, other, dirs_exist_ok=True)
    capsys.readouterr()  # what transformers says of saving
    assert trajectories.main([str(run.folder), "--show", "4", "--colour", "ratio", "--model", str(other)]) == 2
    assert capsys.readouterr().err == f"error: --model: {other} has 60 tokens, and the trajectory has token 82\n"


def test_a_folder_without_dumps_and_ratios_without_a_model(run, tmp_path, capsys):
    assert trajectories.main([str(tmp_path)]) == 2 and "is no run folder" in capsys.readouterr().err
    for path in run.trajectories.iterdir():
        path.unlink()
    assert trajectories.main([str(run.folder)]) == 2 and "rollout.dump=true" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        trajectories.main([str(run.folder), "--show", "4", "--colour", "ratio"])
