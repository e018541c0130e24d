"""From whom an engine takes its weights: few sources and equal loads, against brute force over the layouts."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from areal_megatron.config import Config, MachineConfig, ModelConfig, RolloutConfig, TrainerConfig
from areal_megatron.models.dtypes import ITEMSIZE
from areal_megatron.reshard import plan as plan_module
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner, largest_bucket
from areal_megatron.reshard.session import LinkInfo, init_body
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tests.support.reshard_oracle import CONFIG as TIED

UNTIED = TIED | {"num_hidden_layers": 4, "tie_word_embeddings": False}
TIED = TIED | {"num_hidden_layers": 4}
EXPERTS = UNTIED | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 8,
    "moe_intermediate_size": 64,
}
DENSE_TRAINERS = [
    MegatronSizes(tp=2, dp=3),
    MegatronSizes(tp=4, pp=2),
    MegatronSizes(tp=2, pp=2, dp=2, cp=2),
    MegatronSizes(tp=2, pp=4, vpp=1),
    MegatronSizes(tp=2, pp=2, vpp=2, dp=2),
    MegatronSizes(dp=6),
    MegatronSizes(tp=8),
]
EXPERT_TRAINERS = [
    MegatronSizes(tp=2, dp=4, ep=4, etp=1),
    MegatronSizes(tp=4, dp=2, ep=8, etp=1),
    MegatronSizes(tp=2, pp=2, dp=2, ep=4, etp=1),
    MegatronSizes(tp=2, dp=4, ep=2, etp=2),
    MegatronSizes(tp=4, dp=2, ep=2, etp=1),
    MegatronSizes(dp=4, ep=2, pp=2),
    MegatronSizes(tp=4, dp=3, ep=2, etp=2),
]
ENGINES = [EngineSizes(), EngineSizes(tp=2), EngineSizes(tp=4), EngineSizes(tp=8)]
EXPERT_ENGINES = [EngineSizes(tp=4, expert_parallel=True), EngineSizes(dp=3, expert_parallel=True)]
CASES = [
    *((hf, sizes, engine) for hf in (TIED, UNTIED) for sizes in DENSE_TRAINERS for engine in ENGINES),
    *((EXPERTS, sizes, engine) for sizes in EXPERT_TRAINERS for engine in [*ENGINES, *EXPERT_ENGINES]),
]


def holders(planner: Planner) -> list[Counter[int]]:
    """Returns for each engine rank: set of trainer ranks, as bits → the elements it needs that exactly these hold."""
    shapes, on = {}, {}
    for rank, layout in enumerate(planner.sources):
        shapes |= layout.canonical
        for piece in layout.pieces:
            bits = on.setdefault(piece.tensor, np.zeros(shapes[piece.tensor], dtype=np.int64))
            bits[piece.box.slices] |= 1 << rank
    needed = []
    for layout in planner.destinations:
        found = Counter()
        for piece in layout.pieces:
            for bits, count in zip(*np.unique(on[piece.tensor][piece.box.slices], return_counts=True), strict=True):
                found[int(bits)] += int(count)
        needed.append(found)
    return needed


def fewest(needed: Counter[int], ranks: int) -> int:
    """Returns the smallest number of trainer ranks that hold everything, by trying all sets of them."""
    alike = {}  # one of the ranks that hold the same
    for rank in range(ranks):
        alike.setdefault(tuple(bits >> rank & 1 for bits in needed), rank)
    ones = [1 << rank for held, rank in alike.items() if any(held)]
    return next(
        count
        for count in range(1, len(ones) + 1)
        for chosen in combinations(ones, count)
        if all(bits & sum(chosen) for bits in needed)
    )


def sources(planner: Planner, engine: int) -> list[set[int]]:
    found = [set() for _ in planner.destinations]
    for transfer in planner.plan(engine).transfers:
        found[transfer.destination].add(transfer.source)
    return found


def loads(planner: Planner, engines: int) -> list[int]:
    load = [0] * len(planner.sources)
    for engine in range(engines):
        for transfer in planner.plan(engine).transfers:
            load[transfer.source] += transfer.receive.box.size
    return load


def least(planner: Planner) -> float:
    """Returns the elements that the busiest of all ranks sends at least to one engine: by Hall's theorem what only a
    set of ranks holds, over their number, for the worst of all sets."""
    everything = sum(holders(planner), Counter())
    alike = Counter(tuple(bits >> rank & 1 for bits in everything) for rank in range(len(planner.sources)))
    worst = 0.0
    for count in range(1, len(alike) + 1):
        for chosen in combinations(alike, count):
            held = sum(
                size
                for position, size in enumerate(everything.values())
                if not any(kind[position] for kind in alike if kind not in chosen)
            )
            worst = max(worst, held / sum(alike[kind] for kind in chosen))
    return worst


def name(value) -> str:
    if isinstance(value, dict):
        return "experts" if value is EXPERTS else "tied" if value is TIED else "untied"
    return "-".join(str(item) for item in vars(value).values())


@pytest.mark.parametrize(("hf", "sizes", "engine"), CASES, ids=name)
def test_sources_are_as_few_as_brute_force_finds(hf, sizes, engine):
    """As many engines as ranks: nobody need take from two replicas."""
    planner = Planner(hf, sizes, engine, engines=sizes.ranks)
    expected = [fewest(needed, sizes.ranks) for needed in holders(planner)]
    for number in (0, sizes.ranks // 2, sizes.ranks - 1):
        assert list(map(len, sources(planner, number))) == expected
    assert planner.traffic.sources == max(expected)


@pytest.mark.parametrize(("hf", "sizes", "engine"), CASES, ids=name)
def test_the_busiest_sends_little_more_than_it_must(hf, sizes, engine, monkeypatch):
    """The parts of a vocabulary of 1,024 end where they should on both sides, and experts outweigh all else.

    An engine with whole experts on its ranks is the one case in which few sources and equal loads may contradict.
    """
    monkeypatch.setattr(plan_module, "_SMALLEST_CUT", 64)
    hf = hf | {"vocab_size": 1024, "num_experts": 64}
    of_one = least(Planner(hf, sizes, engine, engines=1))
    for engines in (1, 3, 8):
        planner = Planner(hf, sizes, engine, engines=engines)
        load, bound = loads(planner, engines), engines * of_one
        assert sum(load) == engines * sum(layout.size for layout in planner.destinations)
        assert max(load) <= (1.1 if engine.expert_parallel else 1.05) * bound
        traffic = planner.traffic
        assert traffic.sent == tuple(load) and 0.98 * bound <= traffic.least <= 1.0001 * bound
        assert traffic.busiest_over_mean == pytest.approx(max(load) / (sum(load) / len(load)))


@pytest.mark.parametrize(
    ("dp", "engines", "tp", "most", "engines_of_a_trainer"),
    [
        (12, 72, 1, 1, 6),
        (4, 4, 2, 1, 1),
        (4, 1, 4, 1, 1),  # each replica sends to one engine rank
        (4, 2, 1, 2, 1),  # two replicas for each engine, or half of the trainers would send nothing
        (8, 1, 1, 8, 1),
        (3, 4, 1, 2, 2),  # ends of a replica's stretch are inside an engine
        (4, 50, 1, 1, 13),  # 12 or 13 engines: balanced enough
    ],
)
def test_replicas_divide_engines_among_themselves(dp, engines, tp, most, engines_of_a_trainer, monkeypatch):
    monkeypatch.setattr(plan_module, "_SMALLEST_CUT", 64)
    planner = Planner(UNTIED | {"vocab_size": 1024}, MegatronSizes(dp=dp), EngineSizes(tp=tp), engines=engines)
    found = [sources(planner, engine) for engine in range(engines)]
    assert max(len(own) for ranks in found for own in ranks) == most == planner.traffic.sources
    to = Counter(source for ranks in found for source in set().union(*ranks))
    assert len(to) == dp and max(to.values()) == engines_of_a_trainer
    assert [len(peers) for peers in planner.traffic.peers] == [to[rank] for rank in range(dp)]
    pairs = Counter((source, engine) for engine, ranks in enumerate(found) for own in ranks for source in own)
    for rank, peers in enumerate(planner.traffic.peers):
        assert sorted(peers) == sorted(count for (source, _), count in pairs.items() if source == rank)
    assert planner.traffic.busiest_over_mean <= 1.05


def test_an_engine_that_is_added_has_the_senders_of_one_there_was_from_the_start():
    planner = Planner(UNTIED, MegatronSizes(dp=4), EngineSizes(), engines=4)
    assert len({planner.plan(engine).digest for engine in range(4)}) == 4
    assert [planner.plan(4 + engine).digest for engine in range(8)] == 2 * [planner.plan(n).digest for n in range(4)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_derives_the_plan_of_its_trainers_from_what_it_is_told(device):
    config = Config(
        name="x",
        updates=1,
        model=ModelConfig("m"),
        machine=MachineConfig(device=device),
        trainer=TrainerConfig(tp=2, dp=4),
        rollout=RolloutConfig(engines=6, tp=2),
    )
    trainers = Planner.of(config, UNTIED, MegatronSizes.of(config.trainer))
    digests = set()
    for engine in range(8):
        body = init_body(config=config, engine=engine, generation=1, store="127.0.0.1:1", hf_config=UNTIED)
        plan = LinkInfo(**body["init_info"]).planner().plan(engine)
        assert plan.digest == trainers.plan(engine).digest
        assert plan.bucket_elements == largest_bucket(device == "cuda")
        digests.add(plan.digest)
    assert len(digests) == 6


def test_messages_on_a_gpu_are_of_64_to_256_mib():
    for bytes_of_an_element in set(ITEMSIZE.values()):
        assert 64 <= largest_bucket(on_cuda=True) * bytes_of_an_element / 2**20 <= 256
    assert largest_bucket(on_cuda=False) * ITEMSIZE["bfloat16"] == 8 * 2**20
