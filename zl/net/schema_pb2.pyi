from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RequestType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHAT: _ClassVar[RequestType]
    SUMMARIZE: _ClassVar[RequestType]
    CREATIVE: _ClassVar[RequestType]

class Operation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GENERATE: _ClassVar[Operation]
    CANCEL: _ClassVar[Operation]
    HELLO: _ClassVar[Operation]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEXT: _ClassVar[Encoding]
    TOKENS: _ClassVar[Encoding]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NONE: _ClassVar[FinishReason]
    STOP: _ClassVar[FinishReason]
    LENGTH: _ClassVar[FinishReason]
    CANCELLED: _ClassVar[FinishReason]
    ERROR: _ClassVar[FinishReason]

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OK: _ClassVar[Code]
    BAD_FRAME: _ClassVar[Code]
    BAD_REQUEST: _ClassVar[Code]
    LIMIT_EXCEEDED: _ClassVar[Code]
    UNAUTHENTICATED: _ClassVar[Code]
    OVERLOADED: _ClassVar[Code]
    DEADLINE_EXCEEDED: _ClassVar[Code]
    DRAINING: _ClassVar[Code]
    INTERNAL: _ClassVar[Code]
    NUMERIC: _ClassVar[Code]
    DUPLICATE_ID: _ClassVar[Code]
CHAT: RequestType
SUMMARIZE: RequestType
CREATIVE: RequestType
GENERATE: Operation
CANCEL: Operation
HELLO: Operation
TEXT: Encoding
TOKENS: Encoding
NONE: FinishReason
STOP: FinishReason
LENGTH: FinishReason
CANCELLED: FinishReason
ERROR: FinishReason
OK: Code
BAD_FRAME: Code
BAD_REQUEST: Code
LIMIT_EXCEEDED: Code
UNAUTHENTICATED: Code
OVERLOADED: Code
DEADLINE_EXCEEDED: Code
DRAINING: Code
INTERNAL: Code
NUMERIC: Code
DUPLICATE_ID: Code

class Request(_message.Message):
    __slots__ = ("system_prompt", "messages", "temperature", "top_p", "repetition_penalty", "max_tokens", "type", "request_id", "operation", "encoding", "seed", "stop", "context", "auth_token", "deadline_ms", "ignore_eos", "logprobs")
    SYSTEM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    AUTH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    system_prompt: bytes
    messages: _containers.RepeatedScalarFieldContainer[bytes]
    temperature: int
    top_p: int
    repetition_penalty: int
    max_tokens: int
    type: RequestType
    request_id: int
    operation: Operation
    encoding: Encoding
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[bytes]
    context: bytes
    auth_token: bytes
    deadline_ms: int
    ignore_eos: bool
    logprobs: bool
    def __init__(self, system_prompt: _Optional[bytes] = ..., messages: _Optional[_Iterable[bytes]] = ..., temperature: _Optional[int] = ..., top_p: _Optional[int] = ..., repetition_penalty: _Optional[int] = ..., max_tokens: _Optional[int] = ..., type: _Optional[_Union[RequestType, str]] = ..., request_id: _Optional[int] = ..., operation: _Optional[_Union[Operation, str]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[bytes]] = ..., context: _Optional[bytes] = ..., auth_token: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[bool] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("token_ids", "logprobs", "is_finished", "request_id", "text", "finish_reason", "error", "usage", "server", "seed")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    is_finished: bool
    request_id: int
    text: bytes
    finish_reason: FinishReason
    error: Error
    usage: Usage
    server: ServerInfo
    seed: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., is_finished: _Optional[bool] = ..., request_id: _Optional[int] = ..., text: _Optional[bytes] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., server: _Optional[_Union[ServerInfo, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    retry_after_ms: int
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "constant_tokens", "truncated", "queue_us", "prefill_us", "decode_us", "glue_us")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    GLUE_US_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    constant_tokens: int
    truncated: bool
    queue_us: int
    prefill_us: int
    decode_us: int
    glue_us: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., constant_tokens: _Optional[int] = ..., truncated: _Optional[bool] = ..., queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decode_us: _Optional[int] = ..., glue_us: _Optional[int] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "model", "tokenizer_sha256", "vocab_size", "max_batch", "max_model_len", "max_tokens", "max_messages", "max_frame", "device", "build_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BUILD_ID_FIELD_NUMBER: _ClassVar[int]
    version: str
    model: str
    tokenizer_sha256: str
    vocab_size: int
    max_batch: int
    max_model_len: int
    max_tokens: int
    max_messages: int
    max_frame: int
    device: str
    build_id: str
    def __init__(self, version: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_batch: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_tokens: _Optional[int] = ..., max_messages: _Optional[int] = ..., max_frame: _Optional[int] = ..., device: _Optional[str] = ..., build_id: _Optional[str] = ...) -> None: ...
