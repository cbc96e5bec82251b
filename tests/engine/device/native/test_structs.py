import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from nvium_core.engine.device.native import library
from nvium_core.engine.device.native.library import FOLDER, make_struct, struct
from nvium_core.engine.sampling_params import DRAW
from nvium_core.engine.schedule.sequence import FIELDS
from nvium_core.model.plan import LayerCall

TEMPLATES = ["Layer", "Exit", "Model"]
PLAIN = ["Emission", "Run", "BlockReport", "Call", "Change", "Draw", "Seat", "Matrix", "StoredRows"]
FOREIGN = ["int32_t a", "bool a", "int64_t a[2]", "int64_t a = 1", "std::vector<int64_t> a", "int64_t& a"]


def compiler_error(checks: list[str]) -> str:
    source = '#include <cstddef>\n#include "call.h"\n#include "pack.h"\n' + "\n".join(checks)
    command = ["c++", "-std=c++20", "-Wno-psabi", "-fsyntax-only", f"-I{FOLDER}", "-xc++", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_fields_are_where_the_compiler_places_them():
    checks = list[str]()
    for name in (*TEMPLATES, *PLAIN):
        kind, cpp = struct(name), f"nvium::{name}<float>" if name in TEMPLATES else f"nvium::{name}"
        checks.append(f"static_assert(sizeof({cpp}) == {ctypes.sizeof(kind)});")
        for field, _ in kind._fields_:
            place = getattr(kind, field)
            checks.append(f"static_assert(offsetof({cpp}, {field}) == {place.offset});")
            checks.append(f"static_assert(sizeof({cpp}::{field}) == {place.size});")
    assert compiler_error(checks) == ""
    assert "static assertion failed" in compiler_error([checks[0].replace("==", "!=")])


def test_draws_and_changes_have_the_fields_of_the_engines_arrays():
    assert np.dtype(struct("Draw")) == DRAW
    assert np.dtype(struct("Change")) == [(name, float) for name in FIELDS]


@pytest.fixture
def header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of call.h, from which structs are read."""
    monkeypatch.setattr(library, "struct", cache(struct.__wrapped__))
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    (tmp_path / "call.h").write_text((FOLDER / "call.h").read_text())
    return tmp_path / "call.h"


def insert_field(header: Path, field: str) -> None:
    """Insert a field after the first field of `Run`."""
    fields = f"int64_t seat;  // first; next\n  {field};\n  int64_t stop,"
    header.write_text(header.read_text().replace("int64_t seat, stop,", fields))


def test_a_new_field_needs_no_description_in_python(header):
    insert_field(header, "double *a, b")
    run = library.struct("Run")
    assert (run.a.offset, run.b.offset, run.stop.offset) == (8, 16, 24)
    assert run(b=0.5).b == 0.5


@pytest.mark.parametrize("field", FOREIGN)
def test_a_field_that_python_cannot_fill_is_refused(header, field):
    insert_field(header, field)
    with pytest.raises(ValueError, match=r"Python cannot fill"):
        library.struct("Run")


def test_a_struct_takes_its_own_fields_only_and_all_of_them():
    assert make_struct("Emission", token=1, block=2, log_p=0.5).log_p == 0.5
    for values in ({"token": 1, "block": 2}, {"token": 1, "block": 2, "log_p": 0.5, "extra": 3}):
        with pytest.raises(AssertionError, match="Emission has other fields"):
            make_struct("Emission", **values)
    with pytest.raises(TypeError):
        make_struct("Emission", token=0.5, block=2, log_p=0.5)
    with pytest.raises(AttributeError):
        struct("Emission")().tokens = 1


def test_a_call_has_no_field_that_the_kernels_do_not_read():
    """`norms` is the exception: the kernels see them by their weights."""
    assert {name for name, _ in struct("LayerCall")._fields_} == {*LayerCall._fields} - {"norms"}
