"""Runs from Python, a script or a notebook: the programs of the command `areal`, as objects.

    import areal_megatron as areal

    def short(prompt, response, answer):
        return -float(len(response))

    run = areal.Run("configs/tiny_cpu.yaml", name="short", updates=20, reward={"function": short})
    run.start()
    for line in run.metrics():
        print(line["version"], line["reward_mean"])
    run.wait()

Imports neither torch nor vllm.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import json
import numbers
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from areal_megatron.api.functions import import_path
from areal_megatron.checkpoint.folder import complete, held
from areal_megatron.command import COMMANDS
from areal_megatron.config import Config, ConfigError, config_file
from areal_megatron.observe.metrics import MetricsReader, read_status
from areal_megatron.observe.status import Status
from areal_megatron.process import lifeline
from areal_megatron.run.folder import RunError, RunFolder

_POLL_S = 0.2
_KEPT_LINES = 50
"""Lines of a program that an error may show."""
_WRONG_INPUT, _STOPPED = 2, 75
_STARTED = re.compile(r"^started (.+?) for ", re.MULTILINE)
"""What `areal engines add` says once it has names for its engines."""
_END_S = 60.0


class RunFailed(RunError):
    """A program has failed: the message is the last line that it has printed."""


def load(config: str | Path, **keys: Any) -> Config:
    """Returns the config of a YAML file with other values for some keys, as `Run` takes them. Raises ConfigError."""
    return config_file.load(_path(config), [*_overrides(keys, _unmoved)])


class Run:
    """A run and its folder: to be started, or started before, here or elsewhere.

    `config` is a YAML file, or a Config that `load` has returned. `keys` override its keys: `updates=20`, or a whole
    section, `rollout={"max_staleness": 2}`. In place of a function's import path the function itself may stand
    (docs/python.md). Raises ConfigError for what is wrong with config, keys and functions.
    """

    def __init__(self, config: str | Path | Config, **keys: Any):
        self._paths: list[str] = []
        self._program_of_run: _Program | None = None
        self._at = Path.cwd()
        with tempfile.TemporaryDirectory(prefix="areal-") as folder:
            file = _file_of(config, _placeholder, Path(folder))
            try:
                plain = config_file.load(file, [*_overrides(keys, _placeholder)])
            except ConfigError as e:  # of a Config the key says where it is
                raise ConfigError(re.sub(rf"^{re.escape(folder)}\S*: ", "", str(e))) from None
        self.folder = (self._at / plain.run_dir).absolute()
        """Where the run is, or will be."""
        self._beside = self.folder.with_name(re.sub(r"[:\s]", "_", f"{self.folder.name}-python"))
        self._config = _file_of(config, self._moved, self._beside)
        self._overrides = [*_overrides(keys, self._moved)]
        self.config: Config = config_file.load(self._config, self._overrides)
        self.engines = RunEngines(self.folder, self._program)
        """Those that join and leave while the run goes on."""

    def start(self, *options: str, quiet: bool = False, tied: bool = False) -> None:
        """Starts the run on this machine, or resumes it, and returns when it has begun.

        `options`: for `areal train`, such as "--restarts=1". The run's progress is printed, unless `quiet`. It
        goes on after the end of this process, unless it is `tied` to it. Raises ConfigError for wrong input, RunFailed
        if the run ends before it begins, and RunError if this object has started it already.
        """
        if self.is_running:
            raise RunError(f"{self.folder} has been started by this object already, and is running")
        before = self._starts()
        started = self._program(
            "train", str(self._config), *self._overrides, *options, quiet=quiet, tied=tied, stays=True
        )
        self._program_of_run = started
        while self._starts() == before and started.is_running:
            time.sleep(_POLL_S)
        if not started.is_running:
            started.wait()

    def submit(self, *options: str) -> str:
        """Has Slurm start the run: `options` are for `areal submit`, such as "--nodes=2", "--gpus=8". Returns what
        the program says. Raises ConfigError or RunFailed."""
        return self._program("submit", str(self._config), *self._overrides, *options, quiet=True).wait()

    def wait(self, timeout_s: float | None = None) -> Status:
        """Returns the last status when the run, started by this object, has ended or was stopped.

        Raises RunFailed if it failed, ConfigError for wrong input, TimeoutError after `timeout_s` seconds, and RunError
        if this object has not started it.
        """
        if self._program_of_run is None:
            raise RunError(f"{self.folder} was not started by this object")
        self._program_of_run.wait(timeout_s)
        return self.status

    def stop(self) -> None:
        """Asks the run to save a checkpoint and to end. Raises RunError if there is none."""
        if not self._starts():
            raise RunError(f"{self.folder} is no run that has begun")
        RunFolder(self.folder).stop.touch()

    def kill(self) -> None:
        """Ends the run that this object has started, at once, without a checkpoint."""
        if self._program_of_run:
            self._program_of_run.end()

    @property
    def is_running(self) -> bool:
        """Whether the run that this object has started goes on."""
        return self._program_of_run is not None and self._program_of_run.is_running

    @property
    def status(self) -> Status:
        """What the run is doing now."""
        return read_status(RunFolder(self.folder))

    def metrics(self, kind: str = "") -> Iterator[dict[str, Any]]:
        """Yields the lines of metrics.jsonl of a kind (docs/metrics.md), from the first one on, as they are written: by
        default of updates, or of steps in supervised modes.

        It ends with the run if this object has started it, otherwise after the newest line. Updates that are made again
        after a resume come again.
        """
        reader, kind = MetricsReader(RunFolder(self.folder)), kind or self._kind
        running = True
        while running:
            running = self.is_running
            yield from (line for line in reader.new() if line["kind"] == kind)
            if running:
                time.sleep(_POLL_S)

    def evaluate(self, *arguments: str, out: str | Path | None = None, quiet: bool = False) -> dict[str, Any]:
        """Returns the figures of an evaluation of the run's model: what `areal evaluate` writes as result.json.

        `arguments`: for `areal evaluate` after the run's folder, such as a file and "--n=8". `out`: a new folder
        for result and answers, which are not kept without it. Raises ConfigError or RunFailed.
        """
        with tempfile.TemporaryDirectory(prefix="areal-") as folder:
            made = Path(out or Path(folder, "evaluation")).absolute()
            self._program("evaluate", str(self.folder), *arguments, f"--out={made}", quiet=quiet).wait()
            return json.loads((made / "result.json").read_text(encoding="utf-8"))

    def export(self, out: str | Path, version: int | None = None) -> Path:
        """Writes the Hugging Face folder of a checkpoint, by default of the newest. Raises ConfigError or RunFailed."""
        name = f"version-{version:06d}" if version is not None else ""
        saved = complete(RunFolder(self.folder)) if self._starts() else []
        found = [path for path in saved if name in ("", path.name)]
        if not found:
            has = ", ".join(path.name for path in saved) or "none"
            raise ConfigError(f"{self.folder} has no checkpoint {name or 'yet'}, there are: {has}")
        with held(found[-1]):  # also until the program reads it
            self._program("convert", "to-hf", str(found[-1]), str(out), quiet=True).wait()
        return Path(out)

    @property
    def _kind(self) -> str:
        return self.config.mode if self.config.is_supervised else "update"

    def _starts(self) -> int:
        """Returns how often the run has been started."""
        with suppress(OSError, ConfigError):
            return len(RunFolder(self.folder).starts())
        return 0

    def _moved(self, function: Callable) -> str:
        """Returns the import path of a function, for processes of the run."""
        path, folder = import_path(function, self._beside)
        self._paths += [str(folder)] if folder else []
        return path

    def _program(self, name: str, *arguments: str, quiet: bool, tied: bool = False, stays: bool = False) -> _Program:
        return _Program(name, arguments, self._paths, self._at, quiet, tied, stays)


class RunEngines:
    """What `areal engines` does, for one run, which may have been started elsewhere: `run.engines`. Their state is in
    `run.status.engines`.
    """

    def __init__(self, run: Path, program: Callable[..., _Program]):
        self._run, self._program = str(run), program

    def add(self, *options: str, quiet: bool = False) -> AddedEngines:
        """Starts engines on this machine for the run, and returns when they have names; they join when they are ready.

        `options`: for `areal engines add`, such as "--count=1". What their launcher says is printed, unless
        `quiet`. They go on after the end of this process, until the run is over. Raises ConfigError or RunFailed.
        """
        launcher = self._program("engines", "add", self._run, *options, quiet=quiet, stays=True)
        while not (said := _STARTED.search(launcher.last_lines)) and launcher.is_running:
            time.sleep(_POLL_S)
        said = said or _STARTED.search(launcher.wait())
        assert said is not None  # a launcher of engines that did not fail has said it
        return AddedEngines(said[1].split(", "), launcher)

    def drain(self, *arguments: str) -> None:
        """Has engines answer what they have been asked and leave; returns when they have.

        `arguments`: for `areal engines drain` after the run's folder, such as "engine-1". Raises ConfigError or
        RunFailed.
        """
        self._program("engines", "drain", self._run, *arguments, quiet=True).wait()


class AddedEngines:
    """The engines of one call of `RunEngines.add`, and the launcher that looks after them."""

    def __init__(self, names: list[str], launcher: _Program):
        self.names, self._launcher = names, launcher

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when all have been drained, or the run is over. Raises RunFailed or ConfigError if one has failed for
        good, and TimeoutError."""
        self._launcher.wait(timeout_s)

    def kill(self) -> None:
        """Ends them at once; their answers begin again elsewhere."""
        self._launcher.end()


class _Program:
    """A program of the command `areal` that runs. A thread keeps its last lines, and prints all unless `quiet`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        paths: Sequence[str],
        at: Path,
        quiet: bool,
        tied: bool = False,
        stays: bool = False,
    ):
        """`paths`: further folders of modules; `at`: the current folder; `tied`: it ends when this process does;
        `stays`: it goes on when a cell of a notebook is interrupted."""
        path = os.pathsep.join([*dict.fromkeys(paths), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._quiet = quiet
        held, self._lifeline = cast(tuple[int | None, int | None], os.pipe() if tied else (None, None))
        environment = ({"PYTHONPATH": path} if path else {}) | ({lifeline.DESCRIPTOR: str(held)} if tied else {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", COMMANDS[name].module, *arguments],
            cwd=at,
            env=os.environ | environment,
            pass_fds=[] if held is None else [held],
            # then a Ctrl-C, or what Jupyter sends to interrupt a cell, reaches this process alone
            start_new_session=tied or (stays and hasattr(builtins, "__IPYTHON__")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        if held is not None:
            os.close(held)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def last_lines(self) -> str:
        return "\n".join(self._lines.copy())

    def wait(self, timeout_s: float | None = None) -> str:
        """Returns the last lines once it has ended. Raises ConfigError for wrong input, RunFailed if it has failed, and
        TimeoutError."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not ended within {timeout_s:g} s") from None
        self._reader.join()
        if code in (0, _STOPPED):
            return self.last_lines
        errors = [line.removeprefix("error: ") for line in self._lines if line.startswith("error: ")]
        last = (errors or [line for line in self._lines if line] or [f"exit code {code}"])[-1]
        raise (ConfigError if code == _WRONG_INPUT else RunFailed)(last)

    def end(self) -> None:
        if self.is_running:
            self.process.terminate()  # a launcher ends all that it has started
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.rstrip())
            if not self._quiet:
                with suppress(OSError, ValueError):  # nobody looks any more; the program is not to wait for that
                    print(line, end="", flush=True)


def _path(config: Any) -> Path:
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config: must be the path of a YAML file, is {type(config).__name__}")
    return Path(config)


def _file_of(config: str | Path | Config, moved: Callable[[Callable], str], folder: Path) -> Path:
    """Returns the YAML file of a config: its own, or one in `folder`, with import paths in place of functions. Raises
    ConfigError for what is no key or has no value that a key may have."""
    if not isinstance(config, Config):
        return _path(config).absolute()
    made = copy.deepcopy(config)
    _move_functions(made, moved, "")
    folder.mkdir(parents=True, exist_ok=True)
    config_file.save(made, folder / "config.yaml")
    return folder / "config.yaml"


def _move_functions(section: Any, moved: Callable[[Callable], str], before: str) -> None:
    names = [field.name for field in dataclasses.fields(section)]
    if more := sorted(vars(section).keys() - set(names)):
        key = f"{before}{more[0]}"
        raise ConfigError(f"unknown key {key!r}, did you mean {config_file.nearest(key)!r}?")
    for name in names:
        value = getattr(section, name)
        for each in value if isinstance(value, list) else [value]:
            if dataclasses.is_dataclass(each):
                _move_functions(each, moved, f"{before}{name}.")
        if callable(value):
            setattr(section, name, moved(value))


def _overrides(keys: Mapping[str, Any], moved: Callable[[Callable], str], before: str = "") -> Iterator[str]:
    """Yields `key=value` for each key. Raises ConfigError for a value that no key has."""
    for key, value in keys.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _overrides(value, moved, f"{name}.")
        elif callable(value):
            yield f"{name}={moved(value)}"
        elif value is None:
            yield f"{name}="
        elif isinstance(value, bool):
            yield f"{name}={json.dumps(value)}"
        elif isinstance(value, numbers.Real):
            yield f"{name}={value}"
        elif isinstance(value, str | os.PathLike):
            yield f"{name}={json.dumps(os.fspath(value), ensure_ascii=False)}"
        else:
            raise ConfigError(f"{name}: must be a text, a number, a function or a section, is {type(value).__name__}")


def _placeholder(function: Callable) -> str:
    """Returns a path for as long as it is not known where the run is, and so what stands beside it."""
    return f"of:{getattr(function, '__name__', 'function')}"


def _unmoved(function: Callable) -> str:
    name = getattr(function, "__name__", repr(function))
    raise ConfigError(f"{name}: functions are given to areal_megatron.Run, not to load")
