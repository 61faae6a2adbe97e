"""Walk a protobuf payload byte by byte and say what each byte is, or which is the first that cannot be there.

The protobuf library says only whether a payload is well-formed. This says where it is not, by the same rules as the
library's upb backend (7.36): tests/tools hold the two together on thousands of damaged payloads. The fields come from
the generated schema; there is no second list of them here.
State: one walk. Refuses sockets and whatever is heavier than the schema.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

VARINT, I64, LEN, SGROUP, EGROUP, I32 = range(6)
WIRE_NAMES = {VARINT: "VARINT", I64: "I64", LEN: "LEN", SGROUP: "SGROUP", EGROUP: "EGROUP", I32: "I32"}

_MAX_DEPTH = 100  # messages and groups inside each other, upb's default limit
_MAX_SIZE = 2**31 - 1
_SHOWN = 48

_NATIVE: dict[int, int] = {
    FieldDescriptor.TYPE_BYTES: LEN,
    FieldDescriptor.TYPE_STRING: LEN,
    FieldDescriptor.TYPE_MESSAGE: LEN,
    FieldDescriptor.TYPE_FIXED32: I32,
    FieldDescriptor.TYPE_FLOAT: I32,
    FieldDescriptor.TYPE_FIXED64: I64,
}  # all other types that the schema uses are VARINT


class Line(NamedTuple):
    """Some bytes and what they are. Lines follow each other without a gap; only a missing byte has a line of size 0.

    offset, size   in bytes, from the start of the stream
    depth          0 frame, 1 field of the message, 2 field of a submessage…
    """

    offset: int
    size: int
    depth: int
    name: str
    wire: str = ""
    value: str = ""
    problem: str = ""


class Place(NamedTuple):
    """Where a field's content is: what the line is about, without tag and length."""

    offset: int
    content: bytes


class Wrong(Exception):  # noqa: N818
    """The byte at `offset` (or the number that starts there) cannot be there."""

    def __init__(self, offset: int, text: str):
        super().__init__(text)
        self.offset = offset
        self.text = text


class Walker:
    """One walk through the payload data[start:end].

    data      the whole stream; it may end before `end`
    lines     grows by what was understood
    places    fields of the top message by name; of a repeated one `name[i]`, of one sent twice the last
    depth     of the field that is being read
    strange   fields that the schema does not have, or has with another wire type: legal, and skipped by readers
    """

    def __init__(self, data: bytes, start: int, end: int, message: Descriptor):
        self._data = data
        self._start = start
        self._end = end
        self._message = message
        self.lines: list[Line] = []
        self.places: dict[str, Place] = {}
        self.depth = 1
        self.strange = 0

    def walk(self) -> None:
        """Explain the payload.

        Raises  Wrong; `lines` then hold what is before it
        """
        self._fields(self._start, self._end, self._message, 1)
        if self._end > len(self._data):
            raise self._short(self._end)

    def _fields(self, at: int, end: int, message: Descriptor, depth: int) -> None:
        counts: dict[str, int] = {}
        while at < end and (at < len(self._data) or depth > 1):
            start, self.depth = at, depth
            number, wire, at = self._tag(at, end)
            if number == 0:
                raise Wrong(start, "field number 0 is not allowed")
            if wire == EGROUP:
                raise Wrong(start, f"end of a group of field {number} that was not begun")
            field = message.fields_by_number.get(number)
            name = field.name if field is not None else f"field {number}"
            if field is not None and field.is_repeated:
                index = counts[field.name] = counts.get(field.name, -1) + 1
                name += f"[{index}]" if field.type == FieldDescriptor.TYPE_BYTES else ""
            at = self._field(start, at, end, field, number, wire, name, depth)

    def _field(
        self, start: int, at: int, end: int, field: FieldDescriptor | None, number: int, wire: int, name: str,
        depth: int,
    ) -> int:  # fmt: skip
        label = f"{WIRE_NAMES[wire]} field {number}"
        native = -1 if field is None else _NATIVE.get(field.type, VARINT)
        packed = field is not None and field.is_repeated and native != LEN and wire == LEN
        if field is None or (wire != native and not packed):
            self.strange += 1
            note = "" if field is None else f"{field.name} is {WIRE_NAMES[native]}: "
            return self._skip(start, at, end, number, wire, name, label, note, depth)
        if wire == VARINT:
            value, after = self._varint(at, end, "value")
            self._add(start, after, depth, name, label, number_text(field, value))
        elif wire in (I32, I64):
            after = self._need(at, end, 4 if wire == I32 else 8)
            self._add(start, after, depth, name, label, fixed_text(field, self._data[at:after]))
        else:
            at, after = self._sized(at, end)
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                self._add(start, at, depth, name, label, f"{after - at} bytes: {field.message_type.name}")
                if depth >= _MAX_DEPTH:
                    raise Wrong(start, f"messages inside each other, more than {_MAX_DEPTH} deep")
                self._fields(at, after, field.message_type, depth + 1)
                return after
            content = self._data[at:after]
            if packed:
                text = self._packed(at, after, field, native)
            elif field.type == FieldDescriptor.TYPE_STRING:
                text = self._string(at, content)
            else:
                text = bytes_text(content)
            self._add(start, after, depth, name, label, text)
        if depth == 1:
            self.places[name] = Place(at, self._data[at:after])
        return after

    def _skip(
        self, start: int, at: int, end: int, number: int, wire: int, name: str, label: str, note: str, depth: int
    ) -> int:
        """Step over a field that readers skip; `start` is its tag, `at` what follows."""
        if wire == SGROUP:
            self._add(start, at, depth, name, label, f"{note}group, skipped")
            return self._group(at, end, number, depth + 1)
        if wire == VARINT:
            value, after = self._varint(at, end, "value")
            text = str(value)
        elif wire == LEN:
            at, after = self._sized(at, end)
            text = bytes_text(self._data[at:after])
        else:
            after = self._need(at, end, 4 if wire == I32 else 8)
            text = str(int.from_bytes(self._data[at:after], "little"))
        self._add(start, after, depth, name, label, f"{note}{text}, skipped")
        return after

    def _group(self, at: int, end: int, number: int, depth: int) -> int:
        # Groups may nest 100 deep: a loop with its own stack, so that no input can exhaust Python's.
        open_groups = [number]
        if depth - 1 > _MAX_DEPTH:
            raise Wrong(self.lines[-1].offset, f"groups inside each other, more than {_MAX_DEPTH} deep")
        while open_groups:
            start = at
            inner = self.depth = depth - 1 + len(open_groups)
            number, wire, at = self._tag(at, end)
            label = f"{WIRE_NAMES[wire]} field {number}"
            if wire == EGROUP:
                if number != open_groups[-1]:
                    raise Wrong(start, f"end of group {number} inside group {open_groups[-1]}")
                open_groups.pop()
                self._add(start, at, inner - 1, f"field {number}", label, "end of the group")
            elif wire == SGROUP:
                if inner > _MAX_DEPTH:
                    raise Wrong(start, f"groups inside each other, more than {_MAX_DEPTH} deep")
                open_groups.append(number)
                self._add(start, at, inner, f"field {number}", label, "group, skipped")
            else:
                at = self._skip(start, at, end, number, wire, f"field {number}", label, "", inner)
        return at

    def _add(self, start: int, end: int, depth: int, name: str, wire: str, value: str) -> None:
        self.lines.append(Line(start, end - start, depth, name, wire, value))

    def _tag(self, at: int, end: int) -> tuple[int, int, int]:
        value, after = self._varint(at, end, "tag", 5)
        if value >= 2**32:
            raise Wrong(at, f"tag {value} does not fit 32 bits")
        if value & 7 > I32:
            raise Wrong(at, f"wire type {value & 7} does not exist (tag of field {value >> 3})")
        return value >> 3, value & 7, after

    def _varint(self, at: int, end: int, what: str, longest: int = 10) -> tuple[int, int]:
        value, start = 0, at
        while True:
            if at >= end:
                raise Wrong(start, f"{what} is a varint that does not end inside its message")
            if at >= len(self._data):
                raise self._short(at)
            if at - start == longest:
                raise Wrong(start, f"{what} is a varint of more than {longest} bytes")
            byte = self._data[at]
            value |= (byte & 0x7F) << (7 * (at - start))
            at += 1
            if byte < 0x80:
                return value & (2**64 - 1), at

    def _sized(self, at: int, end: int) -> tuple[int, int]:
        """Read a length; return where its content begins and ends."""
        size, after = self._varint(at, end, "length", 5)
        if size > _MAX_SIZE or after + size > end:
            raise Wrong(at, f"length {size}, but {end - after} bytes are left in the message")
        if after + size > len(self._data):
            raise self._short(after + size)
        return after, after + size

    def _need(self, at: int, end: int, size: int) -> int:
        if at + size > end:
            raise Wrong(at, f"a value of {size} bytes, but {end - at} are left in the message")
        if at + size > len(self._data):
            raise self._short(at + size)
        return at + size

    def _short(self, needed: int) -> Wrong:
        missing = self._end - len(self._data)
        return Wrong(len(self._data), f"the data ends here, {missing} bytes before the end of the frame"
                                      + (" and in the middle of a field" if needed < self._end else ""))  # fmt: skip

    def _packed(self, at: int, end: int, field: FieldDescriptor, native: int) -> str:
        values: list[str] = []
        while at < end:
            if native == VARINT:
                value, at = self._varint(at, end, f"value {len(values)}")
                values.append(number_text(field, value))
            else:
                after = self._need(at, end, 4 if native == I32 else 8)
                values.append(fixed_text(field, self._data[at:after]))
                at = after
        return f"[{', '.join(values)}]"

    def _string(self, at: int, content: bytes) -> str:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise Wrong(at + error.start, "invalid UTF-8 in a string field") from None
        return bytes_text(content, len(content))  # an error's words or a name, no payload: whole


def bytes_text(content: bytes, longest: int = _SHOWN) -> str:
    """Show bytes as text where they are UTF-8, in hexadecimal otherwise; more than `longest` characters end in `…`."""
    try:
        text = content.decode()
        shown = repr(text[:longest])
        rest = "…" if len(text) > longest else ""
    except UnicodeDecodeError:
        shown, rest = content[:_SHOWN // 2].hex(" "), "…" if len(content) > _SHOWN // 2 else ""
    return f"{len(content)} bytes: {shown}{rest}" if content else "0 bytes"


def number_text(field: FieldDescriptor, value: int) -> str:
    """Show a varint the way readers of its type take it."""
    kind = field.type
    if kind == FieldDescriptor.TYPE_BOOL:
        return "true" if value else "false"
    if kind in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM):
        value = (value & 0xFFFF_FFFF) - (2**32 if value & 0x8000_0000 else 0)
    elif kind == FieldDescriptor.TYPE_UINT32:
        value &= 0xFFFF_FFFF
    if kind == FieldDescriptor.TYPE_ENUM and field.enum_type is not None:
        known: Any = field.enum_type.values_by_number.get(value)
        return f"{value} {known.name}" if known is not None else f"{value} (unknown)"
    return str(value)


def fixed_text(field: FieldDescriptor, content: bytes) -> str:
    """Show 4 or 8 bytes; sampling values, which travel times a million, also as what they mean."""
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return f"{struct.unpack('<f', content)[0]:.6g}"
    value = int.from_bytes(content, "little")
    return f"{value} = {value / 1e6:g}" if field.type == FieldDescriptor.TYPE_FIXED32 else str(value)
