"""Predicted times against sums by hand, an engine against a loop over its steps, lengths against what was put in."""

import json
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from areal_megatron.config import Config, ConfigError, DataConfig, ModelConfig, PPOConfig, RolloutConfig, TrainerConfig
from areal_megatron.data import dumps
from areal_megatron.data.trajectory import Trajectory
from areal_megatron.planning.forecast.accelerators import ACCELERATORS, Accelerator, Efficiencies, accelerator
from areal_megatron.planning.forecast.engine_time import EngineTime
from areal_megatron.planning.forecast.lengths import LognormalLengths, RecordedLengths
from areal_megatron.planning.forecast.simulated_engine import RunningAnswer, SimulatedEngine
from areal_megatron.planning.forecast.trainer_time import ADAM, PackedBatch, TrainerTime
from areal_megatron.planning.forecast.weights_time import WeightsTime

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCABULARY = 4, 64, 4, 2, 160, 512
HEAD_DIM = HIDDEN // HEADS
DENSE = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN,
    "vocab_size": VOCABULARY,
}
EXPERTS, CHOSEN, EXPERT_FFN = 8, 2, 48
SPARSE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": EXPERT_FFN,
    "head_dim": HEAD_DIM,
}
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * HEAD_DIM
"""Weights of a layer's projections: q and output, k and v."""
BODY, HEAD = LAYERS * (ATTENTION + 3 * HIDDEN * FFN), HIDDEN * VOCABULARY
"""Weights that every token is multiplied with, without and with which the next one is chosen."""
PERFECT = Efficiencies(
    products=1, attention=1, memory=1, links=1, host=1, step_s=0, request_s=0, message_s=0, pause_s=0
)


def gpu(efficiencies=PERFECT, **rates):
    given = {"flops": 1e12, "memory": 1e9, "nvlink": 1e10, "network": 1e9, "host": 1e9, "gib": 80} | rates
    return Accelerator("made up", **given, source="", efficiencies=efficiencies)


def config(trainer=None, rollout=None, ppo=None, **rest):
    made = Config(
        name="run",
        updates=10,
        model=ModelConfig(path="none"),
        data=DataConfig(max_prompt_tokens=16),
        trainer=TrainerConfig(**{"recompute": "none"} | (trainer or {})),
        rollout=RolloutConfig(**{"group_size": 2, "max_new_tokens": 64} | (rollout or {})),
        ppo=PPOConfig(**{"minibatches": 1} | (ppo or {})),
        **rest,
    )
    made.machine.device = "cuda"
    return made


def trajectory(uid, prompt_id, prompt, response):
    zeros = np.zeros(response, np.int32)
    return Trajectory(
        uid=uid,
        epoch=0,
        prompt_id=prompt_id,
        admission_version=0,
        prompt=np.zeros(prompt, np.int32),
        response=zeros,
        logprobs=zeros.astype(np.float32),
        versions=zeros,
        loss_mask=zeros.astype(np.uint8),
        reward=0.0,
        truncated=False,
    )


class TestAccelerators:
    @pytest.mark.parametrize("name", ACCELERATORS)
    def test_the_table_is_that_of_its_names_and_says_where_from(self, name):
        found = accelerator(name.upper())
        assert found.name == name and found.source
        # a GPU multiplies hundreds of times for each byte that it reads, and reads faster than it sends
        assert 100 < found.flops / found.memory < 1000
        assert found.memory > found.nvlink > found.network and found.nvlink > found.host

    def test_an_unknown_one_is_refused_with_the_nearest_and_a_way_to_add_it(self):
        with pytest.raises(
            ConfigError, match=r"--gpu h100-pcie: not known; the nearest name is h100, .*my_gpu.json"
        ) as e:
            accelerator("h100-pcie")
        assert "\n" not in str(e.value)

    def test_a_file_describes_another_one(self, tmp_path):
        rates = {"flops": 1e12, "memory": 2e11, "nvlink": 1e10, "network": 1e9, "host": 3e9, "gib": 12}
        file = tmp_path / "mine.json"
        file.write_text(json.dumps(rates | {"efficiencies": {"memory": 0.5}}))
        found = accelerator(str(file))
        assert found.memory == 2e11 and found.efficiencies == replace(Efficiencies(), memory=0.5)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("{", "is not JSON"),
            ('{"flops": 1}', "expected flops, memory, nvlink, network, host, gib"),
            ('{"flops": 1, "memory": 1, "nvlink": 1, "network": 0, "host": 1, "gib": 1}', "network is 0"),
            (
                '{"flops": 1, "memory": 1, "nvlink": 1, "network": 1, "host": 1, "gib": 1, "efficiencies": {"a": 1}}',
                "efficiencies may have products, ",
            ),
            (
                '{"flops": 1, "memory": 1, "nvlink": 1, "network": 1, "host": 1, "gib": 1, '
                '"efficiencies": {"memory": 1.1}}',
                "efficiencies.memory: 1.1 is no number above 0 and at most 1",
            ),
        ],
    )
    def test_a_file_that_describes_none_is_refused_in_a_line(self, tmp_path, text, says):
        file = tmp_path / "mine.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=says) as e:
            accelerator(str(file))
        assert str(file) in str(e.value) and "\n" not in str(e.value)
        with pytest.raises(ConfigError, match="cannot read"):
            accelerator(str(tmp_path / "nowhere.json"))


class TestEngine:
    def test_one_answer_reads_every_weight_and_its_keys_and_values(self):
        time = EngineTime(config(), DENSE, gpu())
        assert time.step(1) == pytest.approx(2 * (BODY + HEAD) / 1e9)
        assert time.per_token == pytest.approx(2 * 2 * LAYERS * KV_HEADS * HEAD_DIM / 1e9)

    def test_many_answers_multiply_longer_than_weights_are_read(self):
        slow = gpu(flops=1e9)
        assert EngineTime(config(), DENSE, slow).step(100) == pytest.approx(100 * 2 * (BODY + HEAD) / 1e9)

    def test_shares_and_seconds_of_the_efficiencies(self):
        share = replace(PERFECT, memory=0.5, step_s=0.003, request_s=0.001)
        assert EngineTime(config(), DENSE, gpu(share)).step(4) == pytest.approx(
            2 * 2 * (BODY + HEAD) / 1e9 + 0.003 + 4 * 0.001
        )

    def test_tensor_parallel_ranks_divide_the_weights_and_reduce_twice_a_layer(self):
        share = replace(PERFECT, message_s=1e-4)
        time = EngineTime(config(rollout={"tp": 2}), DENSE, gpu(share))
        # a ring sends each byte of the row once for the sum and once for everybody, of which a rank has half
        reduced = 2 * LAYERS * (1e-4 + 5 * HIDDEN * 2 * (2 * 1 / 2) / 1e10)
        assert time.step(5) == pytest.approx(2 * (BODY + HEAD) / 2 / 1e9 + reduced)
        assert time.per_token == pytest.approx(2 * 2 * LAYERS * 1 * HEAD_DIM / 1e9)

    def test_ranks_on_several_nodes_reduce_over_the_network(self):
        made, inside = config(rollout={"tp": 2}), gpu(replace(PERFECT, message_s=0))
        there, apart = (EngineTime(made, DENSE, inside, node_gpus=gpus).prefill(10, 50) for gpus in (2, 1))
        sent = 2 * LAYERS * 10 * HIDDEN * 2 * (2 * 1 / 2)
        assert apart - there == pytest.approx(sent / inside.network - sent / inside.nvlink)

    def test_prefill_multiplies_tokens_and_attends_to_pairs(self):
        time = EngineTime(config(), DENSE, gpu(replace(PERFECT, products=0.5, attention=0.25)))
        pair = 2 * 2 * LAYERS * HIDDEN
        assert time.prefill(10, 50) == pytest.approx((10 * 2 * BODY / 0.5 + 50 * pair / 0.25) / 1e12)

    def test_of_experts_only_those_are_read_that_some_answer_has_chosen(self):
        time, rng = EngineTime(config(), SPARSE, gpu()), np.random.default_rng(0)
        expert, rest = LAYERS * 3 * HIDDEN * EXPERT_FFN, LAYERS * (ATTENTION + HIDDEN * EXPERTS) + HEAD
        for running in (1, 3, 20):
            drawn = [
                len({e for _ in range(running) for e in rng.choice(EXPERTS, CHOSEN, replace=False)})
                for _ in range(3000)
            ]
            assert time.weight_elements(running) == pytest.approx(rest + np.mean(drawn) * expert, rel=0.02)

    @pytest.mark.parametrize("seed", range(5))
    def test_a_simulated_engine_is_a_loop_over_steps(self, seed):
        """Token by token: after each step of the sum, answers that have all their tokens leave."""
        rng, time = np.random.default_rng(seed), EngineTime(config(), DENSE, gpu(flops=1e10))
        engine = SimulatedEngine(0, time, inf, 0)
        lengths, prompt = rng.integers(1, 200, 12).tolist(), int(rng.integers(1, 50))
        engine.take([RunningAnswer(0, prompt, tokens) for tokens in lengths], 0.0)
        ends = {}
        while (at := engine.next_event()) < inf:
            for answer in engine.advance(at):
                ends.setdefault(answer.tokens, at)

        now, left, done = time.prefill(prompt, prompt * prompt / 2), sorted(lengths), 0
        while left:
            # a step's answers have on average half a token more than at its beginning
            now += time.step(len(left)) + time.per_token * len(left) * (prompt + done + 0.5)
            done += 1
            for tokens in [tokens for tokens in left if tokens == done]:
                assert ends[tokens] == pytest.approx(now)
                left.remove(tokens)
        assert engine.sampled == pytest.approx(sum(lengths)) and engine.load == 0
        assert engine.busy == pytest.approx(now)

    def test_answers_that_do_not_fit_wait_and_all_end(self):
        engine = SimulatedEngine(0, EngineTime(config(), DENSE, gpu()), 500, 0)
        engine.take([RunningAnswer(0, 10, 100 + i) for i in range(12)], 0.0)
        ended = []
        while (at := engine.next_event()) < inf:
            ended += engine.advance(at)
        assert len(ended) == 12 and engine.preempted > 0
        assert engine.sampled == pytest.approx(sum(100 + i for i in range(12)))
        assert engine.under_way == 0

    def test_a_pause_prefills_what_runs(self):
        time = EngineTime(config(), DENSE, gpu())
        kept, again = (SimulatedEngine(0, time, inf, 0) for _ in range(2))
        for engine in (kept, again):
            engine.take([RunningAnswer(0, 10, 1000)], 0.0)
            engine.advance(0.01)
        kept.pause(0.01, 0.5, again=False)
        again.pause(0.01, 0.5, again=True)
        context = 10 + again.sampled
        assert kept.now == pytest.approx(0.51)
        prefilling = time.prefill(context, context**2 / 2)
        assert again.now - kept.now == pytest.approx(prefilling) == pytest.approx(again.prefilling_again)
        assert again.prefilled_again == pytest.approx(context) and kept.prefilled_again == kept.prefilling_again == 0


PLAN = [[[[0], [1]]]]
"""One replica and mini-batch, with two micro-batches of a sequence each."""


class TestTrainer:
    LENGTHS, TRAINED = np.array([30, 50]), np.array([20, 45])

    def flops(self, number):
        tokens, trained = int(self.LENGTHS[number]), int(self.TRAINED[number])
        return 2 * BODY * tokens + 2 * HEAD * trained + 2 * 2 * LAYERS * HIDDEN * tokens * (tokens + 1) / 2

    def of(self, plan, trainer=None, accelerator=None, **rest):
        time = TrainerTime(config(trainer, **rest), DENSE, accelerator or gpu(memory=1e30))
        return time.of_packed(PackedBatch.of(plan, self.LENGTHS, self.TRAINED))

    def test_one_rank_multiplies_three_times_as_much_as_a_forward_pass(self):
        assert self.of(PLAN) == pytest.approx(3 * (self.flops(0) + self.flops(1)) / 1e12)

    def test_the_slower_replica_counts(self):
        fast = gpu(memory=1e30, network=1e30, nvlink=1e30)
        assert self.of([[[[0]]], [[[1]]]], {"dp": 2}, fast) == pytest.approx(3 * self.flops(1) / 1e12)

    def test_a_pipeline_waits_for_a_microbatch_a_further_stage(self):
        def seconds(number):  # the last stage has the output layer beside its half of the layers
            head = 2 * HEAD * int(self.TRAINED[number])
            return 3 * ((self.flops(number) - head) / 2 + head) / 1e12

        whole = seconds(0) + seconds(1)
        assert self.of(PLAN, {"pp": 2}) == pytest.approx(whole + whole / 2)

    def test_what_takes_the_time_adds_up_to_it(self):
        """Each of them alone, by hand, and all of them together."""

        def shares(plan, trainer=None, accelerator=None, **rest):
            time = TrainerTime(config(trainer, **rest), DENSE, accelerator or gpu(memory=1e30))
            batch = PackedBatch.of(plan, self.LENGTHS, self.TRAINED)
            found = time.shares(batch)
            assert sum(found.values()) == pytest.approx(time.of_packed(batch))
            return found

        useful = 3 * (self.flops(0) + self.flops(1)) / 1e12
        alone = shares(PLAN)
        assert alone.pop("useful") == pytest.approx(useful) and list(alone.values()) == pytest.approx(
            [0.0] * len(alone)
        )
        scored = shares([[[[0]], [[1]]]], ppo={"minibatches": 2, "objective": "decoupled"})
        assert scored["proximal and reference passes"] == pytest.approx(self.flops(1) / 1e12)
        staged = shares(PLAN, {"pp": 2})
        assert staged["useful"] == pytest.approx(useful / 2)
        assert staged["pipeline bubble"] == pytest.approx((staged["useful"] + staged["uneven stages and ranks"]) / 2)
        again = shares(PLAN, {"recompute": "full"})
        assert 0.25 < again["recomputation"] / useful < 0.34
        half = shares(PLAN, accelerator=gpu(replace(PERFECT, products=0.5, attention=0.25), memory=1e30))
        attended = sum(3 * 2 * 2 * LAYERS * HIDDEN * n * (n + 1) / 2 for n in self.LENGTHS.tolist()) / 1e12
        assert half["attention below the peak"] == pytest.approx(3 * attended)
        assert half["products below the peak"] == pytest.approx(useful - attended)
        all_at_once = shares(
            [[[[0]], [[1]]]],
            {"pp": 2, "tp": 2, "recompute": "full"},
            gpu(replace(PERFECT, products=0.5)),
            ppo={"minibatches": 2, "objective": "decoupled"},
        )
        assert (
            min(all_at_once.values()) >= 0
            and all_at_once["exchange between ranks"] > 0 < all_at_once["optimizer steps"]
        )

    def test_further_minibatches_score_their_answers_before(self):
        plan = [[[[0]], [[1]]]]
        once, twice = (
            self.of(plan, ppo={"minibatches": 2, "objective": objective}) for objective in ("naive", "decoupled")
        )
        assert twice - once == pytest.approx(self.flops(1) / 1e12)

    def test_whole_layers_that_are_recomputed_cost_a_forward_pass_of_them(self):
        none, full = self.of(PLAN), self.of(PLAN, {"recompute": "full"})
        layers = sum(self.flops(i) - 2 * HEAD * int(self.TRAINED[i]) for i in range(2))
        assert full - none == pytest.approx(layers / 1e12, rel=0.03)  # as if all had the mean length

    def test_tensor_parallel_ranks_gather_and_scatter_rows(self):
        free, slow = (self.of(PLAN, {"tp": 2}, gpu(memory=1e30, nvlink=rate)) for rate in (1e30, 1e10))
        row = int(self.LENGTHS.sum()) * HIDDEN * 2 / 2  # what one of two ranks lacks, in bytes
        assert slow - free == pytest.approx((4 + 6) * LAYERS * row / 1e10)

    def test_gradients_that_take_longer_than_a_microbatch_are_waited_for(self):
        plan = [[[[0]]], [[[1]]]]
        free, slow = (self.of(plan, {"dp": 2}, gpu(memory=1e30, nvlink=rate)) for rate in (1e30, 1e6))
        elements = BODY + 2 * HEAD + LAYERS * (HIDDEN + 2 * KV_HEADS * HEAD_DIM) + (2 * LAYERS + 1) * HIDDEN
        hidden = 3 * self.flops(1) / 1e12  # in the passes over the one micro-batch
        assert slow - free == pytest.approx(elements * (4 + 2) / 2 / 1e6 - hidden)

    def test_groups_larger_than_a_node_talk_over_the_network(self):
        times = [
            TrainerTime(config({"tp": 4}), DENSE | {"num_key_value_heads": 4}, gpu(memory=1e30), node_gpus=gpus)
            for gpus in (4, 2)
        ]
        inside, outside = (time.of_packed(PackedBatch.of(PLAN, self.LENGTHS, self.TRAINED)) for time in times)
        assert outside > 2 * inside

    def test_experts_on_many_ranks_have_as_few_replicas_and_no_less_to_step(self):
        """Each of two ranks steps half of the experts: half of all of them, or all of its own."""
        quick = gpu(flops=1e30, nvlink=1e30, network=1e30)
        made = (config({"dp": 2, "ep": ep}) for ep in (1, 2))
        times = [TrainerTime(each, SPARSE, quick) for each in made]
        shared, own = (time.of_packed(PackedBatch.of([[[[0]]], [[[1]]]], self.LENGTHS, self.TRAINED)) for time in times)
        assert own == pytest.approx(shared) and own > 3 * EXPERTS * LAYERS * HIDDEN * EXPERT_FFN / 2 * ADAM / 1e9

    def test_sums_of_microbatches_of_which_some_are_empty(self):
        found = PackedBatch.of([[[[1], []]], [[[0], []]]], self.LENGTHS, self.TRAINED)
        assert found.sums.tolist() == [[50, 0, 30, 0], [45, 0, 20, 0], [50 * 51 / 2, 0, 30 * 31 / 2, 0]]
        assert found.counts.tolist() == [[2, 2]] and found.mean_length == 40

    def test_a_batch_is_packed_as_the_controller_packs_it(self):
        time = TrainerTime(config({"microbatch_tokens": 60}, batch_size=2), DENSE, gpu(memory=1e30))
        assert time.update(self.LENGTHS - self.TRAINED, self.TRAINED) == pytest.approx(self.of(PLAN))


def test_weights_and_checkpoints_are_copied_once():
    elements = BODY + 2 * HEAD + LAYERS * (HIDDEN + 2 * KV_HEADS * HEAD_DIM) + (2 * LAYERS + 1) * HIDDEN
    time = WeightsTime.of(config(), DENSE, gpu(replace(PERFECT, pause_s=0.25)))
    assert time.transfer == pytest.approx(2 * elements / 1e9)
    assert time.commit == pytest.approx(0.25 + 2 * 2 * elements / 1e9)
    assert time.checkpoint == pytest.approx((2 + 4 + 8) * elements / 1e9)


class TestLengths:
    def test_lognormal_ones_have_their_median_and_spread_up_to_the_cap(self):
        rng, lengths = np.random.default_rng(1), LognormalLengths(1000, 0.5, cap=2000, prompt=7, alike=0.4)
        groups = [lengths.group(rng, 8) for _ in range(4000)]
        assert {prompt for prompt, _ in groups} == {7}
        answers = np.array([answers for _, answers in groups])
        assert np.median(answers) == pytest.approx(1000, rel=0.02) and answers.max() == 2000
        free = np.array([LognormalLengths(1000, 0.5, 10**9, alike=0.4).group(rng, 8)[1] for _ in range(4000)])
        assert np.log(free).std() == pytest.approx(0.5, rel=0.03)
        assert np.log(free).mean(axis=1).var() == pytest.approx(0.25 * (0.4 + 0.6 / 8), rel=0.08)

    @pytest.mark.parametrize("wrong", [{"median": 0}, {"median": inf}, {"sigma": -1}, {"cap": 0}, {"alike": 1.5}])
    def test_lengths_without_an_end_are_refused(self, wrong):
        with pytest.raises(ConfigError, match="lengths: "):
            LognormalLengths(**{"median": 10.0, "sigma": 1.0, "cap": 100} | wrong)

    def test_recorded_ones_are_those_of_the_dumps(self, tmp_path):
        made = [trajectory(0, 3, 5, 20), trajectory(1, 3, 5, 30), trajectory(2, 4, 6, 40), trajectory(3, 4, 6, 50)]
        dumps.write(dumps.Dump(number=0, version=0, trajectories=made), tmp_path)
        lengths, rng = RecordedLengths.of(tmp_path), np.random.default_rng(0)
        drawn = {(prompt, tuple(answers.tolist())) for prompt, answers in (lengths.group(rng, 2) for _ in range(50))}
        assert drawn == {(5, (20, 30)), (6, (40, 50))}
        assert len(lengths.group(rng, 3)[1]) == 3
