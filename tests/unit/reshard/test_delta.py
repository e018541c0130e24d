"""Updates of what has changed: bit by bit those of whole messages, and whole again where anything does not fit."""

import random
import threading
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
import torch

from areal_megatron.config import Config, MachineConfig, ReshardConfig
from areal_megatron.models.architecture import read_config
from areal_megatron.reshard.carriers.streams import Stream
from areal_megatron.reshard.changes import bits, decode, zstd
from areal_megatron.reshard.copies import bind, pack, unpack
from areal_megatron.reshard.edits import Places
from areal_megatron.reshard.messages import Publication
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.published import Choice, Cost, HostMemory, Kept, Publications
from areal_megatron.reshard.session import FEW_CHANGES, looking_bytes
from areal_megatron.reshard.transport import Link
from tests.support.links import Pools
from tests.support.reshard_oracle import MODELS, megatron_shards, vllm_parameters, write_model
from tests.unit.reshard.test_layouts import PLANS, ids


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name → (tensors, config) of a checkpoint that transformers wrote."""
    folder = tmp_path_factory.mktemp("models")
    return {name: (write_model(name, folder / name), read_config(folder / name)) for name in MODELS}


@pytest.fixture
def pools(tmp_path, models):
    made = []

    def make(name="qwen3", **settings):
        made.append(Pools(tmp_path, *models[name], **({"dtype": torch.bfloat16, "update": "delta"} | settings)))
        made[-1].join(1)
        return made[-1]

    yield make
    for one in made:
        one.close()


def stepped(tensors, share, seed):
    """The tensors with `share` of their elements changed: a little, or to another sign and size."""
    generator = torch.Generator().manual_seed(seed)

    def step(tensor):
        chosen = torch.rand(tensor.shape, generator=generator) < share
        odd = torch.rand(tensor.shape, generator=generator) < 0.02
        return torch.where(chosen, torch.where(odd, -3 * tensor, 1.01 * tensor), tensor)

    return {name: step(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("name", "sizes", "engine"),
    [
        pytest.param(*case, marks=[pytest.mark.soak] * bool(number % 11))
        for number, case in enumerate(PLANS)
        if number % 3 == 0 or number % 11 == 0
    ],  # by 11, each engine has its turn with each model; whole messages of more layouts are in test_layouts.py
    ids=ids,
)
def test_changes_of_every_layout_are_those_of_whole_messages(models, name, sizes, engine):
    tensors, config = models[name]
    after = stepped(tensors, 0.05, seed=1)
    sources = [megatron_shards(t, config, sizes) for t in (tensors, after)]
    expected = [vllm_parameters(after, config, rank=rank, **asdict(engine)) for rank in range(engine.ranks)]
    held = [vllm_parameters(tensors, config, rank=rank, **asdict(engine)) for rank in range(engine.ranks)]
    held = [{name: t.clone().contiguous() for name, t in rank.items()} for rank in held]
    plan = Planner(config, sizes, engine, bucket_elements=8000).plan(0)
    for rank in range(engine.ranks):
        buckets = plan.received_by(rank)
        assert sorted(number for group in plan.groups(buckets) for number in group) == list(range(len(buckets)))
        for bucket in buckets:
            kept, flat = Kept(None), torch.empty(bucket.elements)
            for version, of in enumerate(sources):
                pack(bind((t.send for t in bucket.transfers), of[bucket.source], flat))
                encoded = kept.changes(flat, version, version - 1 if version else None)
            if encoded is None:
                assert bucket.elements < 100, "5% of the elements are less than all"
                unpack(bind((t.receive for t in bucket.transfers), held[rank], flat))
                continue
            changes, _ = decoded(encoded, flat)
            edits, _ = Places((t.receive for t in bucket.transfers), held[rank], torch.float32).edits(changes)
            for edit in edits:
                edit.write()
    for rank, parameters in enumerate(expected):
        for name_, tensor in parameters.items():
            assert torch.equal(held[rank][name_], tensor), name_


def decoded(encoded, flat):
    return decode(encoded, flat.numel(), flat.itemsize)


DAILY = [("full", "qwen3"), ("streamed", "qwen3"), ("streamed", "qwen3-moe"), ("full", "glm4-moe")]
"""Each way to stage with experts and without, and each model."""


@pytest.mark.parametrize(
    ("staging", "name", "updates"),
    [
        pytest.param(*case, updates, marks=[pytest.mark.soak] * (updates > 12 or case not in DAILY))
        for case in product(("full", "streamed"), ("qwen3", "qwen3-moe", "glm4-moe"))
        for updates in (12, 50)
    ],
)
def test_many_updates(pools, name, staging, updates):
    """With all shares of changes, and failures and new generations in between."""
    chosen, generation = random.Random(0), 1
    link = pools(name, sizes={"tp": 2, "pp": 2}, tp=2, staging=staging, compress=chosen.choice([None, zstd]))
    whole = link.update(1)
    assert whole.changed == 1
    link.assert_committed()
    for version in range(2, updates + 2):
        share = chosen.choice([0, 0.001, 0.01, 0.05, 0.3, 1])
        link.train(stepped(link.tensors, share, seed=version))
        if version % 10 == 0:  # given up: what arrived of it leaves no trace, and the version after it has its changes
            link.start()
            for update in link.updates:
                update.abandon()
                assert update.problem()
            generation += 1
            link.join(generation)
            link.train(stepped(link.tensors, share, seed=-version))
        received = link.update(version, generation)
        link.assert_committed()
        if share <= 0.05:
            assert received.changed <= 2.2 * share + 1e-4 and received.bytes < (3 * 2 * share + 0.05) * whole.bytes
        assert received.bytes < 1.01 * whole.bytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(pools, dtype):
    link = pools(sizes={"tp": 2}, tp=1, dtype=dtype)
    whole = link.update(1)
    link.train(stepped(link.tensors, 0.01, seed=1))
    received = link.update(2)
    link.assert_committed()
    assert received.bytes < 0.08 * whole.bytes


ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=ON_CUDA)])
@pytest.mark.parametrize("staging", ["full", "streamed"])
def test_a_link_through_the_host_carries_changes(pools, device, staging):
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2, link="host", device=device, staging=staging)
    for version in range(1, 5):
        link.train(stepped(link.tensors, 0.1, seed=version))
        link.update(version)
        link.assert_committed()


def test_an_engine_that_generates_takes_changes_until_its_room_is_full(pools):
    """The trainers, of which some are inside messages that nobody takes, say so long before the timeout of those."""
    link = pools(sizes={"tp": 2, "pp": 2}, tp=2, staging="streamed", timeout_s=500)
    link.update(1)
    link.train(stepped(link.tensors, 0.005, seed=1))
    live = [{name: tensor.clone() for name, tensor in held.items()} for held in link.held]
    received, error = link.deliver(2, few_changes=True)
    assert not error and 0 < received.changed < 0.01
    assert all(torch.equal(held[name], t) for held, old in zip(link.held, live, strict=True) for name, t in old.items())
    for update in link.updates:
        assert not update.problem()
        update.commit()
    link.assert_committed()
    before = link.tensors
    for version, share in ((3, 0.3), (4, 1)):
        link.train(stepped(before, share, seed=version))
        _, error = link.deliver(version, generation=version - 2, few_changes=True)
        assert "more changes came than there is room for; next time the engine is paused meanwhile" in error
        link.tensors = before
        link.assert_committed()
        link.join(version - 1)
    link.train(stepped(before, 1, seed=5))
    link.update(5, generation=3)
    link.assert_committed()


def test_an_engine_that_generates_takes_small_messages_as_a_whole(pools):
    """Those that change everywhere, or are less than the head of changes."""
    link = pools("glm4-moe", sizes={"tp": 2}, tp=1, staging="streamed")
    link.update(1)
    for version in range(2, 6):
        changed = stepped(link.tensors, 0.002, seed=version)
        bias = {name: t + 0.001 for name, t in link.tensors.items() if name.endswith("e_score_correction_bias")}
        link.train(changed | bias)
        assert bias and link.update(version, few_changes=True).changed < FEW_CHANGES, "as the next update expects"
        link.assert_committed()


def test_auto_goes_on_while_the_engine_generates_where_one_message_does_not_pay(pools, monkeypatch):
    link = pools(sizes={"tp": 2}, tp=1, staging="streamed", update="auto")
    monkeypatch.setattr(Choice, "measured", lambda self, size, seconds, whole=Choice.measured: whole(self, size, 1.0))
    norms = [name for name in link.tensors if "norm" in name]
    dense = sum(link.tensors[name].numel() for name in norms) / sum(t.numel() for t in link.tensors.values())
    for version in range(1, 7):
        received = link.update(version, few_changes=version > 3)
        assert version < 3 or dense < received.changed < FEW_CHANGES
        link.assert_committed()
        link.train(stepped(link.tensors, 0.002, seed=version) | {name: -3 * link.tensors[name] for name in norms})


def test_weights_that_are_not_what_they_are_said_to_be_are_replaced(pools):
    link = pools(sizes={"tp": 2}, tp=1)
    link.update(1)
    link.held[0]["model.norm.weight"].add_(1)  # by whomever
    link.train(stepped(link.tensors, 0.3, seed=1))
    _, error = link.deliver(2)
    assert error.endswith(
        "engine 0, rank 0, generation 1: update 2: the changes are based on other weights than those that are there"
    )
    link.join(2)
    assert link.update(3, generation=2).changed == 1
    link.assert_committed()


@pytest.mark.parametrize(("staging", "few"), [("full", False), ("streamed", False), ("streamed", True)])
def test_a_weight_that_is_wrong_but_does_not_change_is_noticed_when_its_turn_comes(pools, staging, few):
    link = pools(sizes={"tp": 2}, tp=1, staging=staging)
    link.update(1)
    (wrong,) = (
        number
        for number, arrival in enumerate(link.inlets[0].arrivals)
        if any(transfer.receive.parameter == "model.norm.weight" for transfer in arrival.bucket.transfers)
    )
    bits(link.held[0]["model.norm.weight"])[3] += 1
    unchanged = {"model.norm.weight": link.tensors["model.norm.weight"]}
    live = link.shards[0].live
    for version, turn in ((2, wrong + 1), (3, wrong)):
        link.train(stepped(link.tensors, 0.005, seed=version) | unchanged)
        live.turn = turn
        _, error = link.deliver(version, few_changes=few)
        if turn != wrong:
            assert not error
            link.updates[0].commit()
    assert "unchanged weights differ from the trainers' (CRC-32 mismatch)" in error
    assert not live.publication and live.turn == wrong + 1
    link.join(2)
    assert link.update(4, generation=2).changed == 1
    link.assert_committed()


@pytest.mark.parametrize("claim", ["of other trainers", "of a version that it does not have", "of the future", "odd"])
def test_an_engine_that_lies_about_its_version_gets_all(pools, claim):
    link = pools(sizes={"tp": 2}, tp=1)
    link.update(1)
    link.train(stepped(link.tensors, 0.05, seed=1))
    link.update(2)
    run = link.shards[0].live.publication.run
    lies = {"of other trainers": ("0", 2), "of a version that it does not have": (run, 1), "of the future": (run, 9)}
    link.shards[0].live.publication = Publication(*lies.get(claim, (run, -1)))
    link.train(stepped(link.tensors, 0.05, seed=2))
    received, error = link.deliver(3)
    if claim == "of a version that it does not have":
        assert "based on other weights" in error
        link.join(2)
        received = link.update(4, generation=2)
    else:
        assert not error
        link.updates[0].commit()
    assert received.changed == 1
    link.assert_committed()


@pytest.mark.parametrize("staging", ["full", "streamed"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("flip", "the checksum of the changes is wrong"),
        ("cut", "the changes are cut off"),
        ("shift", " are expected"),
        ("count", "sends a malformed head"),
        ("size", "sends a malformed head"),
    ],
)
def test_a_stream_that_is_wrong_leaves_the_weights_and_the_next_generation_alone(
    pools, monkeypatch, fault, message, staging
):
    link = pools(sizes={"tp": 2}, tp=1, staging=staging)
    link.update(1)
    before = link.tensors
    link.train(stepped(before, 0.05, seed=1))
    tell = Link.tell

    def wrong(self, flat, *rest):
        if flat.dtype == torch.uint8:
            if fault == "flip":
                flat[len(flat) // 2] ^= 1
            elif fault == "cut":
                flat = flat[:-10]
            elif fault == "shift":
                flat = torch.cat([flat[100:], flat[:100]])  # as long, but it begins later
        elif fault == "cut" and flat[1]:
            flat[1] -= 10
        elif fault == "count":
            flat[0] = 10**6
        elif fault == "size":
            flat[1] = 2**40
        return tell(self, flat, *rest)

    monkeypatch.setattr(Link, "tell", wrong)
    _, error = link.deliver(2)
    assert "engine 0, rank 0, generation 1: update 2: " in error and message in error
    assert link.updates[0].problem()
    monkeypatch.undo()
    if staging == "full":  # the other is torn
        trained, link.tensors = link.tensors, before
        link.assert_committed()
        link.tensors = trained
    link.join(2)
    link.update(3, generation=2)
    link.assert_committed()


def test_a_message_is_looked_through_once_a_version(monkeypatch):
    kept, looks = Kept(None), []
    monkeypatch.setattr(Kept, "_look", lambda *a, look=Kept._look: (looks.append(a), look(*a)))
    flat = torch.arange(1000, dtype=torch.float32).bfloat16()
    assert kept.changes(flat, 1, since=None) is None
    states = [bits(flat).clone()]
    for version in range(2, 5):
        flat[version * 10] += 100
        states.append(bits(flat).clone())
        of_engines = [kept.changes(flat, version, since) for since in (version - 1, version - 1, None)]
        assert of_engines[0] is of_engines[1] is not None and of_engines[2] is None
    assert len(looks) == 3
    for since, state in zip((1, 2, 3), states, strict=False):  # engines that lag
        changes, _ = decoded(kept.changes(flat, 4, since), flat)
        assert len(changes.places) == 4 - since
        late = state.numpy().copy()
        changes.apply(late)
        assert np.array_equal(late, states[-1].numpy())
    assert kept.changes(flat, 4, since=0) is None, "before the first version that was kept"


def test_of_changes_for_engines_that_lag_a_sixteenth_of_the_message_is_kept():
    kept, flat = Kept(None), torch.zeros(10_000, dtype=torch.bfloat16)
    kept.changes(flat, 0, None)
    for version in range(1, 10):
        flat[torch.randperm(10_000)[:300]] += 1
        kept.changes(flat, version, None)
    known = [since for since in range(9) if kept.changes(flat, 9, since)]
    assert known == [7, 8], "of two versions, 1,300 bytes, beside those of the last"


def test_blocks_are_full_but_for_less_than_the_largest_message():
    chosen, block, largest, taken = random.Random(0), 2**16, 2**12, 0
    blocks, parts = HostMemory(pinned=False, block=block), []
    for number in range(500):
        dtype = chosen.choice([torch.bfloat16, torch.float32])
        parts.append(blocks.take(chosen.randrange(largest // dtype.itemsize), dtype).fill_(number % 256))
        taken += -(-parts[-1].nbytes // 64) * 64
    assert all(bool((part == number % 256).all()) for number, part in enumerate(parts)), "none overlaps another"
    assert len({part.untyped_storage().data_ptr() for part in parts}) <= -(-taken // (block - largest))
    assert blocks.take(2 * block, torch.uint8).numel() == 2 * block


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_looks_on_a_gpu_take_the_memory_of_one_message():
    published, flats = Publications(None), [torch.randn(2**25, device="cuda").bfloat16() for _ in range(2)]
    for version in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for number, flat in enumerate(flats):
            with torch.cuda.stream(torch.cuda.Stream()):
                encoded = published.kept(number).changes(flat, version, version - 1 if version else None)
        taken = torch.cuda.max_memory_allocated() - before
        flats = [flat * 1.01 for flat in flats]
    assert encoded is None, "all has changed"
    assert taken < 1.1 * looking_bytes(2**25, 2)


def test_what_auto_chooses():
    choice = Choice("auto")
    assert not choice.looks_at("a"), "nothing was measured"
    choice.measured(10**9, 8.0)  # 125 MB/s
    assert choice.looks_at("a")
    cost = Cost("a", size=10**8, encoded=10**6)
    choice.judge([cost, Cost("b", 10**8, 99 * 10**6)], looked_s=0.1)
    assert choice.looks_at("a"), "0.058 s instead of 0.8 s"
    assert not choice.looks_at("b"), "0.842 s"
    choice.measured(10**9, 0.02)  # 50 GB/s
    choice.judge([cost], looked_s=0.05)
    assert [choice.looks_at("a") for _ in range(18)] == [False] * 16 + [True] * 2
    assert choice.looks_at("c")
    assert Choice("delta").looks_at("a") and not Choice("full").looks_at("a")


def test_auto_does_not_look_where_no_look_can_pay():
    choice = Choice("auto")
    choice.measured(10**9, 0.1)  # 10 GB/s
    choice.look_takes(0.5e-9)  # 2 GB/s
    assert not choice.looks_at("a")
    choice.measured(10**9, 1.0)
    assert choice.looks_at("a")


def test_updates_that_fail_with_changes_are_followed_by_more_and_more_whole_ones():
    choice = Choice("auto")
    choice.measured(10**9, 8.0)
    for whole in (1, 2, 4, 8):
        choice.failed(["a"])
        assert [choice.looks_at("a") for _ in range(whole + 1)] == [False] * whole + [True]
    choice.judge([Cost("a", size=10**8, encoded=10**6)], looked_s=0.1)
    choice.failed(["a"])
    assert [choice.looks_at("a") for _ in range(2)] == [False, True], "one has succeeded in between"
    choice.failed([])
    assert choice.looks_at("a"), "it was whole, so changes were not to blame"


@pytest.fixture
def looks(monkeypatch):
    """Each look at a message, and each copy of one that is kept, with the version that was kept before."""
    found = []
    for real in (Kept._look, Kept._copy):

        def watched(kept, *rest, real=real):
            found.append((real.__name__, kept._version))
            return real(kept, *rest)

        monkeypatch.setattr(Kept, real.__name__, watched)
    return found


def over_nccl(update):
    return Config(machine=MachineConfig(device="cuda"), reshard=ReshardConfig(update=update, staging="streamed"))


def test_auto_keeps_and_compares_nothing_over_a_fast_link(pools, monkeypatch, looks):
    monkeypatch.setattr(Choice, "measured", lambda self, size, seconds, whole=Choice.measured: whole(self, size, 1.0))
    link = pools(sizes={"tp": 2}, tp=1, update="auto", may_send_changes=over_nccl("auto").may_send_changes())
    sent = []
    for version in range(1, 5):
        sent.append(link.update(version).bytes)
        link.assert_committed()
        link.train(stepped(link.tensors, 0.01, seed=version))
    assert len(set(sent)) == 1 and not looks
    assert [publisher._trainer.published.size for publisher in link.publishers] == [0, 0]


def test_an_engine_has_room_for_changes_where_trainers_may_send_it_some():
    auto, delta = over_nccl("auto"), over_nccl("delta")
    through_host = replace(auto, reshard=replace(auto.reshard, link="host"))
    on_cpu = replace(auto, machine=MachineConfig(device="cpu"))
    for config, own_site, other_site in [
        (auto, False, True),
        (delta, True, True),
        (through_host, True, True),
        (on_cpu, True, True),
        (over_nccl("full"), False, False),
    ]:
        assert [config.may_send_changes(at_other_site) for at_other_site in (False, True)] == [own_site, other_site]


def test_delta_sends_changes_over_a_fast_link(pools, monkeypatch, looks):
    link = pools(sizes={"tp": 2}, tp=1, update="delta", may_send_changes=over_nccl("delta").may_send_changes())
    whole = link.update(1).bytes
    link.train(stepped(link.tensors, 0.01, seed=1))
    assert link.update(2).bytes < whole / 10 and looks
    assert all(publisher._trainer.published.size for publisher in link.publishers)


def test_auto_keeps_nothing_before_a_look_can_pay(pools, monkeypatch, looks):
    """By the time that a look takes where nothing has changed, and by that of whole messages."""
    seconds = iter([1e-6, 1e-6, 1.0, 1.0, 1.0, 1.0])
    measured = Choice.measured
    monkeypatch.setattr(Choice, "measured", lambda self, size, _: measured(self, size, next(seconds)))
    link = pools(sizes={}, tp=1, update="auto")
    for version in range(1, 6):
        received = link.update(version)
        link.assert_committed()
        assert bool(looks) == (version > 3)
        link.train(stepped(link.tensors, 0.01, seed=version))
    assert received.changed < 0.1


@pytest.mark.parametrize("where", ["in a look", "in a message"])
def test_an_update_of_changes_that_fails_is_followed_by_a_whole_one(pools, monkeypatch, looks, where):
    """Also in a new generation of the link: else looks that never end in time would fail every update."""
    monkeypatch.setattr(Choice, "measured", lambda self, size, seconds, whole=Choice.measured: whole(self, size, 1.0))
    link = pools(sizes={"tp": 2}, tp=1, update="auto")
    for version in (1, 2, 3):
        received = link.update(version)
        link.train(stepped(link.tensors, 0.01, seed=version))
    assert received.changed < 0.1, "changes are sent"

    def fail(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(*((Kept, "_look") if where == "in a look" else (Link, "tell")), fail)
        _, error = link.deliver(4)
    assert "out of memory" in error
    looks.clear()
    link.join(2)

    def later():
        """Another rank may look at the version that failed when the update is over."""
        return [look for look in looks if look != ("_look", 3)]

    assert link.update(5, generation=2).changed == 1 and not later()
    link.assert_committed()
    link.train(stepped(link.tensors, 0.01, seed=5))
    link.update(6, generation=2)
    link.assert_committed()
    assert later(), "it is tried again"


def test_a_link_that_cannot_be_measured_is_named_in_one_line(pools, monkeypatch):
    """auto goes by the time of a whole version, of which none has arrived."""
    over = threading.Event()
    monkeypatch.setattr(Link, "receive", lambda *_: over.wait(20))
    monkeypatch.setattr(Stream, "write", lambda *_: over.wait(20))
    link = pools(sizes={}, tp=1, update="auto", timeout_s=2)
    _, error = link.deliver(1)
    assert error.endswith(
        "; reshard.update=auto cannot measure the link before a whole version has arrived within reshard.timeout_s=2: "
        "raise it if the link is that slow"
    )
    over.set()
    for inlet in link.inlets:
        inlet.end()
    assert "\n" not in error


def test_what_fails_in_a_look_leaves_the_base_as_it_was():
    broken = []

    def compress(parts):
        if broken:
            raise MemoryError
        return zstd(parts)

    kept, flat = Kept(compress), torch.zeros(10_000, dtype=torch.bfloat16)
    kept.changes(flat, 1, None)
    first = bits(flat).numpy().copy()
    flat[:300] += 1
    broken.append(True)
    with pytest.raises(MemoryError):
        kept.changes(flat, 2, since=1)
    broken.clear()
    flat[300:500] += 1
    changes, _ = decoded(kept.changes(flat, 3, since=1), flat)
    changes.apply(first)
    assert np.array_equal(first, bits(flat).numpy())


def test_auto_measures_the_link_and_sends_changes_over_a_slow_one(pools, monkeypatch):
    link = pools(sizes={"tp": 2}, tp=1, update="auto")
    monkeypatch.setattr(Choice, "measured", lambda self, size, seconds, whole=Choice.measured: whole(self, size, 1.0))
    sent = []
    for version in range(1, 5):
        sent.append(link.update(version).bytes)
        link.assert_committed()
        link.train(stepped(link.tensors, 0.01, seed=version))
    assert sent[0] == sent[1] > 10 * max(sent[2:])


def test_auto_sends_changes_again_at_once_to_an_engine_that_was_restarted(pools, monkeypatch):
    link = pools(sizes={"tp": 2}, tp=1, update="auto")
    monkeypatch.setattr(Choice, "measured", lambda self, size, seconds, whole=Choice.measured: whole(self, size, 1.0))
    sent = {}
    for version in range(1, 9):
        if version == 6:
            link.shards[0].live.publication = None
            link.join(2)
        sent[version] = link.update(version, generation=1 + (version > 5)).bytes
        link.assert_committed()
        link.train(stepped(link.tensors, 0.01, seed=version))
    assert [version for version, size in sent.items() if size > sent[1] / 10] == [1, 2, 6]


def test_auto_does_not_look_for_long_where_everything_changes(pools, monkeypatch):
    link, looks = pools(sizes={}, tp=1, update="auto", dtype=torch.float32), []
    monkeypatch.setattr(Kept, "_look", lambda *a, look=Kept._look: (looks.append(a), look(*a)))
    monkeypatch.setattr(Choice, "measured", lambda self, size, seconds, whole=Choice.measured: whole(self, size, 1.0))
    for version in range(1, 8):
        assert link.update(version).changed == 1
        link.assert_committed()
        link.train({name: tensor * 1.001 for name, tensor in link.tensors.items()})
    assert len(looks) == len(link.inlets[0].arrivals), "once each"
