import pytest

from areal_megatron.config import Config, ConfigError, Data, Model, Rollout, Trainer
from launch.pools import Slot, allocate


def config(tp=1, pp=1, dp=1, engines=1, engine_tp=1, mode="rl"):
    return Config(name="x", updates=1, mode=mode, model=Model(path="m"), data=Data(train="t"),
                  trainer=Trainer(tp=tp, pp=pp, dp=dp), rollout=Rollout(engines=engines, tp=engine_tp))  # fmt: skip


def slots(count):
    return [Slot("node", i) for i in range(count)]


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


def test_pools_that_do_not_fit_say_what_was_asked_and_found():
    with pytest.raises(ConfigError, match=r"need 6 slots .*trainer.tp=2.*rollout.engines=2.*there are 4"):
        allocate(config(tp=2, dp=1, engines=2, engine_tp=2), slots(4))


def test_table_names_every_process():
    table = allocate(config(dp=2), slots(3)).table()
    assert all(name in table for name in ("controller", "trainer-0", "trainer-1", "engine-0", "node:2"))
