"""Converts JSON values to the types that a dataclass declares, for Rooflab's records and for files of other tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rooflab.bench.base.plain import Json, JsonObject, number_of

Kind = TypeVar("Kind")
_type_hints = cache(get_type_hints)


def decoded(kind: type[Kind], values: Json, place: str = "") -> Kind:
    """Converts a JSON object to the dataclass `kind`.  Ignores fields that the class does not have.

    Raises `ValueError` if a value is missing, has a wrong type, or is refused by its class.  The message holds `place`
    (where the object comes from) and the path of the value."""
    with _at(place):
        decoded_value: Kind = _decode(kind, values, "")
    return decoded_value


def decoded_fields(kind: type, values: JsonObject, place: str) -> dict[str, Any]:
    """Returns the fields of the dataclass `kind` in a JSON object, by name.  Raises `ValueError` like `decoded`."""
    with _at(place):
        return {name: _decode(hint, values[name], name) for name, hint in _type_hints(kind).items() if name in values}


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}, {error}" if place else str(error)) from error


def _decode(kind: Any, value: Json, path: str) -> Any:
    type_args, type_origin, path_prefix = get_args(kind), get_origin(kind) or kind, f"{path}." if path else ""
    if type_origin in (Union, UnionType):
        option_types = [member_type for member_type in type_args if member_type is not NoneType]
        is_unchecked = len(option_types) > 1 or (value is None and len(option_types) < len(type_args))
        return value if is_unchecked else _decode(option_types[0], value, path)
    if type_origin is Literal and value not in type_args:
        raise ValueError(f"{path}: expected one of {', '.join(map(str, type_args))}, got {value!r}")
    if type_origin is float:
        return number_of(path, value)
    if type_origin in (int, bool, str) and type(value) is not type_origin:
        raise ValueError(f"{path}: expected {type_origin.__name__}, got {value!r}")
    if type_origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path}: expected an array, got {value!r}")
        return tuple(_decode(type_args[0], item, f"{path}[{item_index}]") for item_index, item in enumerate(value))
    if type_origin is Mapping or is_dataclass(type_origin):
        if not isinstance(value, dict):
            raise ValueError(f"{path or kind.__name__.lower()}: expected an object, got {value!r}")
        if type_origin is Mapping:
            return {name: _decode(type_args[1], item, f"{path_prefix}{name}") for name, item in value.items()}
        return _object(kind, value, path, path_prefix)
    return value


def _object(kind: Any, values: Mapping[str, Json], path: str, inside: str) -> Any:
    field_values = {}
    for item in fields(kind):
        if item.name in values:
            field_values[item.name] = _decode(_type_hints(kind)[item.name], values[item.name], f"{inside}{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{inside}{item.name}: expected a value, got none")
    try:
        return kind(**field_values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error
