"""Formulas of suite files, such as `mean(1 - harm, 1 - asr, xstest)`, on numbers or on arrays of them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from coram_hf.errors import CoramError

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Formula:
    """Names, numbers, + - * /, parentheses and mean(...); names of tasks have _ for other characters."""

    def __init__(self, text: str, where: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise CoramError(f"{where}: the formula {text!r} cannot be read: {error.msg}") from None
        self.names: list[str] = []
        self._check(self._tree, where)

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The value for these values of the names."""
        return self._value(self._tree, values)

    def __repr__(self) -> str:
        return f"Formula({self.text!r})"

    def _check(self, node: ast.expr, where: str) -> None:
        match node:
            case ast.Constant(value=int() | float()):
                return
            case ast.Name(id=name):
                self.names += [name] * (name not in self.names)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                self._check(inner, where)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                self._check(left, where)
                self._check(right, where)
            case ast.Call(func=ast.Name(id="mean"), args=[_, *_] as parts, keywords=[]):
                for part in parts:
                    self._check(part, where)
            case _:
                raise CoramError(
                    f"{where}: the formula {self.text!r} may have names, numbers, + - * /, parentheses and "
                    "mean(...) only"
                )

    def _value(self, node: ast.expr, values: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return values[name]
            case ast.UnaryOp(operand=inner):
                return -self._value(inner, values)
            case ast.BinOp(left=left, op=op, right=right):
                return OPERATORS[type(op)](self._value(left, values), self._value(right, values))
            case ast.Call(args=parts):
                found = [self._value(part, values) for part in parts]
                return sum(found[1:], found[0]) / len(found)
        raise AssertionError(node)


def identifier(task: str) -> str:
    """The name of a task in formulas."""
    return re.sub(r"\W", "_", task)
