"""A terminal that obeys the few commands our output uses, so that a test sees what a person would."""

from __future__ import annotations


class Screen:
    """As wide and as high as need be."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        index = 0
        while index < len(text):
            if text.startswith("\x1b[", index):
                end = next(i for i in range(index + 2, len(text)) if text[i].isalpha())
                self._obey(text[end], text[index + 2 : end])
                index = end + 1
                continue
            char = text[index]
            if char == "\r":
                self.column = 0
            elif char == "\n":
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row + 1 - len(self.rows))
            else:
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + char + line[self.column + 1 :]
                self.column += 1
            index += 1

    def _obey(self, command: str, argument: str) -> None:
        if command == "A":
            self.row -= int(argument)
        elif command == "J":
            self.rows[self.row] = self.rows[self.row][: self.column]
            del self.rows[self.row + 1 :]
        else:
            assert command == "m", f"unknown command {command!r}"  # colours only

    @property
    def text(self) -> list[str]:
        return [row for row in self.rows if row]
