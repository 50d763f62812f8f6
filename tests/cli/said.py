"""What a command has said."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Said(NamedTuple):
    """How a run of a command ended, and what it wrote; `words` is its text with every line break taken out."""

    status: int
    out: str
    err: str

    @property
    def words(self) -> str:
        return " ".join(self.out.split())

    @property
    def sentence(self) -> str:
        """The last paragraph."""
        return " ".join(self.out.rstrip().rpartition("\n\n")[2].split())

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.out)
