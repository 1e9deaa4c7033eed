"""Parameters of the residual pathway: density, scale, rank and trim, as far as the chosen merge has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coram_hf.config.declared import Declared, Range, check_names
from coram_hf.errors import CoramError

PARAMETERS: dict[str, Declared] = {
    "density": Declared("density", float, range=Range("(0, 1]")),
    "scale": Declared("scale", float),
    "rank": Declared("rank", int, range=Range("[1, inf)")),
    "trim": Declared("trim", str, choices=("tensor", "global")),
}
OF = {"ta": ("scale",), "ties": ("density", "scale", "trim"), "tsvm": ("scale", "rank")}
"""The parameters of every residual pathway."""

WHERE = "residual_parameters"


def check_residual_parameters(given: Any) -> dict[str, Any] | None:
    """Return the parameters by name, or None if there are none; text as on the command line is read first."""
    found = read_residual_parameters(given) if isinstance(given, str) else given
    if not isinstance(found, Mapping):
        raise CoramError(f"{WHERE} must map {', '.join(PARAMETERS)} to values, found {given!r}")
    check_names(found, list(PARAMETERS), "residual parameter")
    return {name: PARAMETERS[name].checked(value, WHERE) for name, value in found.items()} or None


def check_pathway(residual: str | None, parameters: Mapping[str, Any] | None) -> None:
    """Raise for parameters that the residual pathway does not have."""
    if parameters and residual is None:
        raise CoramError(f'{WHERE} need a residual pathway; pass residual="ta", "ties" or "tsvm"')
    for name in parameters or ():
        if name not in OF[str(residual)]:
            valid = ", ".join(OF[str(residual)])
            raise CoramError(f"{WHERE}: the residual pathway {residual!r} has no {name}; valid: {valid}")


def read_residual_parameters(text: str) -> dict[str, Any]:
    """Parameters as written on the command line: density=0.3,trim=global."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, mark, value = (word.strip() for word in part.partition("="))
        if not mark or not value:
            raise CoramError(f"{WHERE}: expected name=value, separated by commas, found {text!r}")
        try:
            found[name] = value if name == "trim" else int(value) if name == "rank" else float(value)
        except ValueError:
            raise CoramError(f"{WHERE}: {name} must be a number, found {value!r}") from None
    return found


def write_residual_parameters(parameters: Mapping[str, Any]) -> str:
    """Parameters as text, the inverse of `read_residual_parameters`."""
    return ",".join(f"{name}={value}" for name, value in parameters.items())
