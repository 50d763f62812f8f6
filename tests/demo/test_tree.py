"""The radix tree finds the longest prefix, keeps what is locked, and gives up what has not been used for longest."""

from __future__ import annotations

from itertools import count

import pytest

from kvcache_otel.demo.events import BlockRemoved, BlockStored, EventLog
from kvcache_otel.demo.pages import Page, content, make_page, split
from kvcache_otel.demo.tree import DEVICE, HOST, Node, RadixTree

SIZE = 2


class Tree:
    """A tree, and slots that are never given twice.

    Attributes:
        tree: The tree.
        log: What it has told.
    """

    def __init__(self) -> None:
        self.log = EventLog(enabled=True)
        self.tree = RadixTree(self.log)
        self._slots = count()

    def insert(self, tokens: str) -> tuple[Node, list[int]]:
        pages = prompt(tokens)
        return self.tree.insert(pages, [next(self._slots) for _ in pages])

    def evict(self, tier: str, pages: int = 1) -> list[str]:
        """Evicts so many nodes, and returns what was in them."""
        gone: list[str] = []
        for node in self.tree.victims(tier):
            gone.append(text(node))
            self.tree.place(node, tier, None)
            if len(gone) == pages:
                break
        return gone


def prompt(tokens: str) -> list[Page]:
    return list(split([ord(token) for token in tokens], SIZE))


def text(node: Node) -> str:
    return "".join(chr(token) for page in node.pages for token in page.tokens)


def test_a_page_is_its_tokens_and_all_before_them() -> None:
    first, second, rest = prompt("aabbc")
    assert (first.parent, second.parent, rest.parent) == (None, first.hash, second.hash)
    assert rest.tokens == (ord("c"),)
    assert prompt("aabb")[1] == second != make_page(None, second.tokens)
    assert -(2**63) <= second.hash < 2**63
    assert content(first, 16) == content(first, 8) * 2 != content(second, 16)


def test_prefixes_are_found_and_shared() -> None:
    tree = Tree()
    end, spare = tree.insert("aabbcc")
    assert (text(end), end.device, spare) == ("aabbcc", [0, 1, 2], [])
    other, spare = tree.insert("aabbdd")  # Splits the first.
    assert [text(node) for node in other.path()] == ["aabb", "dd"]
    assert [node.device for node in other.path()] == [[0, 1], [5]]
    assert spare == [3, 4]  # These pages were there.
    assert tree.tree.held == {DEVICE: 4, HOST: 0}
    assert text(tree.tree.match(prompt("aabbcc"))) == "cc"
    assert tree.tree.match(prompt("bb")) is tree.tree.root
    assert text(tree.tree.match(prompt("aaxx"))) == "aa"  # It is split once more.
    assert sorted(text(node) for node in tree.tree.nodes()) == ["aa", "bb", "cc", "dd"]
    assert tree.tree.held == {DEVICE: 4, HOST: 0}
    assert end.path()[0].children.keys() == {prompt("aabb")[1].hash}


def test_what_was_elsewhere_only_is_taken_over() -> None:
    tree = Tree()
    end, _ = tree.insert("aabb")
    tree.tree.place(end, HOST, [10, 11])
    tree.tree.place(end, DEVICE, None)
    assert (tree.tree.held, tree.tree.evictable) == ({DEVICE: 0, HOST: 2}, {DEVICE: 0, HOST: 2})
    again, spare = tree.insert("aabb")
    assert (again, again.device, again.host, spare) == (end, [2, 3], [10, 11], [])
    assert tree.tree.evictable == {DEVICE: 2, HOST: 0}


def test_the_longest_unused_goes_first_and_its_parent_after_it() -> None:
    tree = Tree()
    for tokens in ("aabb", "aacc", "dd"):
        tree.insert(tokens)
    tree.tree.match(prompt("aabb"))  # That is used now, and what is before it.
    assert tree.evict(DEVICE, 4) == ["cc", "dd", "bb", "aa"]
    assert list(tree.tree.nodes()) == []
    assert tree.tree.known == set()
    assert tree.tree.held == tree.tree.evictable == {DEVICE: 0, HOST: 0}


def test_what_is_locked_stays_and_what_is_before_it() -> None:
    tree = Tree()
    locked, _ = tree.insert("aabb")
    tree.insert("aacc")
    tree.tree.lock(locked)
    assert tree.tree.evictable[DEVICE] == 1
    assert tree.evict(DEVICE, 9) == ["cc"]
    tree.tree.lock(locked, -1)
    assert tree.tree.evictable[DEVICE] == 2
    assert tree.evict(DEVICE, 9) == ["bb", "aa"]


@pytest.mark.parametrize("hold", ["lock", "pin"])
def test_a_lock_survives_a_split(hold: str) -> None:
    tree = Tree()
    end, _ = tree.insert("aabb")
    tree.tree.place(end, HOST, [10, 11])
    tree.tree.place(end, DEVICE, None)
    getattr(tree.tree, hold)(end)
    upper = tree.tree.match(prompt("aaxx"))
    assert (text(upper), text(end), upper.host, end.host) == ("aa", "bb", [10], [11])
    assert (tree.tree.evictable[HOST], tree.evict(HOST, 9)) == (0, [])
    getattr(tree.tree, hold)(end, -1)
    assert (tree.tree.evictable[HOST], tree.evict(HOST, 9)) == (2, ["bb", "aa"])


def test_the_host_keeps_what_the_device_has() -> None:
    tree = Tree()
    end, _ = tree.insert("aabb")
    tree.tree.place(end, HOST, [10, 11])
    assert tree.evict(HOST) == []
    assert tree.evict(DEVICE) == ["aabb"]
    assert tree.tree.known
    assert tree.evict(HOST) == ["aabb"]
    assert not tree.tree.known


def test_it_tells_what_comes_and_goes() -> None:
    tree = Tree()
    end, _ = tree.insert("aabb")
    hashes = [page.hash for page in prompt("aabb")]
    tokens = [ord(token) for token in "aabb"]
    assert tree.log.take() == [BlockStored(hashes, None, tokens, SIZE, "GPU")]
    tree.insert("aabbcc")
    third = prompt("aabbcc")[2]
    assert tree.log.take() == [BlockStored([third.hash], hashes[1], list(third.tokens), SIZE, "GPU")]
    tree.tree.place(end, HOST, [10, 11])
    tree.tree.match(prompt("aa"))  # A split is nobody's affair.
    tree.evict(DEVICE)
    assert tree.log.take() == [
        BlockStored(hashes, None, tokens, SIZE, "CPU_PINNED"),
        BlockRemoved([third.hash], "GPU"),
    ]
    assert tree.log.take() == []


def test_pages_that_do_not_follow_upon_each_other_are_told_apart() -> None:
    log, pages = EventLog(enabled=True), prompt("aabbccdd")
    log.stored("disk", [pages[0], pages[2], pages[3]])
    first, second = log.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == ([pages[0].hash], None)
    assert (second.block_hashes, second.parent_block_hash) == ([pages[2].hash, pages[3].hash], pages[1].hash)
    log = EventLog(enabled=False)
    log.stored("disk", pages)
    log.removed("disk", [pages[0].hash])
    assert log.take() == []
