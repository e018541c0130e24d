import re
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest

from areal_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    MachineConfig,
    ModelConfig,
    RolloutConfig,
    ServedModelConfig,
    TrainerConfig,
)
from areal_megatron.planning.plan import plan
from areal_megatron.planning.pools import Node, Slot, allocate, whole
from areal_megatron.reshard.trainer_layout import MegatronSizes


def config(tp=1, pp=1, dp=1, engines=1, engine_tp=1, mode="rl"):
    return Config(
        name="x",
        updates=1,
        mode=mode,
        model=ModelConfig(path="m"),
        data=DataConfig(train="t"),
        trainer=TrainerConfig(tp=tp, pp=pp, dp=dp),
        rollout=RolloutConfig(engines=engines, tp=engine_tp),
    )


def slots(count):
    return [Node("node", tuple(range(count)))]


def cluster(*sizes, name="n", cpus=0):
    """Returns a node for each size, which is its number of slots."""
    return [Node(f"{name}{number:02}", tuple(range(size)), cpus) for number, size in enumerate(sizes)]


@pytest.mark.parametrize("tp,pp,dp,engines,engine_tp", [(1, 1, 1, 1, 1), (2, 2, 1, 2, 2), (1, 2, 3, 4, 1)])
def test_every_slot_belongs_to_at_most_one_process(tp, pp, dp, engines, engine_tp):
    placement = allocate(config(tp, pp, dp, engines, engine_tp), slots(12))
    taken = [s for p in placement.processes for s in p.slots]
    assert len(taken) == len(set(taken)) == tp * pp * dp + engines * engine_tp
    assert [len(p.slots) for p in placement.pool("rollout")] == [engine_tp] * engines
    assert [p.name for p in placement.pool("trainer")] == [f"trainer-{r}" for r in range(tp * pp * dp)]
    assert len(placement.pool("controller")) == 1


def test_sft_has_trainers_only():
    assert {p.pool for p in allocate(config(engines=3, mode="sft"), slots(1)).processes} == {"trainer"}
    replay = allocate(config(tp=2, engines=3, mode="replay"), slots(2))
    assert [p.name for p in replay.processes] == ["controller", "trainer-0", "trainer-1"]


def test_engines_of_served_models_have_slots_of_their_own():
    asked = config(dp=2, engines=2)
    asked.served.reward = ServedModelConfig(path="m", engines=2, tp=2)
    asked.served.user = ServedModelConfig(path="u", engines=3)
    placement = allocate(asked, slots(11))
    taken = [slot for process in placement.processes for slot in process.slots]
    assert len(taken) == len(set(taken)) == 11
    assert [(p.name, len(p.slots)) for p in placement.pool("reward")] == [("reward-0", 2), ("reward-1", 2)]
    assert [(p.name, len(p.slots)) for p in placement.pool("user")] == [(f"user-{e}", 1) for e in range(3)]
    with pytest.raises(
        ConfigError,
        match=r"need 11 slots .*served.user.engines=3 × tp=1 is 3, served.reward.engines=2 × tp=2 is 4.*there are 10",
    ):
        allocate(asked, slots(10))
    trainers, engines = ([Node(name, tuple(range(9)))] for name in ("t", "e"))
    apart = allocate(asked, trainers, engines)
    nodes = {"controller": "t", "trainer": "t", "rollout": "e", "reward": "e", "user": "e"}
    assert {p.pool: p.node for p in apart.processes} == nodes
    many = config(dp=16, engines=8)
    many.served = asked.served
    table = allocate(many, [Node(name, tuple(range(8))) for name in "abcd"]).table().splitlines()
    assert "8 engines of 1, 3 engines of served.user of 1, 2 engines of served.reward of 2; controller" in table[0]
    assert table[1].split() == ["node", "trainer", "ranks", "engines", "user", "reward", "idle", "slots"]
    assert table[-1].split() == ["d", "-", "-", "0–2", "0–1", "1"]
    asked.served.reward.tp = 4
    with pytest.raises(ConfigError, match=r"served.reward.tp: reward-0 would be on 2 nodes"):
        allocate(asked, [Node(name, (0, 1)) for name in "abcdefgh"])
    asked.mode = "sft"
    assert not allocate(asked, slots(2)).pool("reward")
    asked.mode, asked.served.reward.engines, asked.served.user.engines = "rl", 0, 0  # the policy's serve them
    assert {p.pool for p in allocate(asked, slots(4)).processes} == {"controller", "trainer", "rollout"}


def test_pools_that_do_not_fit_say_what_was_asked_and_found():
    with pytest.raises(ConfigError, match=r"need 6 slots .*trainer.tp=2.*rollout.engines=2.*there are 4"):
        allocate(config(tp=2, dp=1, engines=2, engine_tp=2), slots(4))


def test_table_names_every_process():
    table = allocate(config(dp=2), slots(3)).table()
    assert all(name in table for name in ("controller", "trainer-0", "trainer-1", "engine-0", "node:2"))


def test_any_cluster_is_filled_by_the_rules_or_refused_in_one_line():
    placed = 0
    for seed in range(1000):
        asked, shared, own = random_cluster(Random(seed))
        try:
            placement = allocate(asked, shared, own)
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 300
        else:
            check_placement(asked, placement, shared, own)
            placed += 1
    assert 300 < placed < 700


def random_cluster(random):
    tp, engine_tp = random.choice([1, 2, 3, 4, 8, 16]), random.choice([1, 2, 4, 5, 8, 16])
    asked = config(tp, random.randint(1, 3), random.randint(1, 4), random.randint(1, 8), engine_tp)
    size = random.choice([1, 2, 4, 8, 8, 8])
    mixed = [random.choice([4, 8])] if random.random() < 0.1 else []
    own = cluster(*[random.choice([4, 8])] * random.randint(1, 16), name="r") if random.random() < 0.3 else []
    return asked, cluster(*[size] * random.randint(1, 30), *mixed), own


def check_placement(asked, placement, shared, own):
    trainers, engines = placement.pool("trainer"), placement.pool("rollout")
    taken = [slot for process in placement.processes for slot in process.slots]
    there = {Slot(node.name, index) for node in (*shared, *own) for index in node.slots}
    assert len(taken) == len(set(taken)) and set(taken) <= there
    assert placement.idle == len(there) - len(taken)
    assert [p.index for p in trainers] == list(range(asked.trainer_ranks))
    assert [p.index for p in engines] == list(range(asked.rollout.engines))
    assert {len(p.slots) for p in trainers} == {1} and {len(p.slots) for p in engines} == {asked.rollout.tp}
    (controller,) = placement.pool("controller")
    assert controller.node == shared[0].name and not controller.slots
    if own:
        assert {slot.node for p in trainers for slot in p.slots} <= {node.name for node in shared}
        assert {slot.node for p in engines for slot in p.slots} <= {node.name for node in own}

    room = {node.name: len(node.slots) for node in (*shared, *own)}
    sizes = MegatronSizes.of(asked.trainer)
    groups = defaultdict(list)
    for process in trainers:
        at = sizes.coordinates(process.index)
        groups[at.pp, at.dp].append(process.slots[0])
    for group in [*groups.values(), *(p.slots for p in engines)]:
        nodes = Counter(slot.node for slot in group)
        assert len(nodes) == 1 or all(count == room[name] for name, count in nodes.items())
    # stage after stage: a node is never left and come back to
    order = [node.name for node in shared]
    places = [(order.index(p.node), p.slots[0].id) for p in trainers]
    assert places == sorted(places)


def test_a_cluster_has_one_line_a_node():
    placement = allocate(config(8, 4, 6, 24, 8), cluster(*[8] * 48))
    lines = placement.table().splitlines()
    assert lines[0] == "48 nodes: 192 trainer ranks, 24 engines of 8; controller on n00"
    assert len(lines) == 50
    assert lines[4].split() == ["n02", "16–23", "-"] and lines[-1].split() == ["n47", "-", "23"]
    assert [p.name for p in placement.on("n00")] == ["controller", *(f"trainer-{rank}" for rank in range(8))]


def test_engines_begin_on_the_node_where_trainers_end():
    placement = allocate(config(4, 1, 3, 3, 4), cluster(8, 8, 8))
    assert [p.node for p in placement.pool("rollout")] == ["n01", "n02", "n02"]
    placement = allocate(config(4, 1, 3, 2, 8), cluster(8, 8, 8, 8))
    assert [p.node for p in placement.pool("rollout")] == ["n02", "n03"]
    assert placement.idle == 4 and "4 idle slots" not in placement.table()


def test_an_engine_larger_than_a_node_takes_whole_nodes():
    placement = allocate(config(4, 1, 1, 2, 16), cluster(*[8] * 5))
    assert [Counter(s.node for s in p.slots) for p in placement.pool("rollout")] == [
        {"n01": 8, "n02": 8},
        {"n03": 8, "n04": 8},
    ]
    head, other = placement.pool("rollout")[1].parts
    assert (head.name, head.node, head.part, head.of) == ("engine-1", "n03", 0, 2)
    assert (other.name, other.node, other.part, other.of) == ("engine-1.1", "n04", 1, 2)
    assert head.slots + other.slots == placement.pool("rollout")[1].slots and whole(other.name) == "engine-1"
    (alone,) = placement.pool("trainer")[0].parts
    assert alone is placement.pool("trainer")[0] and whole(alone.name) == alone.name


def test_nodes_asked_for_are_enough():
    for seed in range(200):
        random = Random(seed)
        tp, engine_tp = random.choice([1, 2, 4, 8, 16]), random.choice([1, 2, 4, 8, 16])
        asked = config(tp, random.randint(1, 4), random.randint(1, 6), random.randint(1, 12), engine_tp)
        try:
            allocate(asked, cluster(8, 8))
        except ConfigError as error:
            count = int(re.search(r"ask for (\d+) nodes", str(error))[1])
            allocate(asked, cluster(*[8] * count))
            with pytest.raises(ConfigError):
                allocate(asked, cluster(*[8] * (count - 1)))


@pytest.mark.parametrize(
    ("asked", "nodes", "rollout_nodes", "message"),
    [
        (
            config(8, 4, 6, 24, 8),
            cluster(*[8] * 40),
            [],
            r"need 384 slots \(trainer.tp=8 .*rollout.engines=24 .*there are 320 on 40 nodes: .*ask for 48 nodes of 8",
        ),
        (
            config(4, 1, 1, 2, 8),
            cluster(8, 8, 4),
            [],
            r"rollout pool: 1 of 2 groups of rollout.tp=8 fit .* ask for 4 nodes",
        ),
        (
            config(8, engine_tp=2, engines=9),
            cluster(8),
            cluster(8, 8, name="r"),
            r"need 18 slots \(rollout.engines=9 × tp=2 is 18\) but there are 16 on 2 nodes",
        ),
        (
            config(3, 1, 6),
            cluster(8, 8, 8, 8),
            [],
            r"trainer.tp: 3 does not divide the 8 slots .* 3 of them: .*1, 2, 4, 8",
        ),
        (config(1, 1, 1, 3, 3), cluster(8), cluster(8, 8, name="r"), r"rollout.tp: 3 does not divide the 8 slots"),
        (config(12), cluster(8, 8, 8), [], r"0 of 1 groups of trainer.tp=12 fit .* multiple of 8"),
        (
            config(1, 1, 12),
            cluster(8, 6),
            [],
            r"trainer pool: its nodes have different numbers of slots: 8 \(n00\), 6 \(n01\)",
        ),
        (config(), cluster(8, 8), cluster(8), r"pools overlap: 'n00' in the list of both"),
        (config(), [*cluster(8), *cluster(8)], [], r"'n00' more than once"),
        (config(), [], [], r"node list is empty"),
        (config(), [Node("a", ())], [], r"node a has no GPU"),
        (config(), [Node("a", (0, 0))], [], r"node a has a slot twice"),
        (
            config(2, 1, 1, 1, 2),
            cluster(8, cpus=4),
            [],
            r"node n00 gives 4 CPU cores for 5 processes: .*--cpus-per-task",
        ),
    ],
)
def test_what_cannot_be_placed_says_what_was_found_and_what_to_change(asked, nodes, rollout_nodes, message):
    with pytest.raises(ConfigError, match=message) as error:
        allocate(asked, nodes, rollout_nodes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["", "-n", "n-", "a b", "a;rm -rf /", "$(id)", "n\n", "../n", "n[1-3]", "é", "n" * 254]
)
def test_node_names_that_no_host_has_are_refused(name):
    with pytest.raises(ConfigError, match="malformed") as error:
        allocate(config(), [Node(name, (0, 1))])
    assert "\n" not in str(error.value)


def shared(*sizes, device="cuda", **changes):
    asked = config(*sizes, **changes)
    asked.machine = MachineConfig(shared=True, device=device)
    return asked


def by_slot(placement):
    """Returns the names of the processes that have each slot."""
    names = defaultdict(list)
    for process in placement.processes:
        for slot in process.slots:
            names[slot.node, slot.id].append(process.name)
    return names


def test_one_slot_is_enough_for_both_pools():
    placement = allocate(shared(), slots(1))
    assert by_slot(placement) == {("node", 0): ["trainer-0", "engine-0"]} and placement.idle == 0
    assert [p.name for p in placement.pool("controller")] == ["controller"]


def test_shared_slots_have_at_most_one_rank_of_each_pool():
    placement = allocate(shared(2, 1, 2, 2, 2), slots(4))
    assert [*by_slot(placement).values()] == [
        ["trainer-0", "engine-0"],
        ["trainer-1", "engine-0"],
        ["trainer-2", "engine-1"],
        ["trainer-3", "engine-1"],
    ]
    fewer = allocate(shared(1, 1, 4, 1, 2), slots(5))  # the larger pool has slots of its own
    assert [len(names) for names in by_slot(fewer).values()] == [2, 2, 1, 1] and fewer.idle == 1
    nodes = allocate(shared(1, 1, 8, 2, 4), cluster(4, 4))
    assert [{s.node for s in p.slots} for p in nodes.pool("rollout")] == [{"n00"}, {"n01"}]


def test_any_cluster_is_shared_as_each_pool_alone_would_be_placed():
    """The oracle: a run of trainers alone, and of engines that have the nodes for themselves."""
    placed = 0
    for seed in range(1000):
        asked, nodes, _ = random_cluster(Random(seed))
        both = replace(asked, machine=MachineConfig(shared=True, device="cuda"))
        try:
            together = allocate(both, nodes)
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 300
            continue
        trainers = allocate(replace(asked, mode="sft"), nodes)
        one = replace(asked, trainer=TrainerConfig(), machine=MachineConfig(device="cuda"))
        engines = allocate(one, cluster(1, name="t"), nodes)
        assert together.pool("trainer") == trainers.pool("trainer")
        assert together.pool("rollout") == engines.pool("rollout")
        placed += 1
    assert 300 < placed < 900


def test_too_few_slots_to_share_say_which_pool_and_disjoint_ones_that_they_can_be_shared():
    with pytest.raises(ConfigError, match=r"need 4 slots \(trainer.tp=2 × pp=1 × dp=2 is 4\) but there are 2"):
        allocate(shared(2, 1, 2), slots(2))
    with pytest.raises(ConfigError, match=r"need 4 slots \(rollout.engines=2 × tp=2 is 4\) but there are 2"):
        allocate(shared(engines=2, engine_tp=2), slots(2))
    asked = replace(config(), machine=MachineConfig(device="cuda"))
    with pytest.raises(ConfigError, match=r"there are 1: .*, or set machine.shared=true to let both pools share them$"):
        allocate(asked, slots(1))
    with pytest.raises(ConfigError) as too_few:  # sharing would not help
        allocate(replace(config(engines=2), machine=MachineConfig(device="cuda")), slots(1))
    assert "machine.shared" not in str(too_few.value)


def test_pools_with_nodes_of_their_own_cannot_share_slots():
    with pytest.raises(ConfigError, match=r"^machine.shared: this job has nodes for the engines alone"):
        allocate(shared(), cluster(1), cluster(1, name="r"))
    assert allocate(shared(mode="sft"), cluster(1), cluster(1, name="r")).pool("trainer")


def test_shared_slots_need_cores_for_the_processes_of_both_pools():
    with pytest.raises(ConfigError, match="gives 2 CPU cores for 3 processes"):
        allocate(shared(), cluster(1, cpus=2))


def test_a_table_of_many_nodes_shows_both_pools_of_shared_slots():
    lines = allocate(shared(1, 1, 16, 16, 1), cluster(8, 8)).table().splitlines()
    assert lines[0] == "2 nodes: 16 trainer ranks, 16 engines of 1; controller on n00"
    assert lines[1].split() == ["node", "trainer", "ranks", "engines"]
    assert lines[2].split() == ["n00", "0–7", "0–7"] and lines[3].split() == ["n01", "8–15", "8–15"]


@pytest.mark.parametrize("key", ["reward", "workflow"])
def test_what_an_environment_names_wrongly_is_told_by_its_own_key(key):
    named = EnvironmentConfig(name="a", train="t", **{key: "nothing"})
    with pytest.raises(ConfigError, match=rf"^environments\.0\.{key}: 'nothing' is no "):
        plan(replace(config(), environments=[named]), slots(2))
