"""`zl frame`: make frames from flags, JSON or protobuf text; raw bytes to stdout. Owns no state."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from zl.errors import ConfigError
from zl.streams import standard_input

HELP = "make request frames, as raw bytes"
DESCRIPTION = """\
Make request frames and write them to stdout as raw bytes, for nc, zl nc or a file. Nothing is checked against the
server's rules, so that wrong requests can be made too: zl dissect judges them.

--json reads objects from stdin, one after the other (JSON lines will do). Keys are the schema's field names; text is
plain, sampling values are plain numbers (0.7), a turn that is a list of numbers is token ids, {"base64": "…"} is any
bytes. `system` and `id` stand for system_prompt and request_id. Objects without an id are numbered.
--proto reads one message in protobuf text format, with the numbers as the wire carries them (temperature: 700000).
"""
EPILOG = """\
examples:
  zl frame "What is the capital of France?" | zl nc tcp:127.0.0.1:7433
  zl frame --temperature 0 --max-tokens 8 "Hello" | nc -N 127.0.0.1 7433 | zl dissect -
  zl frame --ping | xxd
  echo '{"messages": ["Hi"], "seed": 7}' | zl frame --json > hi.bin
  echo 'messages: "Hi" temperature: 0 request_id: 1' | zl frame --proto | zl nc unix:/tmp/zl.sock
"""
_ALIASES = {"system_prompt": "system", "id": "request_id"}
_PLAIN = ("request_id", "temperature", "top_p", "repetition_penalty", "max_tokens", "seed", "deadline_ms")
_BYTES = ("system", "context", "auth_token")
_FLAGS = ("ignore_eos", "logprobs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the turns and one flag for each field."""
    parser.add_argument("turns", nargs="*", default=[], metavar="TURN", help="user, assistant, user… in turn")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="read requests as JSON objects from stdin")
    kinds.add_argument("--proto", action="store_true", help="read one zl.Request in protobuf text format from stdin")
    kinds.add_argument("--ping", action="store_true", help="make a ping")
    kinds.add_argument("--cancel", action="store_true", help="make a CANCEL of --id")
    kinds.add_argument("--hello", action="store_true", help="make a HELLO")
    parser.add_argument("--id", dest="request_id", type=int, metavar="N", default=1,
                        help="request id; with --json, of the first object without one (default: 1)")  # fmt: skip
    parser.add_argument("--tokens", action="store_true", help="texts are token ids, as in '504 3575 282'")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--context", metavar="TEXT", help="retrieved text")
    parser.add_argument("--type", metavar="NAME", help="chat, summarize, creative, or a number")
    for name in ("temperature", "top_p", "repetition_penalty"):
        parser.add_argument("--" + name.replace("_", "-"), type=float, metavar="X", help=f"{name}, plain")
    for name in ("max_tokens", "seed", "deadline_ms"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, metavar="N", help=name)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop string; may be repeated")
    parser.add_argument("--auth-token", metavar="TEXT", help="for --hello; seen by other users in the process list")
    for name in _FLAGS:
        parser.add_argument("--" + name.replace("_", "-"), action="store_true", help=f"set {name}")


def run(args: argparse.Namespace) -> int:
    """Write the frames."""
    if args.turns and (args.json or args.proto or args.ping or args.cancel or args.hello):
        raise ConfigError("turns go with none of --json, --proto, --ping, --cancel and --hello: leave one of them out")
    made = b"".join(frames(args))  # all or nothing: where one is wrong, none goes down the pipe
    sys.stdout.buffer.write(made)
    sys.stdout.buffer.flush()
    return 0


def frames(args: argparse.Namespace) -> Iterator[bytes]:
    """Make what the flags ask for."""
    from zl.net.frames import PING

    if args.ping:
        yield PING
    elif args.proto:
        yield from_proto(standard_input().read())
    elif args.json:
        next_id = args.request_id
        for number, record in enumerate(json_objects(standard_input().read()), 1):
            if not {"id", "request_id"} & record.keys():
                record["request_id"] = next_id
                next_id += 1
            yield from_record(record, f"object {number}")
    else:
        given = {name: value for name, value in vars(args).items() if name in (*_PLAIN, *_BYTES, *_FLAGS, "type")}
        record = {name: value for name, value in given.items() if value is not None and value is not False}
        record |= {"messages": args.turns, "stop": args.stop or []}
        if args.tokens:
            for name in ("system", "context"):
                if name in record:
                    record[name] = _ids(record[name])
            record["messages"] = [_ids(turn) for turn in args.turns]
        if args.cancel or args.hello:
            record["operation"] = "CANCEL" if args.cancel else "HELLO"
        yield from_record(record, "flags")


def from_record(record: Mapping[str, Any], where: str) -> bytes:
    """Make one frame from plain values by field name; `where` is for error texts.

    Raises  ConfigError: a key that does not exist, or a value that fits no field
    """
    from zl.net.codec import encode_request
    from zl.net.messages import Encoding, Operation, RequestType

    fields: dict[str, Any] = {}
    in_tokens = False
    for key, value in record.items():
        name = _ALIASES.get(key, key)
        try:
            if name in _PLAIN or name in _FLAGS:
                fields[name] = value
            elif name in _BYTES:
                in_tokens |= isinstance(value, list)
                fields[name] = _content(value)
            elif name in ("messages", "stop"):
                turns = [value] if isinstance(value, str) else value
                in_tokens |= any(isinstance(turn, list) for turn in turns)
                fields[name] = [_content(turn) for turn in turns]
            elif name in ("type", "operation", "encoding"):
                kind = {"type": RequestType, "operation": Operation, "encoding": Encoding}[name]
                if not str(value).isdigit() and str(value).upper() not in kind.__members__:
                    named = ", ".join(kind.__members__).lower()
                    raise ConfigError(f"{where}: {key} cannot be {value!r}: it is one of {named}, or a number")
                fields[name] = int(value) if str(value).isdigit() else int(kind[str(value).upper()])
            else:
                known = ("messages", "stop", "type", "operation", "encoding", *_ALIASES, *_PLAIN, *_BYTES, *_FLAGS)
                raise ConfigError(f"{where}: no field is called {key!r}; there are {', '.join(known)}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: {key} cannot be {value!r}: {error}") from error
    if in_tokens:
        fields.setdefault("encoding", int(Encoding.TOKENS))
    fields.setdefault("request_id", 0)
    try:
        return encode_request(**fields)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def from_proto(text: str) -> bytes:
    """Make one frame from a `zl.Request` in protobuf text format.

    Raises  ConfigError: the text is none; the message has line and column
    """
    from google.protobuf import text_format

    from zl.net import schema_pb2
    from zl.net.frames import frame

    try:
        message = text_format.Parse(text, schema_pb2.Request())
    except text_format.ParseError as error:
        raise ConfigError(f"stdin is no zl.Request in protobuf text format: {error}") from error
    return frame(message.SerializeToString())


def json_objects(text: str) -> Iterator[dict[str, Any]]:
    """Read JSON objects that follow each other.

    Raises  ConfigError: what follows is no JSON object; the message has line and column
    """
    decoder, at = json.JSONDecoder(), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            value, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise ConfigError(f"stdin, line {error.lineno}, column {error.colno}: {error.msg}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"stdin: {value!r} is no JSON object: write {{\"messages\": [\"Hi\"]}}")
        yield value


def _content(value: Any) -> bytes:
    """Turn text, ids or {"base64": …} into the bytes of a field."""
    import base64

    from zl.net.codec import pack_tokens

    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list):
        return pack_tokens(value)
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    raise TypeError("it must be text, a list of token ids, or an object with base64")


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"--tokens: {text!r} is no list of numbers: {error}") from error
