import json
import socket
from collections import Counter

import pytest
import torch

from areal_megatron.process.files import write_json
from areal_megatron.reshard.engine_layout import EngineSizes
from areal_megatron.reshard.plan import Planner
from areal_megatron.reshard.trainer_layout import MegatronSizes
from tools.bench import reshard, reshard_device, reshard_peers

TINY = reshard_device.SMALL | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300}
TRAINERS, ENGINE = MegatronSizes(tp=2, pp=2), EngineSizes(tp=2)


def test_raw_link_carries_the_plans_bytes_as_one_message_of_each_pair():
    plan = Planner(TINY, TRAINERS, ENGINE, bucket_elements=4096).plan(1)
    buckets = [bucket for rank in range(TRAINERS.ranks) for bucket in plan.sent_by(rank)]
    elements = Counter()
    for bucket in buckets:
        elements[bucket.source, bucket.destination] += bucket.elements
    raw = reshard_peers.merged(buckets)
    assert len(raw) < len(buckets) and all(bucket.number == 0 for bucket in raw)
    assert {(bucket.source, bucket.destination): bucket.elements for bucket in raw} == elements
    received = reshard_peers.merged(bucket for rank in range(ENGINE.ranks) for bucket in plan.received_by(rank))
    assert {(b.source, b.destination): b.elements for b in received} == elements


def test_received_bytes_are_the_kernels_own_count():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            before = reshard_peers.received_bytes()
            client.sendall(bytes(12345))
            left = 12345
            while left:
                left -= len(connection.recv(left))
            assert reshard_peers.received_bytes() - before == 12345


def test_in_one_process_every_tensor_arrives_cast():
    report = reshard_device.measure(torch.device("cpu"), 2, TINY, bucket_elements=4096)
    for aim in ("pack_over_copy", "cast_over_copy", "unpack_over_copy"):
        assert report[aim] == report["figures"][aim]["median"] > 0
    assert "reshard_ms_from_float32" in reshard_device.table(report)


def test_a_tensor_that_arrives_wrong_is_noticed():
    shards = reshard_device.Shards(TINY, torch.device("cpu"), torch.float32, 4096)
    with pytest.raises(RuntimeError, match="has arrived wrong"):
        shards.check()
    shards.reshard()
    shards.check()
    shards.staged[-1].add_(1)
    shards.unpack()
    with pytest.raises(RuntimeError, match="has arrived wrong"):
        shards.check()


def test_report_has_the_medians_of_its_aims_at_the_top(tmp_path):
    def repetitions(keys, *values):
        return [dict.fromkeys(keys, value) for value in values]

    idle_keys = ("bytes_over_minimum", "speedup_over_gather_broadcast", "time_over_link_floor")
    busy_keys = ("stall_over_baseline", "commit_ms", "reprefill_ms", "generation_during_transfer")
    report = reshard.report(repetitions(idle_keys, 3, 1, 2), repetitions(busy_keys, 6, 5, 7), megabytes=1075.0)
    assert {key: report[key] for key in idle_keys} == dict.fromkeys(idle_keys, 2)
    assert {key: report[key] for key in busy_keys} == dict.fromkeys(busy_keys, 6)
    assert report["figures"]["commit_ms"] == {"median": 6, "min": 5, "max": 7}
    text = reshard.table(report)
    assert "1,075 MB" in text and "2.000 (1.000 – 3.000)   aim: at least 2.5" in text
    write_json(tmp_path / "report.json", report)
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_an_update_lasts_until_its_last_engine_computes_with_it():
    commits = [reshard.Commit(arrived=4.0, live=4.5, stall_s=0.3), reshard.Commit(5.0, 5.1, 0.2)]
    update = reshard.Update(start=1.0, began=1.5, commits=commits)
    assert (update.seconds, update.transfer_s, update.stall_s) == pytest.approx((4.1, 3.5, 0.3))
