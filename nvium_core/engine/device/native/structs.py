"""Reads the C++ structs that Python fills from their headers, which alone describe them."""

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
STRUCT = r"^(?:template <.*> )?struct {} {{\n(.*?)^}};"
BODY = re.compile(r"[^;{}]*\{[^{}]*\}")  # of a function
DECLARATION = re.compile(r"\s*(?:const )?(\w+)(?:<[^;]*>)?([ *][\w\s,*]*)")
NUMBERS = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}


@cache
def struct(name: str) -> Any:
    """Return the class of a C++ struct. Its instances have no other attributes than the fields.

    Raise `ValueError` if the struct contains anything but functions, pointers, `int64_t`, `double` and such structs.
    """
    text = re.sub("//.*", "", "".join(header.read_text(encoding="utf-8") for header in FOLDER.glob("*.h")))
    if not (found := re.search(STRUCT.format(name), text, re.MULTILINE | re.DOTALL)):
        raise ValueError(f"Python cannot fill a {name}")
    content, fields = found[1], list[tuple[str, type]]()
    while BODY.search(content):
        content = BODY.sub("", content)
    for declaration in content.split(";")[:-1]:
        if not (found := DECLARATION.fullmatch(declaration)):
            raise ValueError(f"Python cannot fill the field of {name}: {declaration.strip()}")
        kind, names = found.groups()
        pointer = ctypes.c_char_p if kind == "uint8_t" else ctypes.c_void_p
        fields += [(each.strip(" *\n"), pointer if "*" in each else _value(kind)) for each in names.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


def _value(kind: str) -> type:
    return NUMBERS.get(kind) or struct(kind)


def make_struct(name: str, **values: object) -> Any:
    """Return a struct with a value for every field. Fields of None are zero."""
    kind = struct(name)
    assert values.keys() == {field for field, _ in kind._fields_}, f"{name} has other fields in its header"
    return kind(**{field: value for field, value in values.items() if value is not None})
