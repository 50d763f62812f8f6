"""Looks at one engine: imports it, attaches every hook, and takes them all off again."""

from __future__ import annotations

import importlib
import sys
import time
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from kvcache_otel.cli.foreign_code import quiet, try_import
from kvcache_otel.cli.report import EngineReport, Finding, HookReport, failure, note, ok, reason, warning, words
from kvcache_otel.engines import versions
from kvcache_otel.engines.hooks import HookSet
from kvcache_otel.export.settings import one_line
from kvcache_otel.instrumentation import ENGINES, is_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvcache_otel.engines.hooks import Hook, HookPoint


def examine(name: str, environ: Mapping[str, str]) -> EngineReport | None:
    """Returns what there is to say of an engine; None where it is not installed.

    Args:
        name: One of `ENGINES`.
        environ: The environment that the engine would find.
    """
    if not is_installed(name):
        return None
    package, adapter = ENGINES[name]
    table = importlib.import_module(f"{package}.table")
    with quiet(table.QUIET):
        version, why = _import(name, table.NAME)
        if why:
            findings = [failure(f"{table.NAME} cannot be imported: {why}", f"repair the installation of {table.NAME}")]
            return EngineReport(table.NAME, version, "unknown", [], findings, [])
        hooks, why = _attach(table, version, lambda _: getattr(importlib.import_module(f"{package}.adapter"), adapter))
        if why:
            findings = [failure(f"the hooks of {table.NAME} cannot be attached: {why}", f"use another {table.NAME}")]
            return EngineReport(table.NAME, version, "unknown", hooks, findings, [])
    return EngineReport(
        table.NAME,
        version,
        versions.support(version, table.SUPPORTED, table.FULL),
        hooks,
        [_version(table, version), *_plugin(table, environ), *_hooks(table, version, hooks)],
        [words for words, before in table.LIMITS if not before or versions.is_before(version, before)],
    )


# -- importing and attaching -------------------------------------------------------------------------------------------


def _import(module: str, name: str) -> tuple[str, str]:
    """Returns the engine's version, and why it cannot be imported."""
    print(f"importing {name}, which takes about 10 s ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    why = try_import(module)
    try:
        version = words(getattr(sys.modules.get(module), "__version__", ""))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Some engines run code when they are asked.
        version, why = "", why or f"asking for its version fails: {reason(error)}"
    if not why:
        print(f"{name} {version} was imported in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    return version, why


def _attach(table: Any, version: str, resolve: Callable[[str], Any]) -> tuple[list[HookReport], str]:
    """Returns what became of each hook, and what the engine raised meanwhile.

    They are put in their places as `HookPoint.attach` does it, whatever the engine's own way: it has a way back.
    """
    failed = {name: why for name in {hook.module for hook in table.HOOKS} if (why := try_import(name))}
    hooks = HookSet(table.HOOKS, resolve)
    try:
        hooks.attach()
        reports = [
            HookReport(
                point.hook.name,
                point.hook.target,
                point.state == "attached",
                _why(table.NAME, version, point, failed),
                "" if _is_needless(version, point.hook) else point.hook.fact,
                point.hook.since,
            )
            for point in hooks.points
        ]
        hooks.detach()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Engines' modules may run code of theirs when they are looked at.
        return [], reason(error)
    return reports, ""


def _why(name: str, version: str, point: HookPoint, failed: Mapping[str, str]) -> str:
    """Returns why a hook is not attached; empty where it is."""
    why, since = failed.get(point.hook.module, point.why), point.hook.since
    if not why or not versions.is_before(version, since):
        return why
    costs = ", and costs no fact here" if _is_needless(version, point.hook) else ""
    return f"{why}; it is there from {name} {since} on{costs}"


def _is_needless(version: str, hook: Hook) -> bool:
    return hook.needless_before and versions.is_before(version, hook.since)


# -- what it means -----------------------------------------------------------------------------------------------------


def _version(table: Any, version: str) -> Finding:
    if problem := versions.warning(table.NAME, version, table.SUPPORTED, table.FULL):
        return warning(problem)
    first, last = table.SUPPORTED
    complete = f"every hook that tells a fact is there from {_complete(table)} on"
    return ok(f"version {version}: supported are {first} to {last}; {complete}")


def _complete(table: Any) -> str:
    """Returns the first version of those with every fact that has every hook that tells one."""
    first: str = table.FULL[0]
    for hook in table.HOOKS:
        if versions.is_before(first, hook.since) and not hook.needless_before:
            first = hook.since
    return first


def _plugin(table: Any, environ: Mapping[str, str]) -> list[Finding]:
    """Whether the engine would load us."""
    group, name, allow_list = table.PLUGIN_GROUP, table.PLUGIN_NAME, table.PLUGIN_ALLOW_LIST
    findings: list[Finding] = []
    if any(entry.name == name for entry in entry_points(group=group)):
        findings.append(ok(f"entry point {name} in {group}: {table.NAME} finds this package"))
    else:
        findings.append(
            failure(
                f"no entry point {name} in {group}: {table.NAME} does not find this package",
                "install kvcache-otel with pip into this Python",
            )
        )
    allowed = environ.get(allow_list)
    if allowed is not None and not table.allows(allowed, name):
        wanted = ",".join(part.strip() for part in (*allowed.split(","), name) if part.strip())
        findings.append(
            failure(
                f"{allow_list}={one_line(allowed)} allows only what it names, and {name} is not among it",
                f"unset it or set {allow_list}={one_line(wanted)}",
            )
        )
    elif allowed is not None:
        findings.append(ok(f"{allow_list}={one_line(allowed)} allows {name}"))
    return findings


def _hooks(table: Any, version: str, hooks: list[HookReport]) -> list[Finding]:
    attached = sum(hook.attached for hook in hooks)
    if not attached:
        return [failure(f"no hook fits this {table.NAME}", f"use {table.NAME} {' to '.join(table.SUPPORTED)}")]
    text = f"{attached} of {len(hooks)} hooks can be attached"
    missing = [hook for hook in hooks if not hook.attached]
    if not missing:
        return [ok(text)]
    if all(versions.is_before(version, hook.since) for hook in missing):
        costs = "" if any(hook.fact for hook in missing) else ", and cost no fact here"
        return [note(f"{text}: the others are for functions that came with a later {table.NAME}{costs}")]
    return [warning(text)]
