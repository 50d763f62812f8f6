"""The command writes every output, and notices each that drifts from the catalogue."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import generate

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "model" / "kvcache.yaml"
OUTPUTS = [name for name, _ in generate.OUTPUTS]


def test_the_tree_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_the_command_runs_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "generate.py"), "--check"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A root with the catalogue and everything generated from it."""
    (tmp_path / "model").mkdir()
    shutil.copy(MODEL, tmp_path / "model")
    assert generate.main([], root=tmp_path) == 0
    return tmp_path


def test_what_was_generated_passes_the_check(tree: Path) -> None:
    assert generate.main(["--check"], root=tree) == 0


def test_the_outputs_do_not_depend_on_where_or_when(tree: Path) -> None:
    for output in OUTPUTS:
        assert (tree / output).read_text() == (ROOT / output).read_text()


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("damage", ["edited", "deleted"])
def test_check_names_the_output_that_drifted(
    tree: Path, output: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tree / output
    if damage == "edited":
        path.write_text(path.read_text().replace("Tokens", "Tokes", 1))
    else:
        path.unlink()
    before = {name: (tree / name).read_bytes() for name in OUTPUTS if (tree / name).exists()}

    assert generate.main(["--check"], root=tree) == 1

    complaint = capsys.readouterr().err
    assert output in complaint
    assert generate.COMMAND in complaint
    assert not any(other in complaint for other in OUTPUTS if other != output)
    assert before == {name: (tree / name).read_bytes() for name in OUTPUTS if (tree / name).exists()}


def test_a_changed_catalogue_makes_every_output_drift(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tree / "model" / "kvcache.yaml"
    model.write_text(model.read_text().replace("Tokens that storage said it had.", "Tokens that storage promised."))
    assert generate.main(["--check"], root=tree) == 1
    complaint = capsys.readouterr().err
    assert all(output in complaint for output in OUTPUTS)


def test_a_broken_catalogue_writes_nothing(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tree / "model" / "kvcache.yaml"
    model.write_text(model.read_text().replace("    unit: By\n", "    unit: bytes\n"))
    before = {name: (tree / name).read_bytes() for name in OUTPUTS}
    assert generate.main([], root=tree) == 1
    assert "kvcache.transfer.io" in capsys.readouterr().err
    assert before == {name: (tree / name).read_bytes() for name in OUTPUTS}


def test_generated_python_is_what_ruff_would_leave() -> None:
    pytest.importorskip("ruff")
    for command in (["format", "--check"], ["check"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "src/kvcache_otel/semconv.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
