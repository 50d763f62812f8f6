"""Witnesses of what a driven cache has done and holds. None relies on another, nor on anything of ours.

- `own_counters`: what SGLang's own collectors have counted.
- `recount`: what the tree holds, by a walk over its nodes, whatever SGLang's sums over them say.
- `pools`: what the allocator of the device, the host pools and SGLang's sums say.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from tests.engines.sglang.cache_driver import PAGE, RELEASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.engines.sglang.cache_driver import CacheDriver

FULL = 0
"""SGLang's number of the one component that the driven trees have: full attention."""


# -- SGLang's own numbers


@dataclass(frozen=True)
class OwnCounters:
    """What SGLang's collectors of one cache have counted. By pool or reason where these are, without those of 0.

    Attributes:
        evicted_tokens: Tokens evicted from the device.
        evictions: Evictions of at least one token.
        eviction_seconds: How long they took.
        load_back_tokens: Tokens copied from host to device, by pool.
        load_back_bytes: Their bytes.
        load_backs: Copies that were timed.
        load_back_seconds: Their time.
        backup_tokens: Tokens copied from device to host, by pool.
        backup_bytes: Their bytes.
        backups: Copies that were timed.
        backup_seconds: Their time.
        dropped_tokens: Tokens evicted from the device that the host did not have, by reason.
        stored_tokens: Tokens written to the storage.
        prefetched_tokens: Tokens read from the storage.
        prefetch_hit_tokens: Tokens that the storage was found to have.
        prefetch_unfulfilled_tokens: Those of them that no request got, by reason.
        prefetch_deferred_tokens: Those that were put off, by reason.
        store_dropped_tokens: Tokens that were to be written and were not, where the host is but a buffer.
    """

    evicted_tokens: int = 0
    evictions: int = 0
    eviction_seconds: float = field(default=0.0, compare=False)  # By the real clock, unlike copies.
    load_back_tokens: Mapping[str, int] = field(default_factory=dict)
    load_back_bytes: int = 0
    load_backs: int = 0
    load_back_seconds: float = 0.0
    backup_tokens: Mapping[str, int] = field(default_factory=dict)
    backup_bytes: int = 0
    backups: int = 0
    backup_seconds: float = 0.0
    dropped_tokens: Mapping[str, int] = field(default_factory=dict)
    stored_tokens: int = 0
    prefetched_tokens: int = 0
    prefetch_hit_tokens: int = 0
    prefetch_unfulfilled_tokens: Mapping[str, int] = field(default_factory=dict)
    prefetch_deferred_tokens: Mapping[str, int] = field(default_factory=dict)
    store_dropped_tokens: int = 0


def own_counters(driver: CacheDriver) -> OwnCounters:
    """Read SGLang's collectors of a driver. All is 0 where metrics are off, or where a release does not count it."""
    samples = _Samples(driver)
    return OwnCounters(
        evicted_tokens=samples.total("evicted_tokens_total"),
        evictions=samples.total("eviction_duration_seconds_count"),
        eviction_seconds=samples.seconds("eviction_duration_seconds_sum"),
        load_back_tokens=samples.by("pool", "load_back_tokens_total"),
        load_back_bytes=samples.total("load_back_bytes_total"),
        load_backs=samples.total("load_back_duration_seconds_count"),
        load_back_seconds=samples.seconds("load_back_duration_seconds_sum"),
        backup_tokens=samples.by("pool", "hicache_backup_tokens_total"),
        backup_bytes=samples.total("hicache_backup_bytes_total"),
        backups=samples.total("hicache_backup_duration_seconds_count"),
        backup_seconds=samples.seconds("hicache_backup_duration_seconds_sum"),
        dropped_tokens=samples.by("reason", "hicache_dropped_tokens_total"),
        stored_tokens=samples.total("backuped_tokens_total"),
        prefetched_tokens=samples.total("prefetched_tokens_total"),
        prefetch_hit_tokens=samples.total("storage_prefetch_hit_tokens_total"),
        prefetch_unfulfilled_tokens=samples.by("reason", "storage_prefetch_unfulfilled_tokens_total"),
        prefetch_deferred_tokens=samples.by("reason", "storage_prefetch_deferred_tokens_total"),
        store_dropped_tokens=samples.total("hicache_backup_dropped_tokens_total"),
    )


def unsettled(driver: CacheDriver) -> int:
    """Tokens that the storage was found to have, of which SGLang has not counted yet what became. For metrics only."""
    return sum(driver.cache._storage_prefetch_hit_remaining_by_reqid.values())


class _Samples:
    """The samples of a driver's collectors."""

    PREFIX = "sglang:"

    def __init__(self, driver: CacheDriver) -> None:
        self._samples = [
            (sample.name.removeprefix(self.PREFIX), sample.labels, sample.value)
            for family in driver.registry.collect()
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        ]

    def seconds(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for sample, _, value in self._samples if sample == name)

    def total(self, name: str) -> int:
        """The sum over all labels, of what is counted in whole numbers."""
        return _whole(self.seconds(name))

    def by(self, label: str, name: str) -> dict[str, int]:
        """The sum for each value of a label, without those that are 0. A release without the label has ``kv`` only."""
        totals: Counter[str] = Counter()
        for sample, labels, value in self._samples:
            if sample == name and value:
                totals[labels.get(label, "kv")] += _whole(value)
        return dict(totals)


def _whole(value: float) -> int:
    assert value == int(value), f"{value} is no whole number"
    return int(value)


# -- the tree


@dataclass(frozen=True)
class Recount:
    """What a tree holds, in blocks of `PAGE` tokens.

    Attributes:
        device_blocks: Blocks on the device, those being loaded back included.
        host_blocks: Blocks on the host whose copy is complete.
        pending_blocks: Blocks whose copy to the host is not known to be complete.
        nodes: The tree's nodes, without its root.
    """

    device_blocks: int
    host_blocks: int
    pending_blocks: int
    nodes: int


class Node(NamedTuple):
    """A node of a tree.

    Attributes:
        tokens: The tokens that it spans.
        device_tokens: Those on the device: all or none.
        is_on_host: Whether the host has slots for them.
    """

    id: int
    parent: int
    tokens: int
    device_tokens: int
    is_on_host: bool


def recount(driver: CacheDriver) -> Recount:
    """Walk a driver's tree, and count.

    Raises:
        AssertionError: The tree contradicts itself.
    """
    nodes = walk(driver)
    pending = pending_nodes(driver)
    for node in nodes:
        assert node.device_tokens in (0, node.tokens), f"{node} is in part on the device"
        assert node.tokens % PAGE == 0, f"{node} spans part of a page"
    return Recount(
        device_blocks=sum(node.device_tokens for node in nodes) // PAGE,
        host_blocks=sum(node.tokens for node in nodes if node.is_on_host and node.id not in pending) // PAGE,
        pending_blocks=sum(node.tokens for node in nodes if node.is_on_host and node.id in pending) // PAGE,
        nodes=len(nodes),
    )


def pending_nodes(driver: CacheDriver) -> set[int]:
    """The nodes whose copy to the host is not known to be complete: those that its acknowledgement will name.

    The tree in Python marks them too, that in Rust does not show its mark.
    """
    return {node for copy in driver.cache.ongoing_write_through.values() for node in copy.publish_node_ids}


def walk(driver: CacheDriver) -> list[Node]:
    """All nodes of a driver's tree but the root, in no particular order."""
    if driver.core == "python":
        return list(_walk_objects(driver))
    if RELEASE >= (0, 5, 23):
        return _walk_ids(driver)
    return printed(driver)  # An older core does not tell how many children a node has.


def _walk_objects(driver: CacheDriver) -> Iterator[Node]:
    """The walk over a tree in Python, from its root."""
    waiting = [driver.cache.tree_core.root_node]
    while waiting:
        parent = waiting.pop()
        for child in parent.children.values():
            waiting.append(child)
            data = child.component_data[FULL]
            if data.host_value is not None:
                assert len(data.host_value) == len(child.key), f"node {child.id} is in part on the host"
            yield Node(
                id=child.id,
                parent=parent.id,
                tokens=len(child.key),
                device_tokens=0 if data.value is None else len(data.value),
                is_on_host=data.host_value is not None,
            )


def _walk_ids(driver: CacheDriver) -> list[Node]:
    """The walk over a tree in Rust, which shows no root to start from, by the ids that its nodes can have.

    That it misses none shows where each node has as many children as it says, and where what is on the device adds up
    to what the tree's own walk finds there. A child of the root that is on the host only is beyond both, so that `_Ids`
    must be right.
    """
    binding = driver.cache.tree_core._binding
    alive = _ids.setdefault(driver, _Ids()).look(binding.is_root, driver.newest_node)
    nodes: dict[int, Node] = {}
    said: dict[int, int] = {}
    for path in binding.collect_path_info(alive):
        for node, parent, start, end, device_tokens, children in path:
            nodes[node] = Node(node, parent, end - start, device_tokens or 0, binding.node_backuped(node))
            said[node] = children
    assert nodes.keys() == set(alive), f"a tree has nodes {sorted(nodes)}, and a look found {sorted(alive)}"
    found = Counter(node.parent for node in nodes.values())
    assert said == {node: found[node] for node in nodes}, "a walk missed children of a node"
    assert binding.total_size()[0] == sum(node.device_tokens for node in nodes.values()), "a walk missed nodes"
    return list(nodes.values())


class _Ids:
    """Which ids of a Rust tree's nodes are alive. They count up, and none is used again."""

    MARGIN = 128
    """More nodes than a tree makes between two looks, beyond the last that SGLang has told of."""

    def __init__(self) -> None:
        self._alive: set[int] = set()
        self._settled = 0
        """All nodes up to this id have been made, and looked at."""

    def look(self, is_root: Callable[[int], bool], newest: int) -> list[int]:
        """The nodes that are alive now, without the root.

        Args:
            is_root: The tree's answer to whether a node is its root. Raises a `KeyError` for what is no node.
            newest: An id that is known to have been made.
        """
        self._alive = {node for node in self._alive if _is_alive(is_root, node)}
        self._settled, start = max(self._settled, newest), self._settled + 1
        node = start
        while node <= self._settled + self.MARGIN:
            if _is_alive(is_root, node):
                self._alive.add(node)
                self._settled = max(self._settled, node)
            node += 1
        return sorted(node for node in self._alive if not is_root(node))


def _is_alive(is_root: Callable[[int], bool], node: int) -> bool:
    try:
        is_root(node)
    except KeyError:
        return False
    return True


_ids: WeakKeyDictionary[CacheDriver, _Ids] = WeakKeyDictionary()


_PRINTED_NODE = re.compile(r"(?P<indent> *)\[(?P<id>\d+)\] (?P<tokens>\d+) full_lock=\d+ Full=(?P<device>yes|no)")


def printed(driver: CacheDriver) -> list[Node]:
    """The nodes of a tree in Rust, as it prints them itself on the process's standard output."""
    nodes = []
    ancestors: list[tuple[int, int]] = []
    for line in _printed_by(driver.cache.pretty_print):
        match = _PRINTED_NODE.fullmatch(line)
        if match is None:  # Another thread's.
            print(line)
            continue
        indent, node, tokens = len(match["indent"]), int(match["id"]), int(match["tokens"])
        while ancestors and ancestors[-1][0] >= indent:
            ancestors.pop()
        if ancestors:
            device_tokens = tokens if match["device"] == "yes" else 0
            nodes.append(Node(node, ancestors[-1][1], tokens, device_tokens, driver.cache.is_backuped(node)))
        ancestors.append((indent, node))
    return nodes


def _printed_by(call: Callable[[], object]) -> list[str]:
    """The lines that a call writes to the standard output, past Python's own."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        output = os.dup(1)
        try:
            os.dup2(file.fileno(), 1)
            call()
        finally:
            os.dup2(output, 1)
            os.close(output)
        file.seek(0)
        return file.read().decode().splitlines()


# -- the pools


class HostPool(NamedTuple):
    """Slots of a host pool, each for one token."""

    used: int
    total: int


@dataclass(frozen=True)
class Pools:
    """What the pools have given away, in tokens.

    Attributes:
        device_total: Tokens that the device has room for.
        device_free: Those that are free.
        device_evictable: Those that the tree holds, and that can be evicted, by SGLang's own sum.
        device_protected: Those that the tree holds, and that cannot be, by SGLang's own sum.
        host: The host pools by name; none if the cache has no host.
    """

    device_total: int
    device_free: int
    device_evictable: int
    device_protected: int
    host: Mapping[str, HostPool]


def pools(driver: CacheDriver) -> Pools:
    """Read the pools of a driver."""
    group = driver.cache.host_pool_group
    entries = group.entries if group is not None else ()
    return Pools(
        device_total=driver.allocator.size,
        device_free=driver.allocator.available_size(),
        device_evictable=driver.cache.evictable_size(),
        device_protected=driver.cache.protected_size(),
        host={
            entry.name.value: HostPool(
                entry.host_pool.logical_size - entry.host_pool.available_size(), entry.host_pool.logical_size
            )
            for entry in entries
        },
    )
