"""The committed schema module is what protoc makes of zl.proto."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zl.errors import Code, Finish
from zl.net import messages, schema_pb2

NET = Path(schema_pb2.__file__).parent
VERSIONS = re.compile(r"# Protobuf Python Version: \S+|    \d+,\n    \d+,\n    \d+,\n")


def test_regeneration_equals_the_committed_files(tmp_path):
    # The name that protoc sees gives the module its name: schema.proto, wherever zl.proto lies.
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-Izl/net/schema.proto={NET / 'zl.proto'}",
         f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "zl/net/schema.proto"],
        check=True,
    )  # fmt: skip
    for name in ("schema_pb2.py", "schema_pb2.pyi"):
        made = VERSIONS.sub("", (tmp_path / "zl" / "net" / name).read_text())
        assert made == VERSIONS.sub("", (NET / name).read_text()), f"{name}: regenerate it as this test does"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Code, schema_pb2.Code),
        (Finish, schema_pb2.FinishReason),
        (messages.RequestType, schema_pb2.RequestType),
        (messages.Operation, schema_pb2.Operation),
        (messages.Encoding, schema_pb2.Encoding),
    ],
)
def test_our_enums_are_the_schemas(ours, theirs):
    assert {member.name: member.value for member in ours} == dict(theirs.items())


def test_the_founding_fields_have_their_numbers():
    request = schema_pb2.Request.DESCRIPTOR.fields_by_number
    assert [request[i].name for i in range(1, 8)] == [
        "system_prompt", "messages", "temperature", "top_p", "repetition_penalty", "max_tokens", "type",
    ]  # fmt: skip
    response = schema_pb2.Response.DESCRIPTOR.fields_by_number
    assert [response[i].name for i in range(1, 4)] == ["token_ids", "logprobs", "is_finished"]


@pytest.mark.parametrize(
    ("ours", "theirs"), [(messages.Usage, schema_pb2.Usage), (messages.ServerInfo, schema_pb2.ServerInfo)]
)
def test_our_records_have_the_schemas_fields(ours, theirs):
    assert list(ours.__slots__) == [field.name for field in theirs.DESCRIPTOR.fields]
