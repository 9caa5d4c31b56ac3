"""What a result file must hold before it is believed: anybody may have edited it, or named something else like one.

Every refusal is a ValueError of a few words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from eaves.bench.benchmark import DTYPES


def parse(content: bytes) -> dict[str, Any]:
    """The file as it is, an object with a protocol."""
    try:
        result = json.loads(content.decode(), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from error
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
    if not isinstance(result, dict):
        raise ValueError("expected an object")
    _check(result, "protocol", "a string", _is_string)
    return result


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


_Test = Callable[[Any], bool]


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Overflow makes infinities, even without a constant of that name."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _or_null(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _check(entry: Mapping[str, Any], key: str, what: str, test: _Test, where: str = "") -> None:
    if key not in entry:
        raise ValueError(f"{where}there is no {key}, expected {what}")
    if not test(entry[key]):
        shown = json.dumps(entry[key])
        raise ValueError(f"{where}{key} is {shown if len(shown) <= 40 else shown[:37] + '...'}, expected {what}")


def check(result: Mapping[str, Any]) -> None:
    """Everything that a page is made of."""
    _check(result, "schema", "1", lambda schema: schema == 1)
    if "stopped" in result:  # only a run that was stopped before its last row says so
        _check(result, "stopped", "true", lambda stopped: stopped is True)
    for key in ("device", "commit", "date"):  # what the page says of each file
        _check(result, key, "a string", _is_string)
    if result.get("cuda") is None:
        _check(result, "cpu_level", "a string", _is_string)
    else:
        _check(result, "cuda", "a string", _is_string)
        _check(result, "driver", "a string", _is_string)
    _check(result, "versions", "an object", _is_object)
    for package in dict.fromkeys(["eaves", "torch", *result["versions"]]):
        _check(result["versions"], package, "a string", _is_string, "versions: ")
    _check(result, "rows", "a list", lambda rows: isinstance(rows, list))
    for index, row in enumerate(result["rows"]):
        _check_row(row, f"rows[{index}]: ")


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where}expected an object")
    _check(row, "mode", "a string", _is_string, where)
    _check(row, "dtype", f"one of {', '.join(DTYPES)}", lambda dtype: _is_string(dtype) and dtype in DTYPES, where)
    _check(row, "shape", "an object", _is_object, where)
    _check(row, "options", "an object", _is_object, where)
    _check(row, "provider", "a string", _is_string, where)
    _check(row, "ms", "a number or null", _or_null(_is_number), where)
    if row["ms"] is None:
        _check(row, "skipped", "a string", _is_string, where)
        return
    for key in ("ms_min", "ms_max", "repetitions"):
        _check(row, key, "a number", _is_number, where)
    for key in ("host_ms", "peak_mib"):
        if key in row:
            _check(row, key, "a number or null", _or_null(_is_number), where)
