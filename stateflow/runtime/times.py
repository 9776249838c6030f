"""Arrow's times as Python has them: in zones by names that Python knows, and in microseconds."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.types as t

from stateflow.errors import InvalidArgument

#: java.time.ZoneId.SHORT_IDS
_SHORT = {
    "ACT": "Australia/Darwin",
    "AET": "Australia/Sydney",
    "AGT": "America/Argentina/Buenos_Aires",
    "ART": "Africa/Cairo",
    "AST": "America/Anchorage",
    "BET": "America/Sao_Paulo",
    "BST": "Asia/Dhaka",
    "CAT": "Africa/Harare",
    "CNT": "America/St_Johns",
    "CST": "America/Chicago",
    "CTT": "Asia/Shanghai",
    "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris",
    "EST": "-05:00",
    "HST": "-10:00",
    "IET": "America/Indiana/Indianapolis",
    "IST": "Asia/Kolkata",
    "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia",
    "MST": "-07:00",
    "NET": "Asia/Yerevan",
    "NST": "Pacific/Auckland",
    "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix",
    "PRT": "America/Puerto_Rico",
    "PST": "America/Los_Angeles",
    "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh",
}
#: offsets as java.time.ZoneOffset reads them, and Spark, which takes ``+h:mm`` and ``+hh:m`` too
_OFFSET = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{1,2})(?::?(\d\d))?)?", re.ASCII)
_HOURS_MAX = 18
_EPOCH, _MICROSECOND = datetime(1970, 1, 1), timedelta(microseconds=1)
_FIRST_US, _LAST_US = ((end - _EPOCH) // _MICROSECOND for end in (datetime.min, datetime.max))


@functools.lru_cache(maxsize=256)
def python_zone(name: str) -> str:
    """Returns the name that Python and Arrow have for a zone of ``java.time.ZoneId`` or of the tz database.

    >>> python_zone("GMT+2"), python_zone("PST"), python_zone("Europe/Berlin")
    ('+02:00', 'America/Los_Angeles', 'Europe/Berlin')

    Raises InvalidArgument for a zone that Python does not have.
    """
    found = _SHORT.get(name, name)
    if found in ("Z", "UT"):
        found = "UTC"
    elif (offset := _OFFSET.fullmatch(found)) is not None:
        found = _offset(offset) or found
    try:
        pa.scalar(0, pa.timestamp("us", tz=found)).as_py()
    except Exception as error:  # a zone database may raise anything
        raise InvalidArgument(
            f"Python does not know the time zone {name!r}",
            remedy="use a tz database name such as Europe/Berlin, or an offset such as +02:00; in Spark: "
            'spark.conf.set("spark.sql.session.timeZone", …)',
        ) from error
    return found


def _offset(read: re.Match[str]) -> str | None:
    """Returns ``+hh:mm``; None for an invalid offset, and for one with seconds, which Arrow cannot represent."""
    sign, *said = read.groups()
    hours, minutes, seconds = (int(each or 0) for each in said)
    if (hours, minutes) > (_HOURS_MAX, 0) or minutes > 59 or seconds:
        return None
    return f"{sign}{hours:02}:{minutes:02}" if hours or minutes else "UTC"


def in_python_zones(schema: pa.Schema) -> pa.Schema:
    """Returns the schema with the zones of its times, also nested ones, as Python has them. Raises InvalidArgument."""
    fields = []
    for field in schema:
        try:
            fields.append(field.with_type(_with_times(field.type, _zoned)))
        except InvalidArgument as error:
            error.located(column=field.name)
            raise
    return schema if fields == list(schema) else pa.schema(fields, schema.metadata)


def time_of(scalar: pa.Scalar) -> datetime:
    """Returns a time in its zone when its year there is in Python's range, even if its year in UTC is not; else in UTC.

    Raises OverflowError when neither year is.
    """
    try:
        plain: datetime = scalar.as_py()
        return plain
    except (ValueError, OverflowError):
        micros = scalar.cast(pa.timestamp("us", scalar.type.tz)).value
    zone = pa.scalar(0, pa.timestamp("us", scalar.type.tz)).as_py().tzinfo
    offset = zone.utcoffset(datetime.max if micros > 0 else datetime.min)
    for since_us, named in ((micros + offset // _MICROSECOND, zone), (micros, ZoneInfo("UTC"))):
        if _FIRST_US <= since_us <= _LAST_US:
            found: datetime = (_EPOCH + since_us * _MICROSECOND).replace(tzinfo=named)
            return found
    raise OverflowError("its year is outside 1 to 9999")


def in_micros(kind: pa.DataType) -> pa.DataType:
    """Returns the type with its times, also nested ones, in microseconds where they are in nanoseconds."""
    return _with_times(kind, _in_micros)


def _zoned(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp(kind.unit, python_zone(kind.tz)) if t.is_timestamp(kind) and kind.tz is not None else kind


def _in_micros(kind: pa.DataType) -> pa.DataType:
    if t.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if t.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    return pa.time64("us") if t.is_time64(kind) and kind.unit == "ns" else kind


def _with_times(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Returns the type with its innermost types changed."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind
    if not kind.num_fields:
        return change(kind)
    fields = [kind.field(number) for number in range(kind.num_fields)]
    if t.is_map(kind):
        fields = [kind.key_field, kind.item_field]
    inner = [field.with_type(_with_times(field.type, change)) for field in fields]
    made: list[tuple[Callable[[pa.DataType], bool], Callable[[], pa.DataType]]] = [
        (t.is_struct, lambda: pa.struct(inner)),
        (t.is_map, lambda: pa.map_(*inner, kind.keys_sorted)),
        (t.is_large_list, lambda: pa.large_list(inner[0])),
        (t.is_fixed_size_list, lambda: pa.list_(inner[0], kind.list_size)),
        (t.is_list, lambda: pa.list_(inner[0])),
    ]
    return next((make() for told, make in made if told(kind)), kind)
