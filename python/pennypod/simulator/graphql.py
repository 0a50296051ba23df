"""Enough of GraphQL to read what clients send: operations, selections, aliases, arguments, variables. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_TOKEN = re.compile(
    r"(?P<skip>[\s,\ufeff]+|#[^\n]*)|(?P<name>[_A-Za-z]\w*)|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<spread>\.\.\.)|(?P<mark>[!$():=@\[\]{|}&])'
)


class ParseError(ValueError):
    """The text is no GraphQL that we know."""


class ValidationError(ValueError):
    """The text is GraphQL, but asks for what is not there."""


@dataclass(slots=True)
class Field:
    name: str
    alias: str
    arguments: dict[str, Any] = field(default_factory=dict)
    selection: list[Field] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Operation:
    kind: str
    selection: list[Field]


class _Reader:
    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._variables = variables

    def peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self._at += 1
        return token

    def take(self, wanted: str) -> None:
        found = self.next()
        if found != wanted:
            raise ParseError(f"Syntax Error: Expected {wanted!r}, found {found or '<EOF>'!r}.")

    def operation(self) -> Operation:
        kind = "query"
        if self.peek() != "{":
            kind = self.next()
            if kind not in ("query", "mutation"):
                raise ParseError(f"Syntax Error: Unexpected Name {kind!r}.")
            if self.peek() not in ("(", "{"):
                self.next()
            if self.peek() == "(":
                while self.next() not in (")", ""):  # the variables' types: what is sent decides
                    pass
        operation = Operation(kind, self.selection())
        if self.peek():
            raise ParseError(f"Syntax Error: Unexpected {self.peek()!r}.")
        return operation

    def selection(self) -> list[Field]:
        self.take("{")
        found = []
        while self.peek() not in ("}", ""):
            found.append(self.field())
        self.take("}")
        return found

    def field(self) -> Field:
        name = alias = self._name()
        if self.peek() == ":":
            self.next()
            name = self._name()
        made = Field(name, alias)
        if self.peek() == "(":
            self.next()
            while self.peek() not in (")", ""):
                key = self._name()
                self.take(":")
                made.arguments[key] = self.value()
            self.take(")")
        if self.peek() == "{":
            made.selection = self.selection()
        return made

    def _name(self) -> str:
        token = self.next()
        if not re.fullmatch(r"[_A-Za-z]\w*", token):
            raise ParseError(f"Syntax Error: Expected Name, found {token or '<EOF>'!r}.")
        return token

    def value(self) -> Any:
        word = self.next()
        if word == "$":
            return self._variables.get(self._name())
        if word == "[":
            items = []
            while self.peek() not in ("]", ""):
                items.append(self.value())
            self.take("]")
            return items
        if word == "{":
            made = {}
            while self.peek() not in ("}", ""):
                key = self._name()
                self.take(":")
                made[key] = self.value()
            self.take("}")
            return made
        if word.startswith('"'):
            return json.loads(word)
        if re.fullmatch(r"-?\d+", word):
            return int(word)
        if re.fullmatch(r"-?\d.*", word):
            return float(word)
        known = {"true": True, "false": False, "null": None}
        return known.get(word, word)


def _tokens(text: str) -> list[str]:
    found, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ParseError(f"Syntax Error: Unexpected character: {text[position]!r}.")
        position = match.end()
        if match.lastgroup != "skip":
            found.append(match.group())
    return found


def parse(text: str, variables: Mapping[str, Any] | None = None) -> Operation:
    return _Reader(text, variables or {}).operation()


def shape(value: Any, selection: list[Field], type_name: str) -> Any:
    """The parts of `value` that were asked for. A callable takes the arguments. Raises ValidationError."""
    if value is None:
        return None
    if isinstance(value, list):
        return [shape(item, selection, type_name) for item in value]
    if not isinstance(value, dict):
        if selection:
            raise ValidationError(f'Field must not have a selection since type "{type_name}" has no subfields.')
        return value
    if not selection:
        raise ValidationError(f'Field of type "{type_name}" must have a selection of subfields.')
    made = {}
    for wanted in selection:
        if wanted.name == "__typename":
            made[wanted.alias] = type_name
            continue
        if wanted.name not in value:
            raise ValidationError(f'Cannot query field "{wanted.name}" on type "{type_name}".')
        inner = value[wanted.name]
        inner = inner(wanted.arguments) if callable(inner) else inner
        made[wanted.alias] = shape(inner, wanted.selection, wanted.name[:1].upper() + wanted.name[1:])
    return made


Resolver = Callable[[Mapping[str, Any]], Any]
