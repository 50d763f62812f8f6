"""Another plugin of SGLang's, which hooks all that we hook, and in every way that SGLang knows."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "other"
"""The name of its entry point."""

CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
RUST = "sglang.srt.mem_cache.rust_tree_core.adapter.RustUnifiedTreeCore"
COLLECTORS = "sglang.srt.observability.metrics_collector.resolve_collector_class"

REPLACED = (f"{CACHE}.insert", f"{CACHE}.evict_host")
"""What its class for SGLang's cache has of its own."""

calls: Counter[str] = Counter()
"""What it has seen."""


def install(folder: Path) -> None:
    """Makes a folder, to be put on the path, whose one distribution has this plugin's entry point."""
    info = folder / "other_plugin-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {__name__}:register\n")


def register() -> None:
    """The entry point."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvcache_otel.engines.sglang.table import HOOKS

    class Replacement(UnifiedRadixCache):
        def insert(self, *args: Any, **kwargs: Any) -> Any:
            calls["insert, in the class"] += 1
            return super().insert(*args, **kwargs)

        def evict_host(self, *args: Any, **kwargs: Any) -> Any:
            calls["evict_host, in the class"] += 1
            return super().evict_host(*args, **kwargs)

    HookRegistry.register(CACHE, Replacement, HookType.REPLACE)
    for target in sorted({hook.target.replace(":", ".") for hook in HOOKS} | {*REPLACED, f"{CACHE}._evict"}):
        # The modules of some have not been imported by anybody: SGLang does, in the midst of applying hooks.
        name = target.rpartition(".")[2]
        HookRegistry.register(target, _before(name), HookType.BEFORE)
        HookRegistry.register(target, _around(name, "num_tokens_evicted"), HookType.AROUND)
        HookRegistry.register(target, _after(name), HookType.AFTER)
    # Beside ours, in such a module.
    HookRegistry.register(f"{RUST}.begin_insert", _after("begin_insert"), HookType.AFTER)
    HookRegistry.register(COLLECTORS, _collector, HookType.AROUND)


def _after(name: str) -> Callable[..., None]:
    def after(_: Any, *__: Any, **___: Any) -> None:
        calls[f"{name}, after"] += 1

    return after


def _before(name: str) -> Callable[..., None]:
    def before(*_: Any, **__: Any) -> None:
        calls[f"{name}, before"] += 1

    return before


def _around(name: str, tokens: str) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls[f"{name}, around"] += 1
        result = original(*args, **kwargs)
        calls[f"{name}, tokens"] += getattr(result, tokens, 0)
        return result

    return around


def _collector(original: Callable[..., type], role: str, *args: Any, **kwargs: Any) -> type:
    found = original(role, *args, **kwargs)
    if role != "radix_cache":
        return found

    class Collector(found):  # type: ignore[valid-type, misc]
        def increment_eviction_num_tokens(self, num_tokens: int) -> None:
            calls["collected evictions, tokens"] += num_tokens
            super().increment_eviction_num_tokens(num_tokens)

    return Collector
