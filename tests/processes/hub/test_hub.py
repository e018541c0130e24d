"""Models and data by name, with the real client of the hub and a small server in place of the hub."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from huggingface_hub import constants

from areal_megatron.config import ConfigError, config_file
from areal_megatron.data.files import fetch, records, source_names
from areal_megatron.hub import hub
from areal_megatron.hub.hub import HubData, HubRepo, model_folder, split_files
from areal_megatron.launch import evaluate, local, submit
from areal_megatron.programs import convert
from areal_megatron.programs.fetch import fetch_all
from areal_megatron.run.folder import RunFolder
from tests.support.hub_server import HubServer

ROOT = Path(__file__).parents[3]
TOKEN = "hf_" + "s" * 34
ROWS = [{"prompt": f"p{number}", "answer": str(number)} for number in range(5)]


def jsonl(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The hub, and a cache of this test alone."""
    with HubServer() as server:
        set_hub(monkeypatch, server.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.chdir(tmp_path)
        yield server


TEMPLATE = "additional_chat_templates/tool_use.jinja"


def set_hub(monkeypatch, address):
    """Does what HF_ENDPOINT does for a process that has not imported huggingface_hub yet."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def model(server, world):
    repository = server.model("Tiny/Model-1.5B", world / "model")
    more = {"original/consolidated.00.pth": b"x" * 100, "original/params.json": b"{}"}
    repository.commits[repository.branches["main"]] |= more
    return repository


def refused(call, *arguments):
    with pytest.raises(ConfigError) as error:
        call(*arguments)
    text = str(error.value)
    assert "\n" not in text and TOKEN not in text and len(text) < 600
    return text


def test_a_model_is_fetched_once_and_then_found_without_the_hub(server, model, monkeypatch, capsys):
    sha = model.branches["main"]
    model.commits[sha][TEMPLATE] = b"{{ tools }}"
    folder = model_folder("Tiny/Model-1.5B", "model.path")
    assert Path(folder).name == sha and sha in capsys.readouterr().err
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in Path(folder).iterdir()}
    assert (Path(folder) / TEMPLATE).read_text() == "{{ tools }}"
    assert not any(name.startswith("original/") for name in server.downloads())
    count = len(server.downloads())
    assert model_folder("Tiny/Model-1.5B", "model.path") == folder and len(server.downloads()) == count
    server.asked.clear()
    assert model_folder(f"Tiny/Model-1.5B@{sha}", "model.path") == folder == model_folder(folder, "model.path")
    assert not server.asked, "a commit that is here is asked of nobody"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder("Tiny/Model-1.5B", "model.path") == folder and not server.asked


def test_a_plan_needs_no_weights(server, model):
    folder = model_folder("Tiny/Model-1.5B", "model.path", weights=False)
    assert (Path(folder) / "config.json").exists() and "model.safetensors" not in server.downloads()
    assert (Path(model_folder("Tiny/Model-1.5B", "model.path")) / "model.safetensors").exists()


def test_a_folder_of_that_name_wins(server, model, tmp_path):
    (tmp_path / "Tiny/Model-1.5B").mkdir(parents=True)
    assert model_folder("Tiny/Model-1.5B", "model.path") == "Tiny/Model-1.5B" and not server.asked
    (tmp_path / "Tiny/data").mkdir()
    assert HubData.parse("Tiny/data") is None and fetch("Tiny/data", "data.train") == "Tiny/data"


def test_a_model_that_is_none(server, model):
    text = refused(model_folder, "Tiny/Modell", "model.path")
    assert text.startswith("model.path: there is no folder Tiny/Modell, and 127.0.0.1 shows no model of this name")
    text = refused(model_folder, "Tiny/Model-1.5B@v9", "model.path")
    assert "has no revision v9 on 127.0.0.1: name one that it has" in text
    text = refused(model_folder, f"Tiny/Model-1.5B@{'0' * 40}", "model.path")
    assert f"has no revision {'0' * 40}" in text
    assert model_folder("nowhere", "model.path") == "nowhere" and model_folder("/no/where", "model.path") == "/no/where"
    del model.commits[model.branches["main"]]["model.safetensors"]
    assert "has no *.safetensors file on the hub" in refused(model_folder, "Tiny/Model-1.5B", "model.path")


def test_a_private_or_gated_model_without_a_token(server, model, monkeypatch):
    model.token = TOKEN
    assert "give a token that may read it (HF_TOKEN" in refused(model_folder, "Tiny/Model-1.5B", "model.path")
    monkeypatch.setenv("HF_TOKEN", TOKEN + "x")
    assert "give a token that may read it" in refused(model_folder, "Tiny/Model-1.5B", "model.path")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert model_folder("Tiny/Model-1.5B", "model.path", weights=False)
    model.gated = True
    assert "is gated: accept its terms on its page" in refused(model_folder, "Tiny/Model-1.5B", "model.path")


def test_no_network_and_no_cache(server, model, monkeypatch):
    set_hub(monkeypatch, "http://127.0.0.1:9")
    text = refused(model_folder, "Tiny/Model-1.5B", "model.path")
    assert "is not whole in the cache" in text and "127.0.0.1 cannot be reached (ConnectError" in text
    assert "hf download Tiny/Model-1.5B" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids to ask" in refused(model_folder, "Tiny/Model-1.5B", "model.path")


def test_a_hub_that_is_ill(server, model):
    server.broken = 500
    text = refused(model_folder, "Tiny/Model-1.5B", "model.path")
    assert "is not whole in the cache" in text and "500" in text
    server.broken = 403
    assert "status 403" in refused(model_folder, "Tiny/Model-1.5B", "model.path")


def test_a_download_that_broke_off_is_not_taken_for_whole(server, model, monkeypatch, tmp_path):
    folder = Path(model_folder("Tiny/Model-1.5B", "model.path"))
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refused(model_folder, "Tiny/Model-1.5B", "model.path")
    assert "model.path: no folder Tiny/Model-1.5B is here; the model Tiny/Model-1.5B@" in text
    assert "is not whole in the cache" in text
    (tmp_path / "Tiny" / "Model-1.5").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = refused(model_folder, "Tiny/Model-1.5B", "model.path")
    assert "no folder Tiny/Model-1.5B is here, did you mean Tiny/Model-1.5? the model" in text
    (tmp_path / "Tiny").rename(tmp_path / "Tinys")
    assert "did you mean Tinys/Model-1.5?" in refused(model_folder, "Tiny/Model-1.5B", "model.path")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert (Path(model_folder("Tiny/Model-1.5B", "model.path")) / "model.safetensors").exists()


def test_a_model_that_cannot_be_trained_is_refused_before_its_weights_are_fetched(server, model, world, tmp_path):
    keys = ["model.path=Tiny/Model-1.5B", f"data.train={world / 'train.jsonl'}", "data.eval=", f"runs_dir={tmp_path}"]
    config = config_file.load(ROOT / "configs/tiny_cpu.yaml", keys)
    files = model.commits[model.branches["main"]]
    described = json.loads(files["config.json"])
    in_8_bits = json.dumps(described | {"quantization_config": {"quant_method": "fp8"}})
    unknown = json.dumps(described | {"architectures": ["MambaForCausalLM"]})
    for changed, says in (
        ({"config.json": in_8_bits}, "has a quantization_config; trainers start from whole weights"),
        ({"config.json": unknown}, "MambaForCausalLM"),
        ({"tokenizer.json": None}, "tokenizer.json is missing; save the tokenizer as a fast one"),
    ):
        model.commit({name: text for name, text in {**files, **changed}.items() if text is not None})
        assert says in refused(fetch_all, config)
        assert config.model.path == "Tiny/Model-1.5B" and "model.safetensors" not in server.downloads()


def test_a_run_goes_on_with_the_revisions_it_began_with(server, model, world, tmp_path):
    """Though main has moved since, and even if the cache has been cleaned."""
    data = server.dataset("tiny/sums", {"train.jsonl": (world / "train.jsonl").read_text()})
    first, rows = model.branches["main"], data.branches["main"]
    keys = ["model.path=Tiny/Model-1.5B", "data.train=tiny/sums", "data.eval=", f"runs_dir={tmp_path}", "name=x"]
    config = config_file.load(ROOT / "configs/tiny_cpu.yaml", keys)
    run = RunFolder(config.run_dir)
    fetch_all(config, run)
    assert config.data.train == f"tiny/sums@{rows}" and first in config.model.path
    run.create()
    config_file.save(config, run.config)

    moved = model.commit({**model.commits[first], "notes.txt": "moved"})
    data.commit({"train.jsonl": jsonl(*ROWS)})
    again = config_file.load(ROOT / "configs/tiny_cpu.yaml", [*keys, "resume=auto"])
    fetch_all(again, run)
    assert again.model.path == config.model.path and again.data.train == config.data.train
    saved = config_file.load(run.config)
    subprocess.run(["rm", "-rf", str(tmp_path / "cache")], check=True)
    fetch_all(saved)
    assert saved.model.path == config.model.path and (Path(saved.model.path) / "model.safetensors").exists()
    new = config_file.load(ROOT / "configs/tiny_cpu.yaml", keys)
    fetch_all(new)
    assert moved in new.model.path and rows not in new.data.train
    named = config_file.load(ROOT / "configs/tiny_cpu.yaml", [*keys, "resume=auto", "model.path=Tiny/Model-1.5B@main"])
    text = refused(fetch_all, named, run)
    assert f"is {moved} now, and the run began with {first}: write Tiny/Model-1.5B@{first} to go on" in text


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("openai/gsm8k", HubData(HubRepo("dataset", "openai/gsm8k"))),
        ("openai/gsm8k:test", HubData(HubRepo("dataset", "openai/gsm8k"), split="test")),
        ("openai/gsm8k:main/test", HubData(HubRepo("dataset", "openai/gsm8k"), "main", "test")),
        ("openai/gsm8k@v1.0:main/test", HubData(HubRepo("dataset", "openai/gsm8k", "v1.0"), "main", "test")),
        ("hf://datasets/o/n@main/a/b.jsonl", HubData(HubRepo("dataset", "o/n", "main"), file="a/b.jsonl")),
        (
            "hf://datasets/o/n@refs/convert/parquet/main/train/0000.parquet",
            HubData(HubRepo("dataset", "o/n", "refs/convert/parquet"), file="main/train/0000.parquet"),
        ),
        ("hf://datasets/o/n@refs/pr/1/a.jsonl", HubData(HubRepo("dataset", "o/n", "refs/pr/1"), file="a.jsonl")),
        ("data/train.jsonl", None),
        ("/data/train", None),
        ("./data/train", None),
        ("train", None),
        ("a/b/c", None),
    ],
)
def test_what_names_a_data_set_of_the_hub(text, parsed):
    assert HubData.parse(text) == parsed
    assert parsed is None or str(parsed) == text


CARD = {
    "configs": [
        {
            "config_name": "main",
            "data_files": [
                {"split": "train", "path": "main/train-*"},
                {"split": "test", "path": ["main/test-*"]},
            ],
        },
        {"config_name": "socratic", "data_files": "socratic/*.parquet"},
    ]
}
GSM8K = [
    "README.md",
    *(f"{subset}/{split}-00000-of-00001.parquet" for subset in ("main", "socratic") for split in ("train", "test")),
]
SHARDS = [f"data/{split}-0000{n}-of-00002-a1b2c3d4.parquet" for split in ("train", "valid", "test") for n in (0, 1)]


@pytest.mark.parametrize(
    ("files", "card", "asked", "found"),
    [
        (GSM8K, CARD, "o/n:main/test", ["main/test-00000-of-00001.parquet"]),
        (GSM8K, CARD, "o/n:socratic/train", [file for file in sorted(GSM8K) if "socratic" in file]),
        (SHARDS, {}, "o/n", SHARDS[:2]),
        (SHARDS, {}, "o/n:validation", SHARDS[2:4]),
        (["data/dapo-math-17k.parquet"], {}, "o/n", ["data/dapo-math-17k.parquet"]),
        (["deepscaler.json", ".gitattributes"], {"configs": "x"}, "o/n:train", ["deepscaler.json"]),
        (["test.jsonl", "test2.jsonl", "x.py"], {}, "o/n:test", ["test.jsonl", "test2.jsonl"]),
        (["lcb/test-0.parquet", "taco/train-0.parquet"], {}, "o/n:lcb/test", ["lcb/test-0.parquet"]),
        (["test.parquet"], {}, "o/n", ["test.parquet"]),
    ],
)
def test_the_files_of_a_split(files, card, asked, found):
    assert split_files(files, card, HubData.parse(asked)) == found


ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
CARDS = {
    "---\nconfigs: &a [{data_files: x}]\nothers: *a\n---\n# Text": {
        "configs": [{"data_files": "x"}],
        "others": [{"data_files": "x"}],
    },
    "---  \r\na: 1\r\n---\r\n": {"a": 1},
    "---\n\na: 1\n--- b\n---\n": {"a": 1},
    "---\n---\n": {},
    "---\na: 1": {},
    "# Text\n---\na: 1\n---\n": {},
    "---\n- a\n---\n": {},
    "---" + "\n" * 300_000: {},
    f"---\na0: &a0 {'x' * 100}\n{ALIASES}configs: [{{config_name: *a9, data_files: x}}]\n---\n": {},
    "---\na: &a [*a]\n---\n": {},
}
"""README.md of a data set → what it begins with."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", CARDS, ids=lambda text: text[:20])
def test_what_a_card_says_is_read_in_time_and_within_memory(tmp_path, text):
    (tmp_path / "README.md").write_bytes(text.encode())
    assert hub._card(tmp_path) == CARDS[text]


def test_patterns_mean_what_they_do_as_regular_expressions():
    """All short patterns and names, of few letters."""
    expressions = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    names = ["".join(letters) for n in range(5) for letters in product("a/b", repeat=n)]
    for pattern in ("".join(pieces) for n in range(4) for pieces in product([*expressions, "a", "/"], repeat=n)):
        parts = re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern)
        expression = re.compile("".join(expressions.get(part, re.escape(part)) for part in parts))
        assert [hub.matches(n, pattern) for n in names] == [bool(expression.fullmatch(n)) for n in names], pattern


def test_a_pattern_of_a_card_takes_no_longer_than_it_is():
    assert hub.matches("a" * 200, "**a" * 100) and not hub.matches("a" * 200 + "b", "*a" * 100)


@pytest.mark.parametrize(
    ("files", "card", "asked", "problem"),
    [
        (GSM8K, CARD, "o/n", "o/n has several subsets; it has main, socratic: write o/n:main/train"),
        (GSM8K, CARD, "o/n:mian/test", "o/n has no subset mian; it has main, socratic: write o/n:main/test"),
        (GSM8K, CARD, "o/n:main/valid", "o/n has no split valid; it has train, test: write o/n:main/train"),
        (["a.csv"], {}, "o/n", "o/n has no .jsonl, .json, .parquet, .arrow file"),
        (["test.jsonl", "val.jsonl"], {}, "o/n", "o/n has several splits; it has test, validation: write o/n:test"),
        (["a.jsonl", "b.jsonl"], {}, "o/n", "holds several sets, a, b: name a file, as hf://datasets/o/n/a.jsonl"),
    ],
)
def test_a_split_that_is_none(files, card, asked, problem):
    assert problem in refused(split_files, files, card, HubData.parse(asked))


def test_data_is_fetched_pinned_and_then_read_without_the_hub(server, monkeypatch):
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test-*\n---\n# Sums\n"
    files = {f"main/test-0000{n}-of-00002.jsonl": jsonl(*rows) for n, rows in enumerate((ROWS[:2], ROWS[2:]))}
    sums = server.dataset("tiny/sums", {"README.md": card, **files, "main/train-00000-of-00001.jsonl": jsonl(ROWS[0])})
    more = server.dataset("tiny/more", {"all.json": json.dumps(ROWS[:3])})
    text = fetch("tiny/sums:main/test:0.7, tiny/more:0.3", "data.train")
    assert text == f"tiny/sums@{sums.branches['main']}:main/test:0.7,tiny/more@{more.branches['main']}:0.3"
    assert sorted(server.downloads()) == ["README.md", "all.json", *files]
    server.asked.clear()
    assert [record.row for record in records(text)] == [*ROWS, *ROWS[:3]]
    assert source_names(text) == ["sums", "more"]
    assert fetch(text, "data.train") == text and not server.asked
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("tiny/sums:main/test:0.7,tiny/more:0.3", "data.train") == text
    next(Path(constants.HF_HUB_CACHE).rglob("test-00001-of-00002.jsonl")).unlink()
    lost = refused(lambda: list(records(text)))
    assert "is not whole in the cache" in lost and "without main/test-00001-of-00002.jsonl" in lost


def test_data_that_is_not_there(server, monkeypatch):
    sums = server.dataset("tiny/sums", {"train.jsonl": jsonl(*ROWS)})
    text = refused(fetch, "tiny/summs", "data.train")
    assert "data.train: there is no file or folder tiny/summs, and 127.0.0.1 shows no dataset of this name" in text
    assert "data.eval: tiny/sums has no split test; it has train" in refused(fetch, "tiny/sums:test", "data.eval")
    assert "has no file b.jsonl" in refused(fetch, "hf://datasets/tiny/sums/b.jsonl", "data.train")
    assert "has no revision v1" in refused(fetch, "tiny/sums@v1:train", "data.train")
    text = refused(lambda: list(records(f"tiny/more@{sums.branches['main']}")))
    assert "is not whole in the cache" in text and "all nodes see" in text


def test_two_launchers_at_once_download_once(server, model, tmp_path):
    code = "import sys; from areal_megatron.hub.hub import model_folder; print(model_folder(sys.argv[1], 'model.path'))"
    environment = os.environ | {
        "HF_ENDPOINT": server.address,
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", code, "Tiny/Model-1.5B"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate(timeout=60)[0] for process in both)
    assert first == second and model.branches["main"] in first
    assert server.downloads().count("model.safetensors") == 1


def test_commands_name_their_argument(server, model, tmp_path, capsys):
    assert convert.main(["from-hf", "Tiny/Model-1.5B", str(tmp_path / "checkpoint")]) == 0
    assert f"wrote {tmp_path / 'checkpoint'}" in capsys.readouterr().out
    assert convert.main(["from-hf", "Tiny/Modell", str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err.startswith("error: HF_DIR: there is no folder Tiny/Modell")
    for model_name, data, start_of in (("Tiny/Modell", "x.jsonl", "MODEL"), ("Tiny/Model-1.5B", "tiny/summs", "DATA")):
        assert evaluate.main([model_name, data, f"--out={tmp_path / 'out'}"]) == 2
        assert f"error: {start_of}: there is no " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_token_is_in_no_message(server, monkeypatch):
    """Not even if an error of the library has it."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def fail(*_, **__):
        raise RuntimeError(f"sent {TOKEN}\nto somebody")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    text = refused(model_folder, f"Tiny/Model-1.5B@{'0' * 40}", "model.path")
    assert "RuntimeError: sent …" in text


def test_progress_is_said_in_lines_where_there_is_no_terminal(server, world, monkeypatch, capsys):
    monkeypatch.setattr(hub, "_PROGRESS_S", 0.01)
    repository = server.model("Tiny/Model-1.5B", world / "model")
    repository.commits[repository.branches["main"]]["model.safetensors"] = b"x" * 3_000_000
    model_folder("Tiny/Model-1.5B", "model.path")
    said = capsys.readouterr().err
    assert "files, 0.00 GB, into" in said or "fetching Tiny/Model-1.5B@" in said
    assert "fetched Tiny/Model-1.5B@" in said


def test_commands_take_names_from_the_environment_of_a_user(server, model, world, tmp_path):
    """HF_ENDPOINT and HF_HOME alone, in processes of their own: a dry run, and a plan."""
    server.dataset(
        "tiny/sums",
        {
            "train.jsonl": (world / "train.jsonl").read_text(),
            "test.jsonl": jsonl({"prompt": "0001 + 0001 = ", "answer": "2"}),
        },
    )
    environment = os.environ | {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "home")}
    keys = ["name=x", "model.path=Tiny/Model-1.5B", "data.train=tiny/sums", "data.eval=tiny/sums:test"]
    commands = [
        ["areal_megatron.launch.local", ROOT / "configs/tiny_cpu.yaml", *keys, f"runs_dir={tmp_path}", "--dry-run"],
        ["areal_megatron.planning.plan", ROOT / "configs/tiny_cpu.yaml", *keys, "--nodes=1", "--gpus=2"],
    ]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", *command], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0 and "trainer-0" in done.stdout, done.stderr
    assert "model.safetensors" not in server.downloads() and not (tmp_path / "x").exists()


def test_a_dry_run_looks_at_weights_that_are_here(server, model, world, tmp_path, capsys):
    data = [f"data.train={world / 'train.jsonl'}", f"data.eval={world / 'heldout.jsonl'}", f"runs_dir={tmp_path}"]
    arguments = [str(ROOT / "configs/tiny_cpu.yaml"), "model.path=Tiny/Model-1.5B", *data, "machine.slots=2"]
    weights = Path(model_folder("Tiny/Model-1.5B", "model.path")) / "model.safetensors"
    count, content = len(server.downloads()), weights.read_bytes()
    assert local.main([*arguments, "--dry-run"]) == 0
    weights.resolve().write_bytes(content[:-4])
    assert local.main([*arguments, "--dry-run"]) == 2
    assert "model.safetensors is truncated" in capsys.readouterr().err
    weights.unlink()
    assert local.main([*arguments, "--dry-run"]) == 0 and len(server.downloads()) == count


def test_what_is_submitted_has_been_fetched_and_a_dry_run_needs_the_description_alone(
    server, model, world, capsys, monkeypatch
):
    """Nodes often have no network; here there is no Slurm either, which is asked last."""
    monkeypatch.setenv("PATH", "/nowhere")
    data = [f"data.train={world / 'train.jsonl'}", f"data.eval={world / 'heldout.jsonl'}"]
    arguments = [str(ROOT / "configs/tiny_cpu.yaml"), "model.path=Tiny/Model-1.5B", *data, "machine.slots=2"]
    arguments += ["machine.device=cpu", "--nodes=1", "--gpus=2"]
    assert submit.main([*arguments, "--dry-run"]) == 0
    written = capsys.readouterr().out
    assert "model.path=Tiny/Model-1.5B" in written and not any("safetensors" in name for name in server.downloads())
    assert submit.main(arguments) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    assert any("model.safetensors" in name for name in server.downloads())
