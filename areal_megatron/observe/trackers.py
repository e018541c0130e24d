"""Trackers that show a run's metrics elsewhere: W&B, MLflow, SwanLab and Trackio, behind one interface.

Each keeps what it writes in the run folder, or sends it to its server. Keys are found where each tracker's own tools
look for them, in the environment or in a file in the user's home, and are never passed on. A tracker's package is
imported when it is opened, never before.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from areal_megatron.config import ConfigError, TrackConfig
from areal_megatron.observe.metrics import as_markdown
from areal_megatron.run.extras import EXTRAS


class Tracker(Protocol):
    """A run in a tracker; `id` is by what the tracker knows it."""

    id: str

    def log(self, number: int, time: float, version: int, values: Mapping[str, float]) -> None:
        """Adds the numbers of line `number` of metrics.jsonl, written at `time` (seconds since the epoch). `version` is
        the x axis. Raises whatever the tracker does."""

    def table(self, number: int, version: int, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table to those numbers, `name` of version `version`: names of columns, and cells that are texts or
        numbers, or None. Texts are shown as they are. Raises whatever the tracker does."""

    def close(self) -> None:
        """Returns when everything is written or sent."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker has to know of a run to begin or continue its curves."""

    id: str
    """Drawn by us for a new run; or what a tracker has called the run when it was opened before."""
    is_new: bool
    name: str
    project: str
    folder: Path
    """Where to write, inside the run folder."""
    online: bool
    settings: Mapping[str, Any]
    """The run's config, by dotted keys."""


class _WandB:
    def __init__(self, tracked: TrackedRun):
        import wandb

        self.id = tracked.id
        self._run = wandb.init(
            id=tracked.id,
            resume="allow",
            name=tracked.name,
            project=tracked.project,
            dir=tracked.folder,
            mode="online" if tracked.online else "offline",
            config=dict(tracked.settings),
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,  # command line, user, host
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def log(self, number: int, time: float, version: int, values: Mapping[str, float]) -> None:
        # Its own step must grow, also over incarnations and in files that are uploaded later: versions do not.
        self._run.log({**values, "version": version, "_timestamp": time}, step=number)

    def table(self, number: int, version: int, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import wandb

        self._run.log({name: wandb.Table(columns=list(head), data=[list(row) for row in rows])}, step=number)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, tracked: TrackedRun):
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # MLFLOW_TRACKING_URI may hold a password
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(None if tracked.online else f"sqlite:///{tracked.folder / 'mlflow.db'}")
        own = "" if tracked.online else (tracked.folder / "artifacts").absolute().as_uri()
        if not tracked.is_new:
            self.id = tracked.id
            known = self._client.update_run(self.id, status="RUNNING") or self._client.get_run(self.id)
            self._keeps_tables = (known.info.artifact_uri or "").startswith(own)
            return
        self._keeps_tables = True
        experiment = self._client.get_experiment_by_name(tracked.project)
        where = experiment.experiment_id if experiment else self._client.create_experiment(tracked.project, own or None)
        self.id = self._client.create_run(where, run_name=tracked.name).info.run_id
        shown = [Param(name, str(value)[:500]) for name, value in tracked.settings.items()]
        for begin in range(0, len(shown), 100):  # the most that one request may have
            self._client.log_batch(self.id, params=shown[begin : begin + 100])

    def log(self, number: int, time: float, version: int, values: Mapping[str, float]) -> None:
        metrics = [self._metric(_mlflow_name(name), value, int(time * 1000), version) for name, value in values.items()]
        for begin in range(0, len(metrics), 1000):
            self._client.log_batch(self.id, metrics[begin : begin + 1000])

    def table(self, number: int, version: int, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        if not self._keeps_tables:  # their folder was that of the run before it was moved
            return
        table = {"columns": list(head), "data": [list(row) for row in rows]}
        self._client.log_dict(self.id, table, f"{name}-{version:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self.id)


class _SwanLab:
    def __init__(self, tracked: TrackedRun):
        import swanlab

        self.id = tracked.id
        self._swanlab = swanlab
        swanlab.init(
            id=tracked.id,
            resume="allow",
            name=tracked.name,
            project=tracked.project,
            log_dir=str(tracked.folder),
            mode="online" if tracked.online else "offline",
            config=dict(tracked.settings),
            settings=swanlab.Settings(
                interactive=False,
                probe=swanlab.Settings.Probe(
                    monitor=False, hardware=False, runtime=False, requirements=False, git=False
                ),
                terminal=swanlab.Settings.Terminal(proxy_type="none"),
            ),
        )

    def log(self, number: int, time: float, version: int, values: Mapping[str, float]) -> None:
        self._swanlab.log(dict(values), step=version)

    def table(self, number: int, version: int, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        table = self._swanlab.echarts.Table().add(list(head), [list(row) for row in rows])
        self._swanlab.log({name: table}, step=version)

    def close(self) -> None:
        self._swanlab.finish()


class _Trackio:
    def __init__(self, tracked: TrackedRun):
        if not tracked.online:
            os.environ["TRACKIO_DIR"] = str(tracked.folder)  # read when the package is imported
            for name in _TRACKIO_SERVERS:
                os.environ.pop(name, None)
        import trackio

        self.id = tracked.id
        self._run = trackio.init(
            project=tracked.project,
            name=f"{tracked.name}-{tracked.id[:8]}",  # it knows runs by their names
            resume="allow",
            config=dict(tracked.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, number: int, time: float, version: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=version)

    def table(self, number: int, version: int, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        import trackio

        cells = [[as_markdown(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
        self._run.log({name: trackio.Table(columns=list(head), data=cells)}, step=version)

    def close(self) -> None:
        self._run.finish()


_TRACKIO_SERVERS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_OPENERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": _WandB,
    "mlflow": _MLflow,
    "swanlab": _SwanLab,
    "trackio": _Trackio,
}


def open_tracker(name: str, tracked: TrackedRun) -> Tracker:
    """Begins or continues a run in a tracker. Raises whatever the tracker does."""
    for folder in (tracked.folder.parent, tracked.folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    return _OPENERS[name](tracked)


def check_trackers(track: TrackConfig) -> None:
    """Raises ConfigError if a tracker of the config is not installed or, online, has no key or no server."""
    for name in track.names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name: W&B keeps its files in one where it was used
            raise ConfigError(f"track.to: {name} is not installed: pip install {' '.join(EXTRAS[name])}")
        if track.online and (missing := _missing(name)):
            raise ConfigError(
                f"track.online: {name} has {missing}, or keep what it shows local with track.online=false"
            )


def _missing(name: str) -> str:
    """What a tracker lacks to reach its server, and the cure; "" if nothing."""
    if name == "wandb":
        host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        file = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # Path.home raises where there is none
        known = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or _has_key(file, host)
        return "" if known else "no key: set WANDB_API_KEY or run `wandb login`"
    if name == "swanlab":
        home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or os.path.expanduser("~/.swanlab")
        known = os.environ.get("SWANLAB_API_KEY") or _has_key(Path(home) / ".netrc")
        return "" if known else "no key: set SWANLAB_API_KEY or run `swanlab login`"
    if name == "mlflow":
        return "" if os.environ.get("MLFLOW_TRACKING_URI") else "no server: set MLFLOW_TRACKING_URI"
    known = any(os.environ.get(server) for server in _TRACKIO_SERVERS)
    return "" if known else f"no server: set {' or '.join(_TRACKIO_SERVERS)}"


def _has_key(file: Path, host: str = "") -> bool:
    """Whether a netrc file has a password for the host; for any if none is given."""
    try:
        hosts = netrc.netrc(file).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return host in hosts if host else bool(hosts)


def without_secrets(text: str) -> str:
    """Returns what a tracker says without the users, passwords and tokens in addresses of servers."""
    return re.sub(r"(?i)((?:token|key|password)=)[^&\s'\"]+", r"\1…", re.sub(r"//[^/@\s]+@", "//", text))


def _mlflow_name(name: str) -> str:
    """The name of a metric with what MLflow does not allow in it replaced: `avg@8` becomes `avg:8`."""
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", ":").replace("+", " or more"), flags=re.ASCII)
