"""What a process needs to run SGLang's cache in an environment without a GPU: stand-ins for what SGLang imports.

`engine_env.py` copies this file into the environment's site-packages, with a line in a ``.pth`` file that calls
`install` in every process of that environment: the tests, the children that they spawn, ``kvcache-otel doctor``.

What is faked, and why it is not installed instead:

* ``torchvision``: its operators are built for CUDA; beside the CPU build of torch its import fails.
* ``triton``: it works, and takes 1 GB.
* ``IPython``: SGLang shows text with it in notebooks.

These are fakes for importing, nothing more. Any name can be imported from them, decorated with, derived from, annotated
with or called; nothing is ever computed. No part of a KV cache runs through them on a CPU. A module that is really
there always comes first: the fakes are asked for last, one by one, when nobody else has a module of that name.

It runs whenever an interpreter of the environment starts, so it imports next to nothing.
"""

from __future__ import annotations

import os
import sys

# As `types` and `importlib.machinery` have them; to import these takes longer than all the rest.
FunctionType, ModuleType, ModuleSpec = type(lambda: None), type(sys), type(sys.__spec__)

FAKED = frozenset({"IPython", "torchvision", "triton"})
VERSION = "0.0"
"""What a fake says its version is: transformers and torch parse it, and neither may take it for a recent one."""


class Fake:
    """Whatever a name of a fake module stands for: a class, a function, a decorator, a type variable."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __repr__(self) -> str:
        return f"<fake {self.__name__}>"

    def __getattr__(self, name: str) -> Fake:
        return _member(self, name)

    def __call__(self, *arguments: object, **_options: object) -> object:
        """As a decorator, with options or without, it gives the function back as it is. No call has another result."""
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], FunctionType) else _undecorated

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        """A class that is derived from it is derived from nothing."""
        return ()

    def __instancecheck__(self, _instance: object) -> bool:
        return False

    def __getitem__(self, _item: object) -> Fake:
        return self

    # Else Python would iterate over it by __getitem__, without an end.
    __iter__ = None

    def __or__(self, _other: object) -> Fake:
        return self

    __ror__ = __or__


class FakeModule(ModuleType):
    """A module that has every name."""

    __version__ = VERSION

    def __getattr__(self, name: str) -> Fake:
        return _member(self, name)


def _undecorated(function: FunctionType) -> FunctionType:
    return function


def _member(owner: Fake | FakeModule, name: str) -> Fake:
    # Protocols are not faked: who asks for `__file__` or `__wrapped__` must learn that there is none.
    if name.startswith("__"):
        raise AttributeError(name)
    fake = Fake(f"{owner.__name__}.{name}")
    setattr(owner, name, fake)
    return fake


class Finder:
    """The last finder: it has the modules of `FAKED`, and below those that it provided itself, every other."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        top, _, below = name.partition(".")
        if top not in FAKED or (below and not isinstance(sys.modules.get(top), FakeModule)):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> FakeModule:
        return FakeModule(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        """A fake has nothing to run."""


def install() -> None:
    """Provide the fakes in this process, once, and tell torch how to live with them."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
    # torch's compiler would take the fake triton for a real one.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Where torch keeps what SGLang compiles on first use: beside the SGLang that this process would import. In one
    # place for all, versions would compile over each other's work, and not all heed the same locks. A parent that runs
    # another version may have handed its own place down, so what is set does not count.
    home = next((folder for folder in sys.path if os.path.isdir(os.path.join(folder, "sglang", "srt"))), None)
    if home:
        os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(home, "torch_extensions")
