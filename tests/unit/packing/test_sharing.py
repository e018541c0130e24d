"""Answers to one prompt in bundles: which of them share it, how they are split over replicas, and what that costs."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_megatron.data.trajectory import BatchPart, Trajectory, decoder, encoder
from areal_megatron.models.architecture import read_config
from areal_megatron.models.flops import SequenceFlops
from areal_megatron.packing.partition import partition, split
from areal_megatron.packing.sharing import Prefixes, bundlings
from tools.bench import packing

FLOPS = SequenceFlops(token=10_000.0, trained=3_000.0, pair=1.0)
NO_ROUTES = np.zeros(0, np.uint8)


def trajectory(uid: int, group: int, prompt, response: int, routes: np.ndarray = NO_ROUTES) -> Trajectory:
    return Trajectory(
        uid=uid,
        epoch=0,
        prompt_id=group,
        admission_version=0,
        prompt=np.array(prompt, np.int32),
        response=np.full(response, 7, np.int32),
        logprobs=np.zeros(response, np.float32),
        versions=np.zeros(response, np.int32),
        loss_mask=np.arange(response).astype(np.uint8) % 2,
        reward=0.0,
        truncated=False,
        routes=routes.reshape(-1),
    )


def families(trajectories: list[Trajectory]) -> list[list[int]]:
    """Returns the trajectories by bundle, if all of them were in one micro-batch."""
    costs = FLOPS([t.length for t in trajectories], [int(t.loss_mask.sum()) for t in trajectories])
    return Prefixes.of(trajectories, costs, FLOPS).bundles(range(len(trajectories)))


def test_only_equal_prompts_of_a_group_are_shared():
    prompt, other = [1, 2, 3, 4], [1, 2, 3, 5]
    assert families([trajectory(uid, uid // 2, prompt, 5) for uid in range(4)]) == [[0, 1], [2, 3]]
    mixed = [trajectory(uid, 0, asked, 5) for uid, asked in enumerate((prompt, other, prompt, other, prompt[:3]))]
    assert families(mixed) == [[0, 2], [1, 3], [4]]
    assert families([trajectory(uid, 0, [1], 5) for uid in range(3)]) == [[0], [1], [2]], "a prefix of no tokens"
    assert families([]) == []


def test_a_prompt_that_is_little_of_the_work_is_not_shared():
    """Without pairs a prefix of 4 tokens is 5% of 80."""
    for response, shared in ((75, True), (76, False)):
        group = [trajectory(uid, 0, range(5), response) for uid in range(4)]
        costs = SequenceFlops(token=1.0, trained=0.0, pair=0.0)
        prefixes = Prefixes.of(group, costs([t.length for t in group], 0), costs)
        assert prefixes.bundles(range(4)) == ([[0, 1, 2, 3]] if shared else [[0], [1], [2], [3]])


def test_sharing_has_to_pay_for_the_merging_of_two_attentions():
    """In a small model, whose tokens cost little beside attention, a prefix of 5 tokens pays with short answers."""
    small = SequenceFlops(token=800.0, trained=0.0, pair=1.0)
    for response, shared in ((10, True), (24, False)):
        group = [trajectory(uid, 0, range(6), response) for uid in range(4)]
        prefixes = Prefixes.of(group, small([t.length for t in group], 0), small)
        assert prefixes.bundles(range(4)) == ([[0, 1, 2, 3]] if shared else [[0], [1], [2], [3]])


def test_routes_are_equal_where_they_are_shared_and_may_differ_from_the_last_token_of_the_prompt_on():
    random, columns = np.random.default_rng(0), 6

    def group(place: int | None) -> list[Trajectory]:
        """Returns two answers whose routes differ at one place, or also from the last token of the prompt on."""
        made = [trajectory(uid, 0, range(9), 4 + uid, random.integers(0, 8, (12 + uid, columns))) for uid in range(2)]
        first, second = (t.routes.reshape(-1, columns) for t in made)
        second[: 8 if place is None else 12] = first[: 8 if place is None else 12]
        if place is not None:
            second[place, 3] = (second[place, 3] + 1) % 8
        return made

    assert families(group(None)) == [[0, 1]]
    assert families(group(8)) == [[0, 1]], "every answer has its own copy of the prompt's last token"
    for place in (0, 4, 7):
        assert families(group(place)) == [[0], [1]]
    first, second = group(8)
    second.routes = NO_ROUTES
    assert families([first, second]) == [[0], [1]], "one has no routes to replay"


def test_routes_that_end_early_are_compared_over_the_whole_prefix():
    """An episode that ends with what a tool says has no routes there. Taken for complete, it would have fewer experts
    to a token, and less of the prefix would be compared."""
    routes = np.zeros((10, 4), np.uint8)
    other = routes.copy()
    other[7, 3] = 1
    short = [trajectory(uid, 0, range(9), 12, own) for uid, own in enumerate((routes, other))]
    assert all(len(t.routes) % (t.length - 1) == 0 for t in short)
    complete = trajectory(2, 1, range(4), 6, np.zeros((9, 4), np.uint8))
    assert families([*short, complete]) == [[0], [1], [2]]
    short[1].routes = routes.reshape(-1).copy()
    assert families([*short, complete]) == [[0, 1], [2]]


@st.composite
def batches(draw) -> list[Trajectory]:
    """Draws groups of several prompts each, so that some prompts are shared by few answers, or by one."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    groups, found = draw(st.integers(4, 12)), []
    for group in range(groups):
        prompts = [range(int(random.integers(1, 60))) for _ in range(draw(st.integers(1, 2)))]
        for _ in range(draw(st.integers(1, 8))):
            response = int(np.clip(random.lognormal(3, 1), 1, 150))
            found.append(trajectory(len(found), group, prompts[int(random.integers(len(prompts)))], response))
    return found


def tokens(bundle: list[Trajectory]) -> int:
    return len(bundle[0].prompt) - 1 + sum(1 + len(t.response) for t in bundle)


def flops(bundle: list[Trajectory]) -> float:
    """Counts the queries and keys of the bundle one by one."""
    prefix, pairs = len(bundle[0].prompt) - 1, 0
    pairs += sum(query + 1 for query in range(prefix))
    pairs += sum(prefix + query + 1 for t in bundle for query in range(1 + len(t.response)))
    trained = sum(int(t.loss_mask.sum()) for t in bundle)
    return FLOPS.token * tokens(bundle) + FLOPS.trained * trained + FLOPS.pair * pairs


def shares(parts: list[BatchPart], m: int) -> list[list[list[list[Trajectory]]]]:
    """Returns the bundles of a mini-batch by [replica][micro-batch]."""
    return [
        [[[part.trajectories[i] for i in bundle] for bundle in microbatch] for microbatch in part.minibatches[m]]
        for part in parts
    ]


@settings(max_examples=150, deadline=None)
@given(
    batches(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from((30, 80, 160, 400)),
    st.integers(),
)
def test_batches_with_bundles_keep_every_promise(batch, replicas, minibatches, multiple, cap, seed):
    assume(len(batch) >= replicas * minibatches)
    plan = {"replicas": replicas, "minibatches": minibatches, "cap": cap, "seed": abs(seed), "multiple": multiple}
    together, alone = (split(batch, version=0, flops=FLOPS, **plan, share_prompts=on) for on in (True, False))
    for parts in (together, alone):
        uids = [t.uid for part in parts for t in part.trajectories]
        places = [[i for minibatch in part.members for microbatch in minibatch for i in microbatch] for part in parts]
        assert sorted(uids) == list(range(len(batch)))
        assert all(sorted(own) == list(range(len(part.trajectories))) for own, part in zip(places, parts, strict=True))
    members = []
    for m in range(minibatches):
        dearest = []
        for found in (shares(together, m), shares(alone, m)):
            [count] = {len(share) for share in found}
            assert count % multiple == 0 and all(any(share) for share in found)
            for microbatch in chain(*found):
                assert sum(map(tokens, microbatch)) <= cap or [len(bundle) for bundle in microbatch] == [1]
                asked = [{(t.prompt_id, t.prompt.tobytes()) for t in bundle} for bundle in microbatch]
                assert all(len(prompts) == 1 for prompts in asked), "different prompts are shared"
                several = [prompts for prompts, bundle in zip(asked, microbatch, strict=True) if len(bundle) > 1]
                assert all(asked.count(prompts) == 1 for prompts in several), "a prompt is computed twice"
            dearest.append(max(sum(flops(bundle) for bundle in chain(*share)) for share in found))
        assert dearest[0] <= dearest[1] * (1 + 1e-9), "bundles make the costliest replica dearer"
        assert all(len(bundle) == 1 for microbatch in chain(*shares(alone, m)) for bundle in microbatch)
        members.append([{t.uid for b in chain(*chain(*shares(parts, m))) for t in b} for parts in (together, alone)])
    assert all(first == second for first, second in members), "sharing changes what a step trains"
    sizes = [len(first) for first, _ in members]
    assert max(sizes) - min(sizes) <= 1
    groups = [{batch[uid].prompt_id for uid in first} for first, _ in members]
    assert sum(map(len, groups)) <= len(set.union(*groups)) + minibatches - 1, "more is cut than the borders ask for"


@settings(max_examples=100, deadline=None)
@given(batches(), st.sampled_from((160, 210, 400)))
def test_bundlings_go_from_the_coarsest_to_single_answers(batch, cap):
    """Every answer fits under the cap together with its prompt."""
    lengths = np.array([t.length for t in batch])
    costs = FLOPS(lengths, [int(t.loss_mask.sum()) for t in batch])
    prefixes = Prefixes.of(batch, costs, FLOPS)
    kept = np.flatnonzero(lengths <= cap)
    batch, prefixes = [batch[i] for i in kept], prefixes[kept]
    found = list(bundlings(lengths[kept], costs[kept], prefixes, cap))
    for bundled in found:
        bundles = [[t for t, b in zip(batch, bundled.bundles, strict=True) if b == n] for n in set(bundled.bundles)]
        assert bundled.sizes.tolist() == [tokens(bundle) for bundle in bundles]
        np.testing.assert_allclose(bundled.costs, [flops(bundle) for bundle in bundles], rtol=1e-12)
        assert all(size <= cap for size in bundled.sizes)
    counts = [len(bundled.sizes) for bundled in found]
    assert counts == sorted(set(counts)) and counts[-1] == len(batch)
    assert np.all(np.diff([bundled.costs.sum() for bundled in found]) > 0)
    fits = dict.fromkeys(prefixes.families.tolist(), 0)
    for number, own, prefix in zip(prefixes.families.tolist(), lengths[kept], prefixes.tokens, strict=True):
        fits[number] += own - prefix if fits[number] else own
    if all(size <= cap for size in fits.values()):
        assert counts[0] == len(fits), "a family that fits a row is cut"


def test_two_halves_of_a_group_level_two_replicas():
    """A group that is dearer than all others together is cut; the others stay whole."""
    groups = [[trajectory(10 * g + k, g, range(41), n) for k in range(8)] for g, n in enumerate((60, 6, 6))]
    batch = list(chain(*groups))
    parts = split(batch, version=0, replicas=2, minibatches=1, cap=10_000, seed=0, flops=FLOPS, share_prompts=True)
    spent = [sum(flops(bundle) for bundle in chain(*share)) for share in shares(parts, 0)]
    undivided = [flops(group) for group in groups]
    assert max(spent) < 0.75 * undivided[0] and sum(spent) < 1.15 * sum(undivided)
    bundles = Counter(bundle[0].prompt_id for share in shares(parts, 0) for bundle in chain(*share))
    assert bundles[0] == 2 and sum(bundles.values()) <= 5


def test_mini_batches_take_group_after_group():
    groups = np.repeat(np.arange(10), 4)
    plan = partition([5] * 40, 2, 4, 50, seed=3, groups=groups)
    drawn = [sorted(groups[i] for replica in plan for i in chain(*replica[m])) for m in range(4)]
    assert [len(own) for own in drawn] == [10] * 4
    assert [len(set(own)) for own in drawn] == [3] * 4, "two whole groups and half of one"
    other = partition([5] * 40, 2, 4, 50, seed=4, groups=groups)
    assert drawn != [sorted(groups[i] for replica in other for i in chain(*replica[m])) for m in range(4)]


def test_the_parts_survive_their_way_to_the_trainers():
    batch = [trajectory(uid, uid // 4, range(20), 5 + uid) for uid in range(16)]
    settings = {"version": 0, "replicas": 2, "minibatches": 2, "cap": 120, "seed": 0, "flops": FLOPS}
    for part in split(batch, **settings, share_prompts=True):
        got = decoder(BatchPart).decode(encoder().encode(part))
        assert got.minibatches == part.minibatches
        assert any(len(bundle) > 1 for minibatch in got.minibatches for m in minibatch for bundle in m)
    again = split([decoder(Trajectory).decode(encoder().encode(t)) for t in batch], **settings, share_prompts=True)
    first = split(batch, **settings, share_prompts=True)
    assert [part.minibatches for part in again] == [part.minibatches for part in first]


@pytest.mark.parametrize(
    ("groups", "most"),
    [
        (packing.Groups(128, prompt=512, answer=128), 1.005),
        (packing.Groups(32, prompt=512, answer=128), 1.01),
        (packing.Groups(16, prompt=512, answer=128), 1.10),
        (packing.Groups(64, prompt=8192, answer=512), 1.05),
    ],
    ids=str,
)
def test_groups_of_16_are_nearly_as_cheap_as_undivided_and_balanced(groups, most):
    """8 replicas, FLOPs of Qwen2.5-32B. `most`: costliest replica over what each would have if no group were cut."""
    task = packing.Task()
    settings = {"replicas": task.dp, "minibatches": 1, "cap": task.cap, "seed": 0, "flops": task.flops}
    for seed in range(3):
        parts = split(groups.generate(seed), version=0, **settings, share_prompts=True)
        figures = packing.judge_bundles(parts, task)
        assert figures["over the cap"] == 0
        assert figures["undivided"] <= figures["FLOPs"] <= figures["costliest"] <= most * figures["undivided"]
        assert figures["costliest"] < 0.45


def test_mini_batches_of_few_groups_on_many_replicas():
    """Fewer groups than replicas: none is without a sequence, and the costliest costs less than without sharing."""
    flops_32b, costliest = SequenceFlops.of(read_config(packing.MODEL)), {}
    batch = packing.Groups(3, prompt=512, answer=128).generate(0)
    task = packing.Task(dp=8, flops=flops_32b)
    for on in (True, False):
        settings = {"replicas": 8, "minibatches": 1, "cap": task.cap, "seed": 0, "flops": flops_32b}
        parts = split(batch, version=0, **settings, share_prompts=on)
        assert all(part.trajectories for part in parts)
        costliest[on] = packing.judge_bundles(parts, task)["costliest"]
    assert costliest[True] < 0.7 * costliest[False]
