"""What is on a terminal's screen, and above it, after all that was written to it: as far as a live display needs it."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|(.)", re.DOTALL)


def on_screen(raw: str, columns: int) -> list[str]:
    """Returns the lines that are there.

    Args:
        raw: What was written.
        columns: How wide the terminal is. It may be as high as one likes.
    """
    lines: list[list[str]] = [[]]
    row = column = 0
    for part in _PART.finditer(raw):
        number, command, letter = part.groups()
        if command == "A":
            row = max(row - int(number or 1), 0)
        elif command == "K":
            lines[row] = []
        elif letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
        elif letter is not None:
            if column == columns:  # Only now: a line that is just full is not left.
                row, column = row + 1, 0
            while len(lines) <= row:
                lines.append([])
            lines[row] += [" "] * (column - len(lines[row]))
            lines[row][column : column + 1] = [letter]
            column += 1
        while len(lines) <= row:
            lines.append([])
    return ["".join(line).rstrip() for line in lines]
