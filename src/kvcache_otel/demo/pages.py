"""Pages: a fixed number of tokens, known by a hash of all tokens up to their end."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Page(NamedTuple):
    """One page of a prompt.

    Attributes:
        hash: Of its tokens and all before them: two pages with the same hash are the same prefix. 64 bits, signed.
        parent: The hash of the page before it; None for the first of a prompt.
        tokens: Its tokens. The last page of a running request may have fewer than others.
    """

    hash: int
    parent: int | None
    tokens: tuple[int, ...]


def make_page(parent: int | None, tokens: Sequence[int]) -> Page:
    """Returns the page of some tokens after another page."""
    before = b"" if parent is None else parent.to_bytes(8, "big", signed=True)
    digest = blake2b(before + array("q", tokens).tobytes(), digest_size=8).digest()
    return Page(int.from_bytes(digest, "big", signed=True), parent, tuple(tokens))


def split(tokens: Sequence[int], size: int) -> Iterator[Page]:
    """Yields the pages of a prompt, the last of them with what is left over."""
    parent: int | None = None
    for start in range(0, len(tokens), size):
        page = make_page(parent, tokens[start : start + size])
        parent = page.hash
        yield page


def content(page: Page, size: int) -> bytes:
    """Returns the bytes that a page must have, wherever it is: what a model would have computed for its tokens."""
    return page.hash.to_bytes(8, "big", signed=True) * (size // 8)
