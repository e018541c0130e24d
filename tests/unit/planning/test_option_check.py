"""What a launcher does about options that are passed through; the libraries' own checks have tests of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, MachineConfig, ModelConfig, RolloutConfig
from areal_megatron.planning.option_check import check_for_device, check_options, uncounted, without_kernels
from areal_megatron.run import versions

MODELS = Path(__file__).parents[3] / "configs" / "models"


def config(device="cpu", mode="rl", megatron=None, **vllm):
    made = Config(
        name="x",
        updates=1,
        mode=mode,
        model=ModelConfig(str(MODELS / "Qwen2.5-32B")),
        data=DataConfig("t"),
        machine=MachineConfig(device=device),
        rollout=RolloutConfig(vllm=vllm),
    )
    made.trainer.megatron = megatron or {}
    return made


def test_without_options_no_process_is_started(monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    assert check_options(config(), {}) == []
    assert check_options(config(mode="sft", stream_interval=2), {}) == []


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(versions, "_installed", lambda name: None)
    asked = config(megatron={"deterministic_mode": True}, stream_interval=2)
    assert check_options(asked, {}) == [
        "trainer.megatron: cannot be checked before the processes start: megatron-core is not installed here",
        "rollout.vllm: cannot be checked before the processes start: vLLM is not installed here",
    ]


def test_the_python_of_the_pool_is_asked():
    """It gets the resolved config, and its last line is the refusal."""
    code = "import sys; print('error: sent', 'stream_interval: 2' in sys.stdin.read(), file=sys.stderr); exit(2)"
    with pytest.raises(ConfigError, match="sent True"):
        check_options(config(stream_interval=2), {"rollout": [sys.executable, "-c", code]})
    (line,) = check_options(config(stream_interval=2), {"rollout": [sys.executable, "-c", "exit(1)"]})
    assert line.startswith("rollout.vllm: cannot be checked before") and line.endswith(": exit code 1")


def test_a_kernel_that_the_trainers_packages_lack_is_refused_before_they_start():
    """By the process that is asked; tests/unit/trainer/test_megatron_fields.py has what it refuses."""
    asked = config("cuda")
    asked.trainer.attention = "fa3"
    message = "trainer.attention: fa3 cannot be used: flash_attn_interface is missing; trainer.attention=auto can"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_options(asked, {"trainer": [sys.executable]})


@pytest.mark.parametrize(("installed", "lines"), [(None, 1), ("0.5.9", 1), ("0.6.0", 0)])
def test_trainers_without_the_kernels_of_gated_delta_nets_are_told_to_be_slow(monkeypatch, installed, lines):
    monkeypatch.setattr(versions, "_installed", {"fla-core": installed}.get)
    monkeypatch.setattr(versions, "_can_import", lambda module: installed is not None)
    monkeypatch.setattr(versions, "is_for_cpu", lambda: False)
    asked = config("cuda")
    assert without_kernels(asked) == []
    asked.model.path = str(MODELS / "Qwen3-Next-80B-A3B-Instruct")
    told = without_kernels(asked)
    assert len(told) == lines and all(line.endswith(": pip install fla-core==0.6.0") for line in told)
    monkeypatch.setattr(versions, "is_for_cpu", lambda: True)
    assert without_kernels(asked) == []


def test_packages_for_cpus_say_nothing_of_kernels(monkeypatch):
    """Plans are made on laptops, too."""
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(versions, "is_for_cpu", lambda: True)
    asked = config("cuda")
    asked.trainer.attention, asked.trainer.expert_dispatch = "fa3", "flex"
    assert check_options(asked, {}) == [
        f"trainer.{key}: cannot be checked before the processes start: packages here are for CPUs"
        for key in ("attention", "expert_dispatch")
    ]
    asked.trainer.attention, asked.trainer.expert_dispatch = "fa2", "alltoall"  # torch brings both
    assert check_options(asked, {}) == []


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        (config(enforce_eager=False), r"^rollout\.vllm\.enforce_eager: .* on CPU"),
        (config("cuda", speculative_config={"model": "m"}), r"speculative_config: .*set rollout\.first_weights=model"),
        (
            config(speculative_config={"model": "no/where"}),
            r"^rollout\.vllm\.speculative_config: there is no folder no/",
        ),
        (
            config(megatron={"recompute_modules": ["moe"]}),
            r"recompute_modules: moe: the model has no experts: mlp names",
        ),
    ],
)
def test_what_device_and_model_do_not_allow(asked, problem):
    with pytest.raises(ConfigError, match=problem):
        check_for_device(asked)


def test_pools_that_share_gpus_divide_the_memory_themselves():
    asked = config("cuda", gpu_memory_utilization=0.5)
    check_for_device(asked)
    asked.machine.shared = True
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: .* with machine\.shared the launcher divides"):
        check_for_device(asked)


def test_what_the_plan_does_not_count_is_said():
    offloading = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
    asked = config(megatron=offloading, kv_cache_dtype="nvfp4", speculative_config={"method": "eagle3", "model": "m"})
    named = [line.partition(": ")[0] for line in uncounted(asked)]
    assert named == [
        "trainer.megatron.cpu_offloading",
        "rollout.vllm.kv_cache_dtype=nvfp4",
        "rollout.vllm.speculative_config with method=eagle3",
    ]
    assert uncounted(config(kv_cache_dtype="fp8", speculative_config={"method": "ngram"})) == []
