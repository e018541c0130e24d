"""What a config passes through to vLLM: read by vLLM's own parser, and right in a real engine."""

import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_megatron.config import ConfigError, RolloutConfig, ServedModelConfig, passed_through
from areal_megatron.engine import server, vllm_options
from areal_megatron.run.folder import RunFolder
from tests.support.engines import ask, make_run, started_engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
TEMPERATURE = 0.25
ADJUSTED = {"max_num_batched_tokens", "gpu_memory_utilization", "kv_cache_memory_bytes", "block_size"}
"""Options that are ours to set unless a config does."""
ON_CPU = {name for group in passed_through.VLLM_ON_CPU for name in group.names}
OWNED = [name for group in passed_through.VLLM_OWNED for name in group.names]


@pytest.fixture(scope="module")
def parser():
    # two seconds, which only the worker with these tests pays
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


@pytest.fixture
def made(world, tmp_path):
    def make(**vllm):
        return make_run(tmp_path / "run", world, rollout={"vllm": vllm})[1]

    return make


def read(parser, config):
    return vllm_options.parse(parser, ["--model", config.model.path, *server.passed_through(config)])


def test_vllm_reads_every_kind_of_value(parser, made):
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = {
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 4096,
        "watermark": 0.01,
        "speculative_config": NGRAM,
        "kv_cache_dtype_skip_layers": ["0", "1"],
        "allowed_origins": ["https://a.example"],
        "enable_log_requests": True,
        "max_logprobs": None,
    }
    options = read(parser, made(**given))
    assert {name: getattr(options, name) for name in given} == given | {"max_logprobs": 20}
    cache = AsyncEngineArgs.from_cli_args(options).create_engine_config().cache_config
    assert (cache.cache_dtype, cache.enable_prefix_caching) == ("fp8", False)


@pytest.mark.parametrize(
    ("vllm", "problem"),
    [
        ({"kv_cach_dtype": "fp8"}, r"\.kv_cach_dtype: vLLM has no such option, did you mean kv_cache_dtype\?"),
        ({"kv_cache_dtype": "fp9"}, r"\.kv_cache_dtype: vLLM refuses it: invalid choice: 'fp9' \(choose from .*fp8"),
        ({"stream_interval": "two"}, r"\.stream_interval: vLLM refuses it: invalid int value: 'two'"),
        ({"stream_interval": True}, r"\.stream_interval: must not be true or false, is true"),
        ({"stream_interval": [1, 2]}, r"\.stream_interval: must be one value, is \[1, 2\]"),
        ({"enable_prefix_caching": 1}, r"\.enable_prefix_caching: must be true or false, is 1"),
        ({"attention_config": {"backed": "x"}}, r"\.attention_config: vLLM refuses it: .*backed Unexpected keyword"),
        (
            {"speculative_config": {"method": "ngram", "num_tokens": 3}},
            r"\.speculative_config: vLLM has no field num_tokens",
        ),
    ],
)
def test_a_mistake_is_refused_in_a_line_that_names_the_key(parser, made, vllm, problem):
    with pytest.raises(ConfigError, match=r"^rollout\.vllm" + problem) as refused:
        read(parser, made(**vllm))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "smuggled",
    [
        "--host=0.0.0.0",
        "--trust-remote-code",
        "--worker-extension-cls=a.B",
        "-tp=8",
        "-O3",
        "--config=x.yaml",
        "--",
        -1,
    ],
)
def test_an_element_of_a_list_is_never_an_option(parser, made, smuggled):
    lists = [action.dest for action in parser._actions if action.nargs in ("+", "*") and action.dest not in OWNED]
    assert {"ignore_patterns", "allowed_media_domains", "sleep_preserve_parameter_names"} <= {*lists}
    config = made()
    for name in lists:
        config.rollout.vllm = {name: [*["0"] * (name != "collect_detailed_traces"), smuggled]}
        with pytest.raises(ConfigError, match=rf"^rollout\.vllm\.{name}: .* may not begin with -, is .*{smuggled}"):
            read(parser, config)


@pytest.mark.parametrize(
    ("vllm", "problem"),
    [
        (
            {"kernel_config": {"moe_backend": "cutlass"}},
            r"kernel_config: would set kernel_config\.moe_backend, .*weight",
        ),
        (
            {"kernel_config": '{"moe_backend": "cutlass"}'},
            r"kernel_config: would set kernel_config\.moe_backend, .*weigh",
        ),
        (
            {"aux_output_config": {"enable_return_routed_experts": True}},
            r"would set aux_output_config\.enable_return_routed_experts, .*: use rollout\.replay_routes$",
        ),
        ({"help": True}, r"help: vLLM has no such option"),
    ],
)
def test_what_is_not_passed_through_is_set_by_no_nested_config_either(parser, made, vllm, problem):
    with pytest.raises(ConfigError, match=problem):
        read(parser, made(**vllm))


def test_texts_and_nested_configs_are_one_word_each(parser, made):
    given = {
        "chat_template": "--host=0.0.0.0",
        "download_dir": "-tp 8",
        "additional_config": {"--port": "1", "host": "--host"},
        "kernel_config": {"enable_jit_warmup": False},
        "attention_backend": "CPU_ATTN --port 1",
        "allowed_media_domains": "--trust-remote-code",
    }
    config = made()
    plain = read(parser, config)
    config.rollout.vllm = given
    options = read(parser, config)
    changed = {name for name, value in vars(options).items() if value != getattr(plain, name)}
    assert changed == {*given} and options.chat_template == "--host=0.0.0.0"


@pytest.mark.parametrize(
    ("vllm", "problem"),
    [
        ({"watermark": 3.0}, r"rollout\.vllm: vLLM refuses it: .*watermark Input should be less than 1"),
        ({"speculative_config": {"method": "ngram"}}, r"rollout\.vllm: .*num_speculative_tokens must be provided"),
    ],
)
def test_what_only_vllms_config_refuses_is_refused_before_an_engine_is_made(parser, made, vllm, problem):
    options = read(parser, made(**vllm))
    with pytest.raises(ConfigError, match=problem):
        vllm_options.check_engine(options)


def test_the_list_is_that_of_this_vllm(parser, made):
    """Every option of the list is vllm's, and what our command line sets is in the list or may be adjusted."""
    known = {action.dest for action in parser._actions}
    of_served = [name for group in passed_through.served_owned("judge") for name in group.names]
    assert [name for name in (*OWNED, *ON_CPU, *of_served) if name not in known] == []
    config = made()
    for changes in ({}, {"expert_parallel": True, "replay_routes": True, "first_weights": "trainers"}):
        for device in ("cpu", "cuda"):
            config.machine.device = device
            config.rollout = RolloutConfig(**changes)
            part = server.NodePart(0, 2, "10.0.0.1:80")
            shared = server.memory_arguments({server.GPU_SHARE: "0.5", server.KV_CACHE_BYTES: "9"})
            command = [*server.server_command(config, "10.0.0.1", 80, part), *shared]
            flags = {word[2:].replace("-", "_") for word in command if re.match("--[a-z]", word)}
            flags = {name.removeprefix("no_") if name not in known else name for name in flags}
            assert flags - {*OWNED} - ADJUSTED - ON_CPU == set(), device


@pytest.mark.parametrize(
    ("vllm", "problem"),
    [
        ({"kv_cach_dtype": "fp8"}, r"\.kv_cach_dtype: vLLM has no such option, did you mean kv_cache_dtype\?"),
        ({"watermark": 3.0}, ": vLLM refuses it: .*watermark Input should be less than 1"),
        ({"compilation_config": {"mode": 0}}, None),
    ],
)
def test_options_of_a_served_model_are_refused_under_its_key(made, vllm, problem):
    config = made()
    config.served.judge = ServedModelConfig(config.model.path, max_length=100, vllm=vllm)
    if problem:
        with pytest.raises(ConfigError, match=r"^served\.judge\.vllm" + problem):
            vllm_options.check(config)
    else:
        vllm_options.check(config)


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    vllm = {"speculative_config": NGRAM, "enable_prefix_caching": False, "max_num_batched_tokens": 512}
    settings = {"max_new_tokens": 90, "max_running": 64, "vllm": vllm}
    run, _ = make_run(tmp_path_factory.mktemp("runs") / "engine", world, rollout=settings)
    with started_engine(run):
        yield run


def sampled(run: RunFolder, seed):
    """64 answers, and how many tokens were drafted for them and accepted."""

    async def counts(client):
        lines = (await client._call("GET", "/metrics")).decode().splitlines()
        names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
        return [float(line.rpartition(" ")[2]) for name in names for line in lines if line.startswith(name)]

    async def answers(client):
        before = await counts(client)
        asked = {"n": 64, "max_tokens": 80, "temperature": TEMPERATURE, "stop_tokens": [], "request_id": "x"}
        found = await client.generate([5, 9, 7, 3], **asked, seed=seed)
        return found, [after - then for after, then in zip(await counts(client), before, strict=True)]

    return ask(run, answers)


def test_the_options_reach_the_engine(run):
    log = run.log("engine-0").read_text()
    assert "'enable_prefix_caching': False" in log and "'max_num_batched_tokens': 512" in log
    assert "'speculative_config': {'method': 'ngram'" in log


@pytest.mark.parametrize("seed", [None, 7])
def test_speculation_samples_from_the_model(run, world, seed):
    """Log-probabilities are those of Hugging Face, and tokens are drawn as these say: their mean, and how often the
    likeliest is drawn, are within 4 standard deviations of what independent draws would give."""
    answers, (drafted, accepted) = sampled(run, seed)
    model = AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32).eval()
    tokens = torch.tensor([[5, 9, 7, 3, *answer.tokens.tolist()] for answer in answers])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[:, 3:-1] / TEMPERATURE, -1).double()
    own = logprobs.gather(-1, tokens[:, 4:, None])[..., 0]
    found = torch.stack([torch.from_numpy(answer.logprobs) for answer in answers]).double()
    torch.testing.assert_close(found, own, atol=3e-4, rtol=0)
    assert {version for answer in answers for version in answer.versions} == {0}

    p = logprobs.exp()
    mean, square = (p * logprobs).sum(-1), (p * logprobs**2).sum(-1)
    assert abs((own - mean).sum()) < 4 * math.sqrt((square - mean**2).sum())
    likeliest, most = p.max(-1)
    hit = (tokens[:, 4:] == most).double()
    assert abs((hit - likeliest).sum()) < 4 * math.sqrt((likeliest * (1 - likeliest)).sum())
    assert drafted > 1000 and accepted > 50


def test_a_seed_gives_the_same_answers_with_speculation(run):
    first, second = (sampled(run, 11)[0] for _ in range(2))
    assert [a.tokens.tolist() for a in first] == [b.tokens.tolist() for b in second]


def test_an_engine_refuses_options_that_nobody_has_checked(world, tmp_path):
    """As where the launcher has no vLLM: in one line, before it has loaded anything."""
    run, _ = make_run(tmp_path / "run", world, rollout={"vllm": {"watermark": 3.0}})
    said = r"error: rollout\.vllm: vLLM refuses it: .*watermark.*less than 1"
    with pytest.raises(AssertionError, match=said), started_engine(run):
        pass
    assert "Loading" not in run.log("engine-0").read_text()
