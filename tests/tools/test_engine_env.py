"""Environments of engines: what is built, in which order, what an interruption leaves, and what is kept.

pip is a fake that notes what it is asked for; the virtual environments are real ones, without pip.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import engine_env
from engine_env import BuildError, Engine, Environment

ROOT = Path(__file__).resolve().parents[2]


class FakePip:
    """Stands in for `engine_env.run_pip`.

    Attributes:
        calls: What it was asked for since they were last taken.
        interrupted_at: Ends with a KeyboardInterrupt, half-way, when asked for this; nothing if empty.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.interrupted_at = ""

    def __call__(self, _python: Path, *arguments: str) -> None:
        self.calls.append(arguments)
        target = Path(arguments[arguments.index("--target") + 1]) if "--target" in arguments else None
        if target:
            target.mkdir(parents=True)
            (target / "half").touch()
        if self.interrupted_at in arguments:
            raise KeyboardInterrupt
        if target:
            (target / "half").unlink()
            name, _, version = arguments[-1].partition("==")
            (target / f"{name}-{version}.dist-info").mkdir()
            (target / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    def take(self) -> list[tuple[str, ...]]:
        """The calls, and forget them."""
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("KVCACHE_OTEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """pip, and virtual environments that need none."""
    create = venv.create
    monkeypatch.setattr(engine_env.venv, "create", lambda folder, **_: create(folder, with_pip=False, symlinks=True))
    fake = FakePip()
    monkeypatch.setattr(engine_env, "run_pip", fake)
    return fake


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tools, with stand-ins that can be told when they are called."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "stand_ins.py").write_text("def install():\n    import sys; sys.stood_in = 1\n")
    monkeypatch.setattr(engine_env, "TOOLS", folder)
    return folder


@pytest.fixture
def engine(tools: Path, tmp_path: Path) -> Engine:
    """An engine with everything that an engine can have. Its module is one that every Python has."""
    assert tools
    seen = f"print(sys.stood_in, os.environ['PYTHONPATH'], file=open({str(tmp_path / 'warm')!r}, 'a'))"
    return Engine(
        version="2.0",
        module="json",
        requirements=("torch==1", "one"),
        bare=("engine=={version}", "two"),
        older={"1.8": ("three<3", "engine=={version}"), "1.9": ("engine=={version}",)},
        stubs="stand_ins",
        warm_up=f"import os, sys; assert not sys.dont_write_bytecode; {seen}",
        needs="a compiler",
    )


def _older(env: Environment, version: str, *requirements: str) -> tuple[str, ...]:
    return ("install", "--no-deps", "--no-compile", "--target", str(env.older_folder(version)), *requirements)


def _ran(env: Environment, program: str, **variables: str) -> str:
    command = [env.python, "-c", program]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | variables
    ).stdout.strip()


def test_everything_is_built_in_order(pip: FakePip, engine: Engine, cache: Path) -> None:
    env = Environment("engine", engine, "2.0")
    assert not env.is_ready()
    assert engine_env.ensure(env) == cache / "engine-2.0" / "bin" / "python"
    assert env.is_ready()

    bare, requirements, first, second, project = pip.take()
    assert bare == ("install", "--no-deps", "engine==2.0", "two")
    assert requirements == ("install", "torch==1", "one")
    assert first == _older(env, "1.8", "three<3", "engine==1.8")
    assert second == _older(env, "1.9", "engine==1.9")
    assert project[-2:] == ("--editable", str(ROOT))


def test_an_engine_without_more_takes_one_run_of_pip(pip: FakePip) -> None:
    env = Environment("engine", Engine(version="2.0", module="json", requirements=("engine=={version}",)), "2.0")
    engine_env.ensure(env)
    assert [call[:2] for call in pip.take()] == [("install", "engine==2.0"), ("install", "hypothesis")]
    assert not (env.folder / "versions").exists()
    assert not list(env.site_packages.glob("*.pth"))


def test_what_is_complete_is_not_built_again(pip: FakePip, engine: Engine) -> None:
    engine_env.ensure(Environment("engine", engine, "2.0"))
    pip.take()
    engine_env.ensure(Environment("engine", engine, "2.0"))
    assert pip.take() == []


@pytest.mark.parametrize(
    ("interrupted_at", "done", "due"),
    [("engine==2.0", 0, 5), ("torch==1", 0, 5), ("engine==1.8", 2, 3), ("engine==1.9", 3, 2), ("--editable", 4, 1)],
)
def test_an_interrupted_stage_does_not_pass_for_a_finished_one(
    interrupted_at: str, done: int, due: int, pip: FakePip, engine: Engine
) -> None:
    env = Environment("engine", engine, "2.0")
    pip.interrupted_at = interrupted_at
    with pytest.raises(KeyboardInterrupt):
        engine_env.ensure(env)
    assert not env.is_ready()
    interrupted = pip.take()

    pip.interrupted_at = ""
    engine_env.ensure(env)
    assert env.is_ready()
    again = pip.take()
    assert len(again) == due
    assert again[0] == interrupted[done]
    assert not list(env.folder.glob("versions/*/half"))


def test_a_version_whose_recipe_changed_is_unpacked_again_and_nothing_else(pip: FakePip, engine: Engine) -> None:
    env = Environment("engine", engine, "2.0")
    engine_env.ensure(env)
    pip.take()
    (env.older_folder("1.9") / "leftover").touch()

    changed = dataclasses.replace(engine, older={**engine.older, "1.9": ("four", "engine=={version}")})
    env = Environment("engine", changed, "2.0")
    engine_env.ensure(env)
    assert pip.take() == [_older(env, "1.9", "four", "engine==1.9")]
    assert not (env.older_folder("1.9") / "leftover").exists()


def test_a_new_recipe_of_the_engine_takes_its_older_versions_with_it(pip: FakePip, engine: Engine) -> None:
    engine_env.ensure(Environment("engine", engine, "2.0"))
    pip.take()
    engine_env.ensure(Environment("engine", dataclasses.replace(engine, bare=("engine=={version}",)), "2.0"))
    assert len(pip.take()) == 5


def test_an_older_version_is_found_first_with_its_metadata(pip: FakePip, engine: Engine) -> None:
    env = Environment("engine", engine, "2.0")
    engine_env.ensure(env)
    engine_env.declare_distribution(env.site_packages, "engine", "2.0")
    program = "from importlib.metadata import version; print(version('engine'))"
    assert _ran(env, program) == "2.0"
    assert _ran(env, program, PYTHONPATH=str(env.older_folder("1.8"))) == "1.8"
    assert _ran(env, "import sys; print(sys.prefix)") == str(env.older_folder("1.8").parents[1])


def test_an_older_version_is_not_kept_beside_itself(pip: FakePip, engine: Engine) -> None:
    env = Environment("engine", engine, "1.9")
    engine_env.ensure(env)
    assert [path.name for path in (env.folder / "versions").iterdir()] == ["1.8"]
    assert ("install", "--no-deps", "engine==1.9", "two") in pip.take()


def test_stand_ins_are_there_in_every_process(pip: FakePip, engine: Engine) -> None:
    assert pip
    env = Environment("engine", engine, "2.0")
    engine_env.ensure(env)
    assert _ran(env, "import sys; print(sys.stood_in)") == "1"
    child = "import subprocess, sys; subprocess.run([sys.executable, '-I', '-c', 'import sys; print(sys.stood_in)'])"
    assert _ran(env, child) == "1"
    assert len(list(env.site_packages.glob("__pycache__/stand_ins.*.pyc"))) == 1


def test_changed_stand_ins_are_copied_without_another_build(pip: FakePip, engine: Engine, tools: Path) -> None:
    env = Environment("engine", engine, "2.0")
    engine_env.ensure(env)
    pip.take()
    (tools / "stand_ins.py").write_text("def install():\n    import sys; sys.stood_in = 2\n")
    assert not env.is_ready()
    engine_env.ensure(env)
    assert [call[-2] for call in pip.take()] == ["--editable"]
    assert _ran(env, "import sys; print(sys.stood_in)") == "2"


def test_every_version_compiles_once_with_the_stand_ins(
    pip: FakePip, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pip
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    env = Environment("engine", engine, "2.0")
    engine_env.ensure(env)
    folders = ["", env.older_folder("1.8"), env.older_folder("1.9")]
    assert (tmp_path / "warm").read_text().splitlines() == [f"1 {folder}" for folder in folders]


def test_where_nothing_compiles_it_is_said_what_that_needs(pip: FakePip, engine: Engine) -> None:
    assert pip
    env = Environment("engine", dataclasses.replace(engine, warm_up="raise OSError('no such program: c++')"), "2.0")
    with pytest.raises(BuildError, match=r"engine 2\.0 does not run; it needs a compiler\n(.*\n)*.*no such program"):
        engine_env.ensure(env)
    assert not env.has_engine()


def test_a_field_for_another_engine_does_not_build_this_one_again() -> None:
    vllm = engine_env.ENGINES["vllm"]
    assert set(Environment("vllm", vllm, vllm.version).engine_stamp()) == {
        "version",
        "module",
        "requirements",
        "unwanted",
        "alias",
    }
    assert set(Environment("vllm", vllm, vllm.version).project_stamp()) == {"checkout", "pyproject"}


def _python_that_says(folder: Path, line: str) -> Path:
    python = folder / "python3"
    python.write_text(f"#!/bin/sh\necho '{line}'\nexit 1\n")
    python.chmod(0o755)
    return python


def test_an_engine_that_this_python_has_none_of_is_named(tmp_path: Path) -> None:
    python = _python_that_says(tmp_path, "ERROR: No matching distribution found for sglang==0.5.23")
    with pytest.raises(BuildError) as raised:
        engine_env.run_pip(python, "install", "sglang==0.5.23")
    first, *rest = str(raised.value).splitlines()
    assert first.startswith(f"pip found no sglang==0.5.23 for {python} on ")
    assert rest[0] == "pip failed with status 1: pip install sglang==0.5.23"


def test_another_failure_of_pip_is_quoted(tmp_path: Path) -> None:
    python = _python_that_says(tmp_path, "ERROR: the disk is full")
    with pytest.raises(BuildError) as raised:
        engine_env.run_pip(python, "install", "one")
    assert str(raised.value) == "pip failed with status 1: pip install one\n    ERROR: the disk is full"


def test_the_command_prints_the_python_and_nothing_else(
    pip: FakePip, engine: Engine, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(engine_env.ENGINES, "engine", engine)
    python = f"{cache}/engine-2.0/bin/python\n"
    assert engine_env.main(["engine", "--print"]) == 1
    assert capsys.readouterr() == (python, "")
    pip.interrupted_at = "engine==1.9"
    assert engine_env.main(["engine"]) == 130
    assert capsys.readouterr().out == ""
    assert engine_env.main(["engine", "--print"]) == 1
    pip.interrupted_at = ""
    capsys.readouterr()
    assert engine_env.main(["engine"]) == 0
    assert capsys.readouterr().out == python
    assert engine_env.main(["engine", "--print"]) == 0


@pytest.mark.parametrize("name", engine_env.ENGINES)
def test_the_table_is_sound(name: str) -> None:
    engine = engine_env.ENGINES[name]
    env = Environment(name, engine, engine.version)
    assert env.stubs is None or env.stubs.is_file()
    assert engine.version not in engine.older
    assert bool(engine.warm_up) == bool(engine.needs)
    for version in engine.older:
        assert f"{name}=={version}" in env.older_stamp(version)["requirements"]


# --- `make test-engines`, in a folder where everything but the Makefile is fake.


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A checkout whose environments are a script that notes what it is asked to do, and fails where it is told to."""
    folder = tmp_path / "checkout"
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    (folder / ".venv" / "installed").touch()
    builder = folder / ".venv" / "bin" / "python"
    builder.write_text(f'#!/bin/sh\n[ "$2" != "$UNBUILT" ] && echo {folder}/of-$2\n')
    builder.chmod(0o755)
    for engine, seconds in (("vllm", 0.3), ("sglang", 0)):
        python = folder / f"of-{engine}"
        python.write_text(
            f'#!/bin/sh\nsleep {seconds}\necho "$KVCACHE_OTEL_REQUIRE: $@" >> ran\n[ "$FAILING" != {engine} ]\n'
        )
        python.chmod(0o755)
    return folder


def _make(folder: Path, *arguments: str, **variables: str) -> tuple[int, list[str]]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "ENGINE")}
    command = ["make", "test-engines", f"PYTHON={sys.executable}", *arguments]
    ran = subprocess.run(command, cwd=folder, env=inherited | variables, capture_output=True, text=True)
    note = folder / "ran"
    return ran.returncode, note.read_text().splitlines() if note.exists() else []


VLLM = "vllm,prometheus,otlp: -m pytest -m engine --ignore=tests/engines/sglang"
SGLANG = "sglang,prometheus,otlp: -m pytest -m engine --ignore=tests/engines/vllm"


@pytest.mark.parametrize("arguments", [(), ("-j4",)])
def test_every_engine_is_tested_one_after_the_other(made: Path, arguments: tuple[str, ...]) -> None:
    assert _make(made, *arguments) == (0, [VLLM, SGLANG])


def test_one_engine_can_be_tested_alone(made: Path) -> None:
    assert _make(made, "ENGINE=sglang", "ARGS=-k name") == (0, [f"{SGLANG} -k name"])


def test_an_unknown_engine_is_an_error(made: Path) -> None:
    assert _make(made, "ENGINE=other") == (2, [])


def test_the_first_engine_that_fails_is_the_end(made: Path) -> None:
    assert _make(made, FAILING="vllm") == (2, [VLLM])


def test_the_last_engine_that_fails_fails_all(made: Path) -> None:
    assert _make(made, FAILING="sglang") == (2, [VLLM, SGLANG])


def test_an_engine_that_cannot_be_built_is_an_error(made: Path) -> None:
    assert _make(made, UNBUILT="vllm") == (2, [])
