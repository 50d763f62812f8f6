"""A real Prometheus server that scrapes what a test exports.

with prometheus_server([f"127.0.0.1:{port}"]) as prometheus:
    [sample] = prometheus.wait_for("kvcache_lookup_tokens_total{kvcache_tier='host'}")
    assert sample.value == 64
"""

from __future__ import annotations

import json
import tempfile
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.processes import free_port, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence


class Sample(NamedTuple):
    """One series of a query's answer.

    Attributes:
        labels: Its labels, with ``__name__`` where the answer has it, without ``instance`` and ``job``.
        value: Its value now.
        instance: The target it was scraped from; empty where the query folded that away.
    """

    labels: dict[str, str]
    value: float
    instance: str


class Prometheus:
    """Asks one server.

    Attributes:
        url: The server's address, without a path.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Sample]:
        """Returns what a PromQL expression yields now.

        Raises:
            urllib.error.HTTPError: The server rejects the expression.
        """
        answer = self.get("/api/v1/query", query=expression)
        return [_sample(entry) for entry in answer["data"]["result"]]

    def wait_for(self, expression: str, timeout_s: float = 20.0) -> list[Sample]:
        """Returns what a PromQL expression yields, as soon as that is something.

        Raises:
            TimeoutError: It still yields nothing.
        """
        found: list[Sample] = []
        wait_until(lambda: found.extend(self.query(expression)) or found, timeout_s, expression)
        return found

    def targets(self) -> list[dict[str, Any]]:
        """Returns the scrape targets with their ``health`` and ``lastError``."""
        return self.get("/api/v1/targets", state="active")["data"]["activeTargets"]

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """Returns the answer of the server's HTTP API."""
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as response:
            return json.load(response)


@contextmanager
def prometheus_server(targets: Sequence[str], *, rule_files: Sequence[Path] = ()) -> Generator[Prometheus]:
    """Runs the `prometheus` of the PATH until the end of the block, on a free port, with storage of its own.

    Args:
        targets: What it scrapes every second, as ``host:port``, under ``/metrics``.
        rule_files: Rules that it evaluates every second.

    Yields:
        The server, ready to be asked.
    """
    with tempfile.TemporaryDirectory(prefix="prometheus-") as folder:
        # JSON is YAML, and has no quoting rules to get wrong.
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path.resolve()) for path in rule_files],
            "scrape_configs": [{"job_name": "kvcache", "static_configs": [{"targets": list(targets)}]}],
        }
        path = Path(folder, "prometheus.yml")
        path.write_text(json.dumps(configuration))
        address = f"127.0.0.1:{free_port()}"
        server = Prometheus(f"http://{address}")
        command = [
            "prometheus",
            f"--config.file={path}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            "--log.level=warn",
        ]
        with running(command, Path(folder, "log"), lambda: _is_ready(server.url)):
            yield server


def _is_ready(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/-/ready", timeout=1) as response:
        return response.status == 200


def _sample(entry: dict[str, Any]) -> Sample:
    labels: dict[str, str] = dict(entry["metric"])
    instance = labels.pop("instance", "")
    labels.pop("job", None)
    return Sample(labels, float(entry["value"][1]), instance)
