"""What the doctor found, as text for people and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvcache_otel.export.settings import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Literal

    from kvcache_otel.engines.versions import Support

    Level = Literal["ok", "note", "warning", "failure"]

NARROWEST, WIDTH, WIDEST = 40, 80, 96
"""Columns of a report: at the least, where nobody knows how many there are, and at the most."""


def words(thing: object) -> str:
    """Returns what an object of somebody's says of itself, in one short line; empty where it cannot."""
    try:
        return one_line(" ".join(str(thing).split()))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return ""


def reason(error: BaseException) -> str:
    """Returns what went wrong, in one short line."""
    said = words(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: ``failure`` where nothing would be measured or exported because of it.
        text: What was found.
        remedy: What to do about it, as a command; empty where there is nothing to do.
    """

    level: Level
    text: str
    remedy: str = ""


def ok(text: str) -> Finding:
    """It is as it should be."""
    return Finding("ok", text)


def note(text: str) -> Finding:
    """It is good to know."""
    return Finding("note", text)


def warning(text: str, remedy: str = "") -> Finding:
    """It is probably not as it was meant, and something is measured and exported all the same."""
    return Finding("warning", text, remedy)


def failure(text: str, remedy: str = "") -> Finding:
    """Nothing is measured, or nothing is exported."""
    return Finding("failure", text, remedy)


@dataclass(frozen=True)
class HookReport:
    """One hook, after the attempt to attach it.

    Attributes:
        name: Its short name.
        target: The engine's function.
        attached: Whether it is on it.
        why: Why it is not.
        fact: What cannot be measured then; empty where it costs nothing.
        since: The engine's first version that has the function; empty where every supported one does.
    """

    name: str
    target: str
    attached: bool
    why: str
    fact: str
    since: str

    @property
    def is_missed(self) -> bool:
        """Whether something cannot be measured without it."""
        return bool(self.fact) and not self.attached


@dataclass(frozen=True)
class EngineReport:
    """One engine that is installed.

    Attributes:
        name: As it writes itself.
        version: Its own word; empty where it could not be imported.
        support: How the version stands to those that are supported.
        hooks: Every hook.
        findings: The rest.
        limits: What cannot be measured here, whatever is attached.
    """

    name: str
    version: str
    support: Support
    hooks: list[HookReport]
    findings: list[Finding]
    limits: list[str]

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}".strip()

    @property
    def failures(self) -> list[Finding]:
        """Why nothing of it would be measured; empty where something would."""
        return _failures(self.findings)


@dataclass(frozen=True)
class ExportReport:
    """Where the metrics would go.

    Attributes:
        variable: The variable that decides, with its value; empty where none does.
        exporters: The exporters that would be used.
        destinations: What each of them does, in words.
        findings: The rest.
    """

    variable: str
    exporters: list[str]
    destinations: list[str]
    findings: list[Finding]


@dataclass(frozen=True)
class Report:
    """Everything.

    Attributes:
        versions: Of this package, Python and OpenTelemetry.
        engines: Every engine that is installed, or every object of a cache of the program's own.
        export: Where the metrics would go.
        installation: Whether engines find this package, and whether it can count here.
    """

    versions: dict[str, str]
    engines: list[EngineReport]
    export: ExportReport
    installation: list[Finding] = field(default_factory=list[Finding])

    @property
    def findings(self) -> list[Finding]:
        """All findings, from the first to be mended to the last."""
        engines = [finding for engine in self.engines for finding in engine.findings]
        return [*self.installation, *engines, *self.export.findings]

    @property
    def measured(self) -> list[EngineReport]:
        """The engines of which something would be measured."""
        return [engine for engine in self.engines if not engine.failures]

    @property
    def failures(self) -> list[Finding]:
        """Why nothing is measured or exported; empty where something is, if only of one engine."""
        if self.measured:
            return _failures([*self.installation, *self.export.findings])
        return _failures(self.findings)

    @property
    def status(self) -> int:
        """The exit status: 0 where something is measured and exported."""
        return int(bool(self.failures))

    @property
    def summary(self) -> str:
        """Whether all is well, or what to do, in one sentence for all engines, and one for each that has failures."""
        count = len(_failures(self.findings))
        if self.failures:
            more = f" ({count} failures in all, see above)" if count > 1 else ""
            return f"Nothing would be measured: {_first(self.failures)}{more}."
        reservations = [
            _number(count, "failure"),
            _number(sum(finding.level == "warning" for finding in self.findings), "warning"),
            _number(sum(hook.is_missed for engine in self.measured for hook in engine.hooks), "missing hook"),
        ]
        reserved = " and ".join(filter(None, reservations))
        well = f"It works, with {reserved} (see above)" if reserved else "All is well"
        engines = " and ".join(engine.title for engine in self.measured)
        destinations = ", and ".join(self.export.destinations)
        failed = "".join(
            f" Nothing would be measured of {engine.title}: {_first(engine.failures)}."
            for engine in self.engines
            if engine.failures
        )
        return f"{well}: the KV caches of {engines} would be measured, and exported: {destinations}.{failed}"


def _failures(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "failure"]


def _first(findings: Sequence[Finding]) -> str:
    """Returns the first of some failures, and what to do about it."""
    return findings[0].text + (f"; {findings[0].remedy}" if findings[0].remedy else "")


def to_json(report: Report) -> str:
    """Returns the report as JSON."""
    return json.dumps({**asdict(report), "status": report.status, "summary": report.summary}, indent=2)


def to_text(report: Report, width: int = WIDTH) -> str:
    """Returns the report as text.

    Args:
        report: The report.
        width: Columns that there are. It takes no more, but for a word that is longer.
    """
    width = min(max(width, NARROWEST), WIDEST)
    return "\n".join(line for first, text in _lines(report) for line in _wrapped(first, text, width))


def _lines(report: Report) -> Iterator[tuple[str, str]]:
    """Yields lines, as long as they are: how they begin, and the text that is wrapped beside that."""
    yield "", ", ".join(f"{name} {version}" for name, version in report.versions.items())
    if report.installation:
        yield from _section("Installation", report.installation)
    for engine in report.engines:
        yield from _section(engine.title, engine.findings)
        yield from _hooks(engine.hooks)
        missing = [_limit(hook) for hook in engine.hooks if hook.is_missed]
        if limits := missing + engine.limits:
            yield "  Not measured in this installation:", ""
            for limit in limits:
                yield "    - ", limit
    yield from _section("Export", report.export.findings)
    yield "", ""
    yield "", report.summary


def _limit(hook: HookReport) -> str:
    return hook.fact if hook.fact == hook.name else f"{hook.fact} (hook {hook.name})"


def _section(title: str, findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    yield "", ""
    yield title, ""
    for finding in findings:
        remedy = f" -> {finding.remedy}" if finding.remedy else ""
        level = finding.level.upper() if finding.level == "failure" else finding.level
        yield f"  {level:<9}  ", finding.text + remedy


def _hooks(hooks: Sequence[HookReport]) -> Iterator[tuple[str, str]]:
    width = max((len(hook.name) for hook in hooks), default=0)
    for hook in hooks:
        state, text = ("attached", hook.target.partition(":")[2]) if hook.attached else ("MISSING", hook.why)
        yield f"  {state:<9}  {hook.name:<{width}}  ", text


def _wrapped(first: str, text: str, width: int) -> list[str]:
    """Returns lines of a text beside what they begin with, or below it, where a long word has no room there."""
    room = width - max(map(len, text.split()), default=0)
    beside = bool(text) and len(first) <= room
    indent = " " * max(min(len(first), room), 0)
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first if beside else indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines if beside else [first.rstrip(), *lines]


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}" if count else ""
