"""The real packages of the trackers, offline: the same 20 updates, read back from what each has stored."""

import importlib.util
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest

from areal_megatron.config import TRACKERS, Config, ConfigError, TrackConfig, check
from areal_megatron.launch.supervision import mirrors
from areal_megatron.launch.supervision.mirrors import Mirrors
from areal_megatron.observe import trackers
from areal_megatron.observe.metrics import MetricsWriter
from areal_megatron.observe.mirror import Once
from areal_megatron.observe.shown_answers import HEAD, AnswersWriter, ShownAnswer
from areal_megatron.observe.trackers import check_trackers
from areal_megatron.run.folder import RunFolder
from tests.support.soaking import with_soaked
from tests.unit.page.test_report import evaluation, make_run

UPDATES = 20
HOSTILE = "<script>alert(1)</script> **x** | y\n# z\x1b[2J\u202e"
KEY = "0123456789abcdef" * 2 + "01234567"
"""As long as a key of W&B."""


def need(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {package}")


def answers(version):
    said = {"prompt": "1+1=", "answer": "2", "response": f"version {version}: {HOSTILE}"}
    hurt = ShownAnswer(prompt="", answer="", response="", score=None, correct=False, truncated=True)
    return [ShownAnswer(**said, score=version / 20, correct=version == 20, truncated=False), hurt]


def write(run, versions, shift=0.0, resumed=None):
    """Writes updates, as an incarnation of the run does."""
    writer = MetricsWriter(run)
    shown = AnswersWriter(run, writer)
    if resumed is not None:
        writer.write("resume", resumed, {"incarnation": 1})
    for v in versions:
        values = {"reward_mean": shift + v / 7, "loss": -1e-3 / v, "weight_mean/staleness_17+": 1 + v / 1000}
        writer.write("update", v, values | {"staleness_histogram": {"0": 3}, "grad_norm": None})
        if v % 10 == 0:
            shown.write(v, answers(v))
            writer.write("eval", v, evaluation(v, n=8, math=(0.9, 0.85, 0.95)))
    shown.close()
    writer.close()


def expected():
    """(version, value) by tag."""
    updates = range(1, UPDATES + 1)
    return {
        "update/reward_mean": [(v, v / 7) for v in updates],
        "update/loss": [(v, -1e-3 / v) for v in updates],
        "update/weight_mean/staleness_17+": [(v, 1 + v / 1000) for v in updates],
        "eval/math/avg@8/low": [(10, 0.85), (20, 0.85)],
    }


def mirror(run, name, *options, times=1, **environment):
    """What a process says that mirrors the run so many times."""
    code = f"from areal_megatron.observe.mirror import main; exit(any([main() for _ in range({times})]))"
    command = [sys.executable, "-c", code, str(run.folder), name, *options]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=with_soaked(("wandb", "mlflow", "swanlab", "trackio"), ("swanlab", "trackio")))
def mirrored(request, tmp_path_factory):
    """(tracker, run) whose updates 1 to 12 were mirrored before it was resumed from version 10, and then the others."""
    name = request.param
    need(*{"mlflow": ["mlflow", "sqlalchemy"], "wandb": ["wandb", "swanlab"]}.get(name, [name]))
    run = make_run(tmp_path_factory.mktemp(name), UPDATES)
    home = tmp_path_factory.mktemp("home")
    (home / ".swanlab").mkdir()
    for netrc in (home / ".netrc", home / ".swanlab" / ".netrc"):
        netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n")
        netrc.chmod(0o600)
    keys = {"WANDB_API_KEY": KEY, "SWANLAB_API_KEY": KEY, "HOME": str(home)}
    write(run, range(1, 11))
    write(run, range(11, 13))
    said = mirror(run, name, **keys)
    write(run, range(11, UPDATES + 1), resumed=10)  # as a run does that was restarted from its checkpoint of 10
    if name == "mlflow":  # whose import takes seconds
        said += mirror(run, name, times=2, **keys)
    else:
        said += mirror(run, name, **keys) + mirror(run, name, **keys)
    assert KEY not in said
    return name, run


def read_back(name, folder):
    """Returns (version, value) by tag, and the ids of the runs that the tracker knows."""
    return {"wandb": _wandb, "mlflow": _mlflow, "swanlab": _swanlab, "trackio": _trackio}[name](folder)


def _wandb(folder):
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    points, ids, last = {}, set(), -1
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(file)
            while (data := reader.scan()) is not None:
                record = wandb_internal_pb2.Record.FromString(data)
                if record.WhichOneof("record_type") == "run":
                    ids.add(record.run.run_id)
                if record.WhichOneof("record_type") != "history":
                    continue
                found = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                assert record.history.step.num > last, "W&B's server drops steps that do not grow"
                last = record.history.step.num
                for tag, value in found.items():
                    points.setdefault(tag, []).append((found["version"], value))
    return points, ids


def _mlflow(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "areal_megatron"]
    runs = client.search_runs([experiment.experiment_id])
    assert runs[0].info.status == "FINISHED" and runs[0].data.params["updates"] == str(UPDATES)
    names = {tag: tag.replace("@", ":").replace("+", " or more") for tag in expected()}
    points = {
        tag: [(m.step, m.value) for m in client.get_metric_history(runs[0].info.run_id, name)]
        for tag, name in names.items()
    }
    return points, {r.info.run_id for r in runs}


def _swanlab(folder):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    points, ids = {}, set()
    for file in sorted(folder.glob("run-*/*.swanlab"), key=lambda path: path.stat().st_mtime):
        ids.add(file.stem)
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record.FromString(data)
            for scalar in [record.scalar] if record.HasField("scalar") else []:
                points.setdefault(scalar.key, []).append((scalar.step, scalar.value.number))
        reader.close()
    return points, ids


def _trackio(folder):
    points = {}
    (file,) = folder.glob("*.db")
    with sqlite3.connect(file) as store:
        rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    for _, step, metrics in rows:
        for tag, value in json.loads(metrics).items():
            points.setdefault(tag, []).append((step, value))
    return points, {name for name, *_ in rows}


def test_a_tracker_shows_the_numbers_of_the_run_once(mirrored):
    name, run = mirrored
    points, ids = read_back(name, run.folder / "trackers" / name)
    assert {tag: sorted(points[tag]) for tag in expected()} == expected()
    assert len(ids) == 1, "a resumed run continues its curves"
    assert "update/grad_norm" not in points and "update/staleness_histogram" not in points


def test_a_tracker_shows_answers_at_each_evaluation_as_a_table(mirrored):
    name, run = mirrored
    folder = run.folder / "trackers" / name
    assert tables(name, folder) == {v: [dict(zip(HEAD, a.row, strict=True)) for a in answers(v)] for v in (10, 20)}
    assert not any(Path("mlruns").glob("*")), "nothing is written where the command was called"


def tables(name, folder):
    """Returns the rows of the tables that a tracker has, as {column: cell}, by version."""
    if name == "wandb":
        files = sorted(folder.glob("wandb/offline-run-*/files/media/table/eval/*.table.json"), key=os.path.getmtime)
        read = [json.loads(file.read_text()) for file in files]
        found = dict(zip((10, 20), read, strict=True))
    elif name == "mlflow":
        files = folder.glob("artifacts/*/artifacts/eval/answers-*.json")
        found = {int(file.stem.removeprefix("answers-")): json.loads(file.read_text()) for file in files}
    elif name == "swanlab":
        files = folder.glob("run-*/media/**/*.json")
        return {int(file.name.partition("-")[0]): json.loads(file.read_text())["rowData"] for file in files}
    else:
        (file,) = folder.glob("*.db")
        with sqlite3.connect(file) as store:
            rows = store.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        logged = [(step, json.loads(metrics).get("eval/answers")) for step, metrics in rows]
        found = {step: table["_value"] for step, table in logged if table}
        return {
            version: [{name: plain(cell) for name, cell in row.items()} for row in rows]
            for version, rows in found.items()
        }
    return {v: [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] for v, table in found.items()}


def plain(cell):
    """What Markdown shows of a block of code."""
    if not isinstance(cell, str):
        return cell
    assert all(line.startswith("    ") for line in cell.split("\n"))
    return "\n".join(line.removeprefix("    ") for line in cell.split("\n"))


def test_keys_stay_out_of_the_run_folder(mirrored):
    _, run = mirrored
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_tensorboard_shows_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html

    run = make_run(tmp_path, UPDATES)
    write(run, range(1, 11))
    write(run, range(11, UPDATES + 1))
    points, tensors = {}, []
    for file in sorted((run.folder / "tensorboard").iterdir()):
        events = EventAccumulator(str(file)).Reload()
        tensors += events.Tensors("eval/answers") if "eval/answers" in events.Tags()["tensors"] else []
        for tag in set(expected()) & set(events.Tags()["scalars"]):
            points.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    assert points.keys() == expected().keys()
    (table,) = (value for value in tensors if value.step == 20)
    cells = [cell.decode() for cell in table.tensor_proto.string_val]
    assert [dim.size for dim in table.tensor_proto.tensor_shape.dim] == [3, 4]
    shown = text_array_to_html(np.array(cells, object).reshape(3, 4), True)
    assert "<script" not in shown and "<strong>" not in shown and "&lt;script&gt;alert(1)" in shown
    assert "**x** | y\n# z\\x1b[2J\\u202e" in shown
    for tag, values in expected().items():
        assert sorted(points[tag]) == [(v, pytest.approx(value, rel=1e-6)) for v, value in values]


@pytest.mark.parametrize("mirrored", ["mlflow"], indirect=True)
def test_the_page_of_mlflow_serves_the_run(mirrored):
    name, run = mirrored
    need("flask")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = f"sqlite:///{run.folder / 'trackers' / 'mlflow' / 'mlflow.db'}"
    server = subprocess.Popen(
        [sys.executable, "-m", "flask", "--app", "mlflow.server", "run", "--host", "127.0.0.1", "--port", str(port)],
        env=os.environ | {"_MLFLOW_SERVER_FILE_STORE": store, "_MLFLOW_SERVER_ARTIFACT_ROOT": str(run.folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        page = ask(f"http://127.0.0.1:{port}/", deadline=time.monotonic() + 60)
        assert b"<title>MLflow</title>" in page
        body = json.dumps({"experiment_ids": ["1"], "max_results": 10}).encode()
        found = json.loads(ask(f"http://127.0.0.1:{port}/api/2.0/mlflow/runs/search", body))
        latest = {metric["key"]: metric["value"] for metric in found["runs"][0]["data"]["metrics"]}
        assert latest["update/reward_mean"] == UPDATES / 7
        said = mirror(run, name, "--online", MLFLOW_TRACKING_URI=f"http://user:{KEY}@127.0.0.1:{port}")
        found = json.loads(ask(f"http://127.0.0.1:{port}/api/2.0/mlflow/runs/search", body))["runs"]
        assert len(found) == 2, "what was kept locally is sent whole, as another run"
        assert [{m["key"]: m["value"] for m in run["data"]["metrics"]} for run in found] == [latest, latest]
        assert KEY not in said
    finally:
        server.kill()
        server.wait()


def ask(address, body=None, deadline=0.0):
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    while True:
        try:
            return urllib.request.urlopen(request, timeout=20).read()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_what_is_done_again_is_shown_once():
    def line(kind, version):
        return {"kind": kind, "version": version}

    lines = [line("update", 1), line("eval", 1), line("update", 2), line("update", 3), line("resume", 1)]
    lines += [line("update", 2), line("update", 3), line("update", 4), line("eval", 4), line("resume", -1)]
    lines += [line("update", 4), line("update", 5), line("update", 5)]
    once = Once({}, {})
    shown = [
        (record["kind"], record["version"]) for record in lines if once.takes(record) and record["kind"] != "resume"
    ]
    again = [("update", 4), ("eval", 4), ("update", 5), ("update", 5)]
    assert shown == [("update", 1), ("eval", 1), ("update", 2), ("update", 3), *again]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("wnadb", "did you mean 'wandb'"),
        ("excel", "expected some of wandb"),
        ("wandb,wandb", "twice"),
        ("wandb,", "''"),
    ],
)
def test_a_tracker_of_another_name(value, problem):
    config = Config(name="run", updates=1)
    config.model.path, config.data.train, config.track.to = "model", "data", value
    with pytest.raises(ConfigError, match=r"^track.to: ") as error:
        check(config)
    assert problem in str(error.value)


def test_a_tracker_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    said = "^track.to: mlflow is not installed: pip install mlflow-skinny sqlalchemy alembic$"
    with pytest.raises(ConfigError, match=said):
        check_trackers(TrackConfig(to="mlflow"))


def test_a_folder_that_a_tracker_has_left_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "wandb" / "run-20261130-1").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ConfigError, match=r"^track.to: wandb is not installed"):
        check_trackers(TrackConfig(to="wandb"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user that is not known")
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_user_without_a_home_has_a_key_in_the_environment_or_none(name):
    code = (
        "import os, sys; from importlib.machinery import ModuleSpec; from areal_megatron.observe import trackers\n"
        "trackers.importlib.util.find_spec = lambda name: ModuleSpec(name, None, origin=name)\n"
        "os.setuid(54321); track = trackers.TrackConfig(to=sys.argv[1], online=True)\n"
        "try: trackers.check_trackers(track)\n"
        "except trackers.ConfigError as e: print('no key' in str(e))\n"
        "os.environ[f'{sys.argv[1].upper()}_API_KEY'] = 'key'; trackers.check_trackers(track)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name], env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "True\n" and done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_without_a_key(name, monkeypatch, tmp_path):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=name))
    for variable in [v for v in os.environ if v.startswith(("WANDB", "SWANLAB", "MLFLOW", "TRACKIO"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path))
    check_trackers(TrackConfig(to=name))
    with pytest.raises(ConfigError, match=rf"^track.online: {name} has no (key|server): .*track.online=false$"):
        check_trackers(TrackConfig(to=name, online=True))
    given = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY", "mlflow": "MLFLOW_TRACKING_URI"}
    monkeypatch.setenv(given.get(name, "TRACKIO_SERVER_URL"), KEY)
    check_trackers(TrackConfig(to=name, online=True))


def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path):
    need("mlflow")
    run = make_run(tmp_path, UPDATES)
    server = {"MLFLOW_TRACKING_URI": f"http://user:{KEY}@127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    command = [sys.executable, "-m", "areal_megatron.observe.mirror", str(run.folder), "mlflow", "--online"]
    done = subprocess.run(command, env=os.environ | server, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1 and "error: mlflow: " in done.stderr and "127.0.0.1" in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert trackers.without_secrets(f"https://host/?write_token={KEY}&b=1") == "https://host/?write_token=…&b=1"


def test_a_key_in_netrc(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=name))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    check_trackers(TrackConfig(to="wandb", online=True))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    with pytest.raises(ConfigError, match="no key"):
        check_trackers(TrackConfig(to="wandb", online=True))


def stand_in(tmp_path, monkeypatch, body):
    """Has `wandb` be a module with this `init`, in the processes that a launcher starts."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(
        f"import time, types\nSettings = dict\ndef init(**_):\n    {body}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'packages'}:{os.environ.get('PYTHONPATH', '')}")


def test_a_tracker_that_dies_is_named_once(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "my runs", UPDATES)
    stand_in(tmp_path, monkeypatch, "raise RuntimeError('the server said no')")
    started = Mirrors(run, ["wandb"], 0)
    while started._processes["wandb"].poll() is None:
        started.look()
        time.sleep(0.1)
    started.look()
    started.look()
    started.close(wait=True)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "tracker wandb has ended with exit code 1" in said
    assert said.endswith(f"areal mirror '{run.folder}' wandb\n"), "it can be given to a shell as it stands"
    assert "the server said no" in run.log("tracker-wandb").read_text()


def test_a_tracker_that_hangs_is_ended(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path, UPDATES)
    stand_in(tmp_path, monkeypatch, "time.sleep(1000)")
    monkeypatch.setattr(mirrors, "END_S", 0.5)
    started = Mirrors(run, ["wandb"], 0)
    began = time.monotonic()
    started.look()
    started.close(wait=True)
    assert time.monotonic() - began < 10 and started._processes["wandb"].returncode == -9
    assert "has not taken everything" in capsys.readouterr().err


def test_a_mirror_of_a_launcher_that_is_gone_ends(tmp_path, monkeypatch):
    """It hangs in its tracker, and notices all the same."""
    run = make_run(tmp_path, UPDATES)
    stand_in(tmp_path, monkeypatch, "time.sleep(1000)")
    code = "from areal_megatron.observe import mirror; mirror.END_S = 0.5; mirror.main()"
    command = [sys.executable, "-c", code, str(run.folder), "wandb", "--follow"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "not taken everything within" in said


def test_a_mirror_of_a_run_that_was_started_again_writes_nothing_more(tmp_path):
    run = make_run(tmp_path, UPDATES)
    (run.leases / "00002.json").write_text(json.dumps({"launcher": "another"}))
    command = [sys.executable, "-m", "areal_megatron.observe.mirror", str(run.folder), "trackio", "--lease", "1"]
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed: pip install trackio")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Replaced" in done.stderr
    assert not list((run.folder / "trackers").glob("*.json"))


def test_no_run(tmp_path):
    command = [sys.executable, "-m", "areal_megatron.observe.mirror", str(tmp_path / "none"), "wandb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert RunFolder(tmp_path / "none").folder.exists() is False
