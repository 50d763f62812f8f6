"""The stand-ins for what SGLang imports: every use of a name on importing works, and nothing real is hidden."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import pytest

import sglang_cpu_stubs as stubs

if TYPE_CHECKING:
    from collections.abc import Iterator

TOOLS = Path(stubs.__file__).parent


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-ins in this process, for a module that no machine has, while the test runs."""
    monkeypatch.setattr(stubs, "FAKED", frozenset({"absent_module"}))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "as before")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "as before")
    stubs.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "absent_module"]:
        del sys.modules[name]


def test_any_module_and_any_name_can_be_imported() -> None:
    import absent_module.language.extra as extra
    from absent_module.language import Name, other

    assert isinstance(extra, stubs.FakeModule)
    assert repr(Name) == "<fake absent_module.language.Name>"
    assert repr(other.of.it) == "<fake absent_module.language.other.of.it>"
    assert importlib.import_module("absent_module.language").Name is Name
    assert importlib.util.find_spec("absent_module") is not None


def test_a_decorated_function_stays_what_it_is() -> None:
    import absent_module

    def function(a: int) -> int:
        return a + 1

    assert absent_module.jit(function) is function
    assert absent_module.jit(debug=True)(function) is function
    assert (
        absent_module.autotune(configs=[absent_module.Config({"size": 1}, stages=2)], key=["a"])(function) is function
    )


def test_a_name_serves_as_a_class_and_as_a_type() -> None:
    import absent_module

    class Derived(absent_module.Base, list[int]):
        pass

    assert Derived([1]) == [1]
    assert Derived.__mro__ == (Derived, list, object)
    assert not isinstance(1, absent_module.Type)
    assert eval("Optional[Type]", {"Type": absent_module.Type, "Optional": Optional})
    for annotation in ("Type | None", "None | Type", "int | Type", "Type[int]", "Type[int] | None"):
        assert eval(annotation, {"Type": absent_module.Type}) is absent_module.Type


def test_nothing_is_computed() -> None:
    import absent_module

    computed: Any = absent_module.compute(1, 2)
    with pytest.raises(AttributeError):
        _ = computed.result
    with pytest.raises(TypeError):
        _ = computed + 1
    with pytest.raises(TypeError):
        iter(absent_module.names)


@pytest.mark.parametrize("protocol", ["__file__", "__all__", "__wrapped__", "__len__"])
def test_protocols_are_not_faked(protocol: str) -> None:
    import absent_module

    assert not hasattr(absent_module, protocol)
    assert not hasattr(absent_module.name, protocol)


def test_its_version_is_older_than_any() -> None:
    import absent_module

    assert absent_module.__version__ == "0.0"


def test_what_is_really_there_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "absent_module").mkdir()
    (tmp_path / "absent_module" / "__init__.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    import absent_module

    assert absent_module.real
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_module.missing")


def test_no_other_module_is_faked() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_modules")


def test_installed_twice_it_is_there_once() -> None:
    stubs.install()
    assert sum(isinstance(finder, stubs.Finder) for finder in sys.meta_path) == 1


def test_torchs_compiler_is_off_unless_somebody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stubs.os.environ["TORCHDYNAMO_DISABLE"] == "as before"
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    stubs.install()
    assert stubs.os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_each_version_of_sglang_compiles_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("new", "old"):
        (tmp_path / version / "sglang" / "srt").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "new")])
    stubs.install()
    assert stubs.os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "new" / "torch_extensions")
    # The child of a process that runs the new one.
    monkeypatch.setattr(sys, "path", [str(tmp_path / "old"), *sys.path])
    stubs.install()
    assert stubs.os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "old" / "torch_extensions")


def test_without_sglang_torch_compiles_where_it_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    stubs.install()
    assert stubs.os.environ["TORCH_EXTENSIONS_DIR"] == "as before"


def test_an_interpreter_starts_as_fast_as_before() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sglang_cpu_stubs; sglang_cpu_stubs.install();"
        " print(*sorted(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-S", "-c", program, TOOLS], check=True, capture_output=True, text=True)
    loaded = set(ran.stdout.split())
    assert "sglang_cpu_stubs" in loaded
    assert not loaded & {"collections", "importlib.abc", "importlib.metadata", "importlib.util", "re", "typing"}
