"""Mistakes of a first day, one line and exit code 2 for each, before anything starts: what, where and what to do.

Through the commands' own entries, in this process, so that all take seconds.
"""

import importlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_megatron import command
from areal_megatron.checkpoint import folder as checkpoint_folder
from areal_megatron.checkpoint.peft import WEIGHTS
from areal_megatron.config import ConfigError, config_file
from areal_megatron.config.other_names import NONE_HERE, OTHER_NAMES
from areal_megatron.launch import evaluate, local
from areal_megatron.run.folder import RunFolder
from tests.conftest import ROOT
from tests.support.adapter_oracle import write_adapter

TINY = str(ROOT / "configs/tiny_cpu.yaml")
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
MINE = """
def score(prompt, response, answer): return 1.0
def four(prompt, response, answer, other): return 1.0
def column(prompt, response, answer, row): return row["levl"]
def text(prompt, response, answer): return "right"
def workflow(episode): return 1.0
async def two(episode, other): return 1.0
"""


def checkpointed(folder, name, described, *overrides):
    """Makes a run with a checkpoint of version 140, of a model that config.json says these things of."""
    run = RunFolder(folder / name)
    run.create()
    config_file.save(config_file.load(TINY, ["model.path=model", "data.train=d.jsonl", *overrides]), run.config)
    run.begin()
    made = checkpoint_folder.partial(run, 140)
    shutil.copytree(folder / "model", made / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    config = made / "hf/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | described))
    (made / "trainer").mkdir()
    (made / "trainer/0.distcp").write_bytes(b"weights")
    checkpoint_folder.seal(run, 140, 140)


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    """A folder with a model, data and functions, as a user has them."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(world / "model", folder / "model")
    files = {
        "d.jsonl": ROWS,
        "levels.jsonl": [row | {"level": 3} for row in ROWS],
        "e.jsonl": [{"prompt": "9+9=", "answer": "18"}],
        "question.jsonl": [{"question": "6*7?", "answer": "42"}],
        "target.jsonl": [{"question": "6*7?", "target": "42"}],
        "object.jsonl": [{"prompt": "1+1=", "answer": {"a": 2}}],
        "messages.jsonl": [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}],
        "chat.jsonl": [{"messages": [{"role": "user", "content": "1+1="}]}],
        "empty_answer.jsonl": [{"prompt": "1+1=", "answer": ""}],
        "long.jsonl": [{"prompt": "1" * 600, "answer": "1"}],
    }
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt"\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "d.csv").write_text("prompt,answer\n1+1=,2\n")
    (folder / "mine.py").write_text(MINE)
    (folder / "wrong.py").write_text("def score(:\n")
    (folder / "imports.py").write_text("import no_such_package\n")
    (folder / "ppo.yaml").write_text((ROOT / "configs/tiny_cpu.yaml").read_text())
    (folder / "few.yaml").write_text("name: x\nupdates: 3\n")
    (folder / "seven.yaml").write_text("batch_size: 256\nupdates: 3\nrollout:\n  group_size: 7\n")
    (folder / "tab.yaml").write_text("name: x\n\tupdates: 3\n")
    (folder / "twice.yaml").write_text("name: x\nname: y\n")
    (folder / "number.yaml").write_text("name: x\nrollout: 3\n")
    (folder / "no_colon.yaml").write_text("name: x\nbatch_size 4\nupdates: 3\n")
    (folder / "no_first_colon.yaml").write_text("name x\nupdates: 3\n")
    (folder / "open.yaml").write_text("name: x\noptimizer: {lr: 1\nupdates: 3\n")
    (folder / "there/incarnations").mkdir(parents=True)
    begun = config_file.load(TINY, ["model.path=model", "data.train=d.jsonl"])
    for run in ("begun", "ended"):
        shutil.copytree(folder / "model", folder / run / "hf")
        config_file.save(begun, folder / run / "config.yaml")
    (folder / "begun/hf").rename(folder / "begun/empty")
    checkpointed(folder, "trained", {})
    checkpointed(folder, "tuned", {}, "mode=sft")
    checkpointed(folder, "deeper", {"num_hidden_layers": 8})
    for name, lacks in (("no_tokenizer", "tokenizer*"), ("no_weights", "*.safetensors")):
        shutil.copytree(folder / "model", folder / name, ignore=shutil.ignore_patterns(lacks))
    shutil.copytree(folder / "model", folder / "gemma")
    described = json.loads((folder / "gemma/config.json").read_text())
    changed = described | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    (folder / "gemma/config.json").write_text(json.dumps(changed))
    adapter = write_adapter(folder / "diverged", folder / "model", 8, 8)
    weights = load_file(adapter / WEIGHTS)
    next(iter(weights.values()))[0, 0] = torch.nan
    save_file(weights, adapter / WEIGHTS)
    return folder


@pytest.fixture
def areal(place, monkeypatch, capsys):
    """Runs a command as in the user's folder; returns (exit code, what it says on stderr)."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def begun(*_, **__):
        raise AssertionError("something has been started")

    monkeypatch.setattr(local, "supervise", begun)
    monkeypatch.setattr(evaluate, "fill", begun)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", ["areal", *arguments])
        monkeypatch.setenv("AREAL_CALLED", f"areal {name}")
        start = time.process_time()
        try:
            code = importlib.import_module(command.COMMANDS[name].module).main()
        except SystemExit as e:
            code = e.code
        assert time.process_time() - start < 10
        for module in ("mine", "wrong", "imports"):
            sys.modules.pop(module, None)
        return code, capsys.readouterr().err

    return run


def given(*overrides):
    return [TINY, "name=x", "model.path=model", "data.train=d.jsonl", "data.eval=e.jsonl", "--dry-run", *overrides]


KEYS = {
    "rollout.engine=2": "'rollout.engines', which is a whole number, at least 1 (an engine has rollout.tp GPUs)?",
    "lr=1e-5": "unknown key 'lr', did you mean 'optimizer.lr', which is a number",
    "updates=many": "updates: must be a whole number, at least 1, is 'many'",
    "updates=-1": "updates: must be a whole number, at least 1",
    "updates=0": "updates: must be a whole number, at least 1",
    "optimizer.lr=1e5": "optimizer.lr: must be a number, at least 0 and at most 1, is",
    "ppo.critic.lr=1e5": "ppo.critic.lr: must be a number, at least 0 and at most 1, is",
    "batch_size=250": "batch_size:",
    "ppo.minibatches=3": "ppo.minibatches:",
    "rollout.group_size=7": "rollout.group_size",
    "rollout.temperature=0": "rollout.temperature: must be a number, above 0",
    "model.dtype=bf16": "model.dtype: must be one of bfloat16, float16, float32, is 'bf16'",
    "name=a/b": "name: must be a plain folder name",
    "mode=grpo": "did you mean 'rl with ppo.algorithm=grpo'?",
    "algorithm=grpo": "did you mean 'ppo.algorithm', which is one of",
    "track.to=wand": "did you mean 'wandb'",
    "rollout.turns=3": "rollout.turns",
    "rollout.workflow=tool_use": "rollout.turns",
    "rollout.workflow=tooluse rollout.turns=2": "did you mean 'tool_use'?",
    "rollout.workflow=mine:workflow": "rollout.workflow: mine:workflow is no `async def` function",
    "rollout.workflow=mine:two": "rollout.workflow: mine:two cannot be called with (episode): missing",
    "reward.function=mth": "did you mean 'math'?",
    "reward.function=mine:scor": "reward.function: mine has no function scor, did you mean score?",
    "reward.function=nowhere:score": "reward.function: cannot import nowhere: ModuleNotFoundError: No module named "
    "'nowhere', looked for in {here}, PYTHONPATH (",
    "reward.function=imports:score": "reward.function: cannot import imports: ModuleNotFoundError",
    "reward.function=wrong:score": "reward.function: cannot import wrong: SyntaxError: invalid syntax (wrong.py, ",
    "reward.function=mine.py:score": "mine.py:score names a file; name its module: mine:score",
    "reward.function=mine.py": "mine.py names a file; name its module: mine:FUNCTION",
    "reward.function=rewards/mine.py:score": "name its module: mine:score, with rewards in PYTHONPATH",
    "rollout.workflow=mine.py:two": "mine.py:two names a file; name its module: mine:two",
    "reward.group_function=mine.py:score": "mine.py:score names a file; name its module: mine:score",
    "reward.function=mine:column data.train=levels.jsonl": "'levl' is no column of the row, which has prompt, answer, "
    "level (",
    "machine.host=nosuch": "machine.host: 'nosuch' is no address and no interface of",
    "reward.function=mine:four": "must take (prompt, response, answer) and perhaps row, a dict of the row's "
    "columns; it takes (prompt, response, answer, other)",
    "reward.function=mine:text": "to d.jsonl:1: the reward function returned 'right', expected a finite number",
    "trainer.tp=64 machine.slots=65": "trainer.tp",
    "trainer.dp=64 machine.slots=4": "need 65 slots",
    "machine.slots=1": "need",
    "machine.device=cuda": "no GPU for this run on this machine",
    "rollout.max_new_tokens=100000 data.max_prompt_tokens=64": "max_position_embeddings=512: lower it to 448 or less",
    "data.max_prompt_tokens=512": "data.max_prompt_tokens: 512 tokens leave no room for an answer: ",
    "rollout.vllm.enable_lora=true": "rollout.vllm.enable_lora",
    "trainer.megatron.fp8=hybrid": "trainer.megatron.fp8",
    "resume=runs/nope": "runs/nope is no complete checkpoint: there is no such folder; name one such as",
    "resume=true": "resume: 'true' is no checkpoint: resume=auto starts the run, or resumes from its last one",
    "runs_dir=d.jsonl": "runs_dir: d.jsonl is no folder that can be written",
    "runs_dir=d.jsonl/runs": "d.jsonl is no folder that can be written",
    "machine.device=gpu": "must be one of auto, cpu, cuda, is 'gpu', did you mean 'cuda'?",
    "reward.function=htp://127.0.0.1:8000/": "an address begins with http:// or https://",
    "reward.function=choice": "d.jsonl:1: reward.function=choice cannot use the answer: expected the capital letter",
    "reward.function=model": "served.reward.path: reward.function=model needs the folder of the model",
    "reward.function=judge": "served.judge.path: reward.function=judge needs a judge",
    "reward.judge.samples=4": "reward.judge.samples: has no meaning without reward.function=judge",
    "reward.function=judge served.judge.path=model reward.judge.verdict=(": "reward.judge.verdict: '(' is no regular",
    "reward.function=judge served.judge.path=model reward.judge.verdict=a": "must have one group in (…), the number",
    "reward.function=judge served.judge.path=model reward.judge.prompt=x": "must hold {response}",
    "reward.function=juge": "expected math, choice, code, model, judge, an http",
    "served.user.path=nowhere machine.slots=3": "served.user.path: there is no folder nowhere",
    "served.user.path=model served.user.adapter=nowhere machine.slots=3": "served.user.adapter: nowhere is no adapter",
    "ppo.penalty.kl=1 ppo.penalty.kl_model=served.teacher": "served.teacher.path: ppo.penalty.kl_model=serve",
    "ppo.penalty.kl=1 ppo.penalty.kl_model=served.teacher served.teacher.path=model rollout.temperature=2": "at temp",
    "mode=replay ppo.penalty.kl=1 ppo.penalty.kl_model=served.teacher": "mode=replay has no engines to ask: name",
    "ppo.penalty.kl=1 ppo.penalty.kl_form=forward ppo.penalty.kl_model=model": "forward compares what engines find",
    "ppo.penalty.kl=1 ppo.penalty.kl_top_k=8": "ppo.penalty.kl_top_k: has no meaning without kl_form=forward",
    "rollout.endpoint=tls": "rollout.endpoint: no agent asks for it with rollout.workflow=single_turn: leave it out",
    "served.user.adapter=nowhere": "served.user.adapter: has no meaning without served.user.path",
    "served.user.vllm.max_num_seqs=8": "served.user.vllm: has no meaning without served.user.path",
    "served.user.path=model served.user.vllm.max_model_len=8": "cannot be passed through: use served.user.max_length",
    "served.user.path=model served.user.vllm.enforce_eager=true machine.slots=3": "served.user.vllm.enforce_eager: can",
    "served.reward.path=model served.reward.adapter=x reward.function=model": "served.reward.adapter: a reward model's",
    "served.user.path=model served.user.engines=2 served.user.tp=2 machine.slots=5": "served.user.engines=2 × tp=2 is 4"
    ") but there are 5",
    "served.user.path=model served.user.max_length=100000 machine.slots=3": "served.user.max_length: 100000, but model",
    "served.user.path=no_tokenizer machine.slots=3": "no_tokenizer",
    "reward.group_function=mine:nothing": "reward.group_function: mine has no function nothing",
    "rollout.max_running=1": "rollout.max_running: cannot hold a group of 8",
    "rollout.vllm.max_num_sqs=4": "rollout.vllm.max_num_sqs: vLLM has no such option, did you mean max_num_seqs?",
    "trainer.pp=9 machine.slots=64": "trainer.pp: num_hidden_layers=4 of the model cannot be divided over 9 stages",
    "trainer.ep=2 machine.slots=64": "trainer.ep: 2, but the model of model has no experts",
    "data.train=there": "there: no *.jsonl, *.parquet or *.arrow file in this folder",
    "data.max_prompt_tokens=1": "the shortest prompt has 4 tokens, data.max_prompt_tokens is 1: raise it to 4 or more",
    "mode=dpo": "field 'chosen' is missing, found 'prompt', 'answer' (docs/data.md, docs/supervised.md)",
    "trainer=": "trainer is a section: give its keys one by one, such as trainer.tp",
    "resume=latest": "latest is no complete checkpoint: there is no such folder",
    "rollout.n=16": "did you mean 'rollout.group_size', which is",
    "ppo.kl_coef=0.1": "did you mean 'ppo.penalty.kl', which is",
    "wandb.enabled=true": "did you mean 'track.to=wandb'?",
    "trainer.logger=wandb": "did you mean 'track.to=wandb'?",
    "data.max_response_length=9": "did you mean 'rollout.max_new_tokens', which is",
    "data.train_batch_size=9": "'batch_size', which is a whole number, at least 1 (it counts answers: "
    "prompts × rollout.group_size)?",
    "rollout_num_gpus=2": "a whole number, at least 1 (an engine has rollout.tp GPUs)?",
    "num_nodes=2": "areal submit and areal plan take --nodes N --gpus M, areal train takes this machine",
    "actor_rollout_ref.actor.use_kl_loss=true": "did you mean 'ppo.penalty.kl'",
    "actor_rollout_ref.rollout.val_kwargs.n=4": "did you mean 'eval.n'",
    "lora.rank=8 rollout.first_weights=trainers": "rollout.first_weights: engines that are sent adapters read",
    "mode=reward_model lora.rank=8": "lora.rank: a reward model's head is no adapter",
    "lora.rank=8 ppo.critic.lr=1e-4": "ppo.critic.lr: a critic trains all its weights; leave it out",
    "lora.rank=8 lora.targets=q_prj": "lora.targets: q_prj is no linear layer, did you mean q_proj?",
    "lora.rank=8 trainer.megatron.moe_router_bias_update_rate=0.1": "moves the routers of the model",
    "lora.start=DIR": "lora.start: has no meaning without lora.rank",
    "lora.rank=8 lora.start=nowhere": "lora.start: nowhere is no adapter: there is no nowhere/adapter_config.json",
    "lora.rank=8 lora.alpha=8 lora.start=diverged": "has values that are not finite; take an earlier adapter",
    "lora.rank=8 lora.start=DIR lora.merge=true rollout.first_weights=model": "model.path is without the adapter of",
    "lora.rank=600": "lora.rank: must be a whole number, at least 0 and at most 512, is 600",
    "lora.alpha=16": "lora.alpha: has no meaning without lora.rank",
    "model.lora_rank=8": "did you mean 'lora.rank', which is",
    "lora.lora_alpha=8": "did you mean 'lora.alpha', which is",
    "lora.dropout=0.1": "lora.dropout: has no meaning without lora.rank",
    "lora.rank=8 lora.dropout=1": "lora.dropout: must be a number, at least 0 and below 1",
    "lora.rank=8 lora.targets=q_proj,,v_proj": "lora.targets: '' is no name of a layer",
    "lora.rank=8 lora.targets=q_proj,q_proj": "lora.targets: names a layer twice",
    "lora.rank=8 lora.targets=all-linear,q_proj": "lora.targets: all-linear has all others: leave them out",
    "xyzzy=1": "unknown key 'xyzzy', see docs/keys.md",
    "model.path=nowhere": "model.path: there is no folder nowhere",
    "model.path=models/X": "models/X",
    "model.path=no_tokenizer": "tokenizer",
    "model.path=no_weights": "safetensors",
    "model.path=gemma": "names 'Gemma3ForCausalLM', which has no table; known are",
    "model.path=Qwen/Qwen3-0.6B": "hf download Qwen/Qwen3-0.6B",
    "data.train=nowhere.jsonl": "nowhere.jsonl: cannot read the dataset: No such file",
    "data.train=d.csv": "d.csv: a table of text is no data set, convert it to JSONL: python -c",
    "data.train=broken.jsonl": "broken.jsonl:2: not JSON",
    "data.train=empty.jsonl": "empty.jsonl: the dataset is empty; it needs one JSON object a line",
    "data.train=empty_answer.jsonl": "empty_answer.jsonl:1: field 'answer' is empty",
    "data.train=target.jsonl": "field 'answer' is missing, found 'question', 'target'; rename 'target' to 'answer'?",
    "data.train=object.jsonl": "object.jsonl:1: reward.function=math cannot use the answer: it is an object",
    "data.train=messages.jsonl": "chat template",
    "data.train=question.jsonl": "with the sentence 'Reason step by step and put the final answer into",
    "data.train=e.jsonl": "data.eval: 1 of 1 prompts is in data.train too",
    "mode=sft data.train=chat.jsonl": "chat.jsonl:1: no message is the assistant's, so that nothing can be learnt",
    "mode=sft": "field 'response' is missing, found 'prompt', 'answer'; rename 'answer' to 'response'?",
    "mode=replay": "rollout.dump=true",
}


@pytest.mark.parametrize("overrides", KEYS)
def test_a_run_that_could_not_work(areal, overrides):
    code, error = areal("train", *given(*overrides.split()))
    expect_one_line(code, error, KEYS[overrides].replace("{here}", str(Path.cwd())))


RESUMED = {
    "name=trained updates=100": "version-000140 is already at version 140: give updates above 140",
    "name=tuned updates=200": "tuned is a run with mode=sft: choose another name=…",
    "name=deeper updates=200": "model.path: model has num_hidden_layers=4, and the model of",
    "name=x resume=trained/checkpoints/version-000140 updates=139": "is already at version 140: give updates above",
    "name=trained updates=140": "",
}


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize("keys", RESUMED)
def test_a_run_that_could_not_go_on(areal, keys, dry):
    words = [word for word in given("runs_dir=.", "resume=auto", *keys.split()) if word != "--dry-run" or dry]
    if RESUMED[keys]:
        expect_one_line(*areal("train", *words), RESUMED[keys])
    elif dry:
        assert areal("train", *words)[0] == 0
    else:
        with pytest.raises(AssertionError, match="something has been started"):
            areal("train", *words)


COMMANDS = {
    "train": "error: areal train: which config? usage: areal train",
    "train ppo.yml": "ppo.yml: cannot read the config: No such file or directory, did you mean ppo.yaml?",
    "train ppo.yaml --lr 1e-5": "no option --lr; keys of the config are given without dashes: optimizer.lr=1e-5",
    "train ppo.yaml --num-generations=8": "are given without dashes: rollout.group_size=8",
    "train ppo.yaml --use-wandb": "are given without dashes: track.to=wandb",
    "train ppo.yaml --dryrun": "there is no option --dryrun, did you mean --dry-run?",
    "train ppo.yaml lr": "override 'lr': expected key=value",
    "train ppo.yaml updates = 3": "override 'updates': expected key=value without blanks around =",
    "train tab.yaml": "tab.yaml:2: not YAML",
    "train no_colon.yaml": "no_colon.yaml:3: not YAML: could not find expected ':', while scanning a simple key that "
    "begins on line 2",
    "train no_first_colon.yaml": "no_first_colon.yaml:2: not YAML: mapping values are not allowed here: does the line "
    "before lack its ':'?",
    "train open.yaml": "open.yaml:3: not YAML: expected ',' or '}', but got ':', while parsing a flow mapping that "
    "begins on line 2",
    "train name=x": "cannot read the config: No such file or directory: give a YAML file before it, such as "
    "configs/tiny_cpu.yaml name=x",
    "rows d.jsonl": "d.jsonl is data, not a config: give a YAML file such as configs/tiny_cpu.yaml, and "
    "data.train=d.jsonl",
    "evaluate d.jsonl model": "MODEL: d.jsonl is a file, not a model, which goes before DATA: areal evaluate model "
    "d.jsonl",
    "train ppo.yaml name=x model.path=ended": "model.path: ended is the folder of a run, which has its model in "
    "ended/hf",
    "rows ppo.yaml name=x model.path=begun": "begun is the folder of a run, which has no model yet: let it end, or",
    "trajectories begun": "no batch-*.msgpack in it; a run with rollout.dump=true writes them from its first batch on",
    "train twice.yaml": "twice.yaml:2: name: was given on line 1 already",
    "train number.yaml": "number.yaml:2: rollout",
    "train few.yaml": "few.yaml: missing data.train, model.path",
    "train ppo.yaml name=there runs_dir=. model.path=model data.train=d.jsonl": "exists: choose another name",
    "train there name=x": "there: cannot read the config: Is a directory; give a YAML file",
    "train seven.yaml name=x model.path=model data.train=d.jsonl data.eval=": "seven.yaml:1: batch_size: 256 is no "
    "multiple of rollout.group_size=7",
    "train ppo.yaml --restarts -1": "--restarts: expected a whole number, at least 0, is '-1'",
    "plan ppo.yaml --nodes 0 --gpus 4": "--nodes 0 --gpus 4 --gpu-gb 0: expected at least one node and one GPU",
    "plan ppo.yaml --nodes 1": "areal plan: --gpus missing: usage: areal plan",
    "plan ppo.yaml model.path=model --nodes 1 --gpus 8 trainer.tp=3": "trainer.tp: 3 does not divide",
    "submit ppo.yaml name=x model.path=model data.train=d.jsonl --nodes 1 --gpus 4 --time 12h": "--time 12h: expected",
    "submit ppo.yaml name=x model.path=model data.train=d.jsonl --nodes 1 --gpus 1 --time 9:00:00": "need 2 slots",
    "submit ppo.yaml name=x model.path=model data.train=d.jsonl --nodes 2 --gpus 4 --time 9:00:00 "
    "machine.host=127.0.0.1 --dry-run": "is a loopback address and the job has 2 nodes",
    "submit ppo.yaml --nodes 1 --gpus 4 --partition": "areal submit: --partition: expected one argument",
    "simulate ppo.yaml model.path=model --gpu tpu --median 40": "--gpu tpu: not known; the nearest name is h800",
    "simulate ppo.yaml model.path=model --gpu h100": "--median: say how long answers are",
    "convert to_hf nowhere exported": "areal convert: direction: invalid choice: 'to_hf' (choose from",
    "convert to-hf nowhere exported": "nowhere is no folder; give a checkpoint folder such as",
    "engines add there --count 1": "there is no run folder",
    "trajectories nowhere --color version": "there is no option --color, did you mean --colour?",
    "status nowhere --web --port 99999": "--port: must be from 0 to 65535, is 99999",
    "evaluate model": "DATA missing: areal evaluate MODEL DATA",
    "evaluate model d.jsonl --n 0": "--n: must be above 0, is 0",
    "evaluate model d.jsonl --temperature 0 --n 4": "--temperature: 0 with --n 4: must be above 0, or 0 with --n 1",
    "evaluate model d.jsonl --reward mth": "--reward: 'mth' is no reward, expected math, choice, code",
    "status nowhere": "nowhere is no run folder",
    "report nowhere": "), and runs has none",
    "report": "error: areal report: which run? usage: areal report",
    "plan": "error: areal plan: --nodes and --gpus missing: usage: areal plan",
    "engines drain engine-0 begun": "engine-0 is no run folder, which goes first: drain begun …",
    "mirror wandb begun": "areal mirror: tracker: begun is a folder: the run goes first, the tracker second",
    "convert to-hf new begun": "new is not there, and begun is: what is read goes first, the new folder second",
    "convert from-peft new diverged": "new is not there, and diverged is: what is read goes first",
    "evaluate runs/nope": "error: runs/nope is no run folder (nothing is there, seen from ",
    "audit nowhere": "nowhere is no run folder",
    "mirror there mlflow": "there is no run folder",
    "evaluate there d.jsonl --max-new-tokens 8": "there/config.json: No such file or directory; give a model's folder",
    "trajectories nowhere": "nowhere",
    "submit ppo.yaml name=x model.path=model data.train=d.jsonl --nodes 1 --gpus 4 --time 5": "--time 5: give at least",
    "plan ppo.yaml name=x model.path=model data.train=d.jsonl rollout.workflow=tooluse rollout.turns=2 --nodes 1 "
    "--gpus 4": "did you mean 'tool_use'?",
    "plan ppo.yaml name=x model.path=model data.train=d.jsonl reward.function=mth --nodes 1 --gpus 4": "mean 'math'?",
    "plan ppo.yaml name=x model.path=models/X data.train=d.jsonl --nodes 1 --gpus 4": "models/X",
    "simulate ppo.yaml model.path=model --gpu h100 --median 40 --nodes 2": "there is no option --nodes: areal submit "
    "and areal plan take",
    "trajectories x --reward high": "--reward: expected a number, or LOW..HIGH, LOW.. or ..HIGH, is 'high'",
    "evaluate model d.jsonl --k one": "--k: expected whole numbers such as 1,8, is 'one'",
    "evaluate model d.jsonl --n many": "--n: expected a whole number, is 'many'",
    "evaluate model d.jsonl --temperature hot": "--temperature: expected a number, is 'hot'",
    "evaluate model d.jsonl --n 2 --k 4": "--k: pass@4 needs --n 4 or more, it is 2",
    "evaluate model d.jsonl --max-new-tokens 9999": "--max-new-tokens: with",
    "evaluate model long.jsonl": "DATA: the longest prompt's 600 tokens leave no room for an answer: ",
    "evaluate model d.jsonl --adapters diverged": "has values that are not finite; take an earlier adapter",
    "evaluate model object.jsonl": "object.jsonl:1: the reward math cannot use the answer: it is an object",
    "evaluate model d.jsonl --reward mine:text": "returned 'right', expected a finite number",
    "evaluate nowhere d.jsonl": "nowhere",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_that_could_not_work(areal, line):
    code, error = areal(*line.split())
    expect_one_line(code, error, COMMANDS[line])


def test_what_is_no_run_folder_is_told_with_the_nearest_run(tmp_path, monkeypatch):
    def said(name):
        return str(config_file.no_run(Path(name))).partition(f"{name} is no run folder")[2]

    monkeypatch.chdir(tmp_path)
    nothing = f" (nothing is there, seen from {tmp_path})"
    assert said("first") == f"{nothing}, and runs has none"
    for age, name in enumerate(["first", "second", "third", "fourth"]):
        (run := tmp_path / "runs" / name).mkdir(parents=True)
        (run / "incarnations").mkdir()
        (run / "config.yaml").write_text("")
        os.utime(run / "config.yaml", (1000 - age, 1000 - age))
    (tmp_path / "runs/first/checkpoints").mkdir()
    assert said("runs") == "; it has runs/first, runs/second, runs/third"
    assert said("first") == said("frst") == f"{nothing}, did you mean runs/first?"
    assert said("runs/frst") == f"{nothing}, did you mean runs/first?"
    assert said("runs/first/checkpoints") == ", its run is runs/first"
    assert said("runs/second/checkpoints/version-000001") == f"{nothing}, its run is runs/second"
    assert said("other") == f"{nothing}; the newest here: runs/first, runs/second, runs/third"
    (tmp_path / "config.yaml").write_text("")
    assert said(f"{tmp_path}/runs/other") == f"{nothing}; the newest here: runs/first, runs/second, runs/third"


def expect_one_line(code, error, words):
    assert code == 2, error
    *warnings, last = error.splitlines()
    assert last.startswith("error: ") and words in last, error
    assert all(line.startswith("warning: ") for line in warnings), error


def test_names_of_other_projects_stand_for_keys_that_there_are(tmp_path):
    for name, key in OTHER_NAMES.items():
        assert config_file.is_key(key.partition("=")[0]) or key.startswith("rollout.vllm."), (name, key)
        assert not config_file.is_key(name) and name not in NONE_HERE, name
    assert all("\n" not in sentence for sentence in NONE_HERE.values())
    (tmp_path / "c.yaml").write_text("actor_rollout_ref:\n  rollout:\n    n: 4\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:1: unknown key 'actor_rollout_ref', "):
        config_file.load(tmp_path / "c.yaml")


def test_messages_are_a_format_of_supervised_rows(areal, place):
    turns = [{"role": role, "content": "1"} for role in ("user", "assistant", "user", "assistant")]
    (place / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{% endfor %}"
    shutil.copytree(place / "model", place / "chat")
    (place / "chat/chat_template.jinja").write_text(re.sub("{{ bos_token }}", "", template))
    code, error = areal("rows", TINY, "mode=sft", "name=x", "model.path=chat", "data.train=chat.jsonl", "data.eval=")
    assert code == 0, error
