"""What is laid out is never too wide, and means the same."""

from __future__ import annotations

import pytest

from catalogue.layout import Bracket, Pair, Text, layout
from catalogue.words import WIDTH


@pytest.mark.parametrize("length", range(80, 130))
def test_layout_never_exceeds_the_line_length(length: int) -> None:
    text = " ".join(["word"] * (length // 5))
    source = layout(Bracket("f(", [Pair("brief=", Text(text))], ")", tall=True))
    assert max(map(len, source.splitlines())) <= WIDTH
    assert eval(source, {"f": lambda brief: brief}) == text
