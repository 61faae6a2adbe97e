"""The server's settings: one frozen object, put together from defaults, a TOML file, `ZL_*` and flags, checked once.

A setting has one name in all places: `max_rows` in the file, `ZL_MAX_ROWS` in the environment, `--max-rows` as a
flag. The later source wins; `config_sources` reads what each says. Owns no state; refuses torch, asyncio and whatever
serves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from zl import config_sources, policy, readers, shapes
from zl.address import default_listen
from zl.errors import ConfigError

CPU_LEVELS = ("auto", "amx", "avx512", "avx512f", "avx2", "torch")
LOG_FORMATS = ("auto", "text", "logfmt", "json")
_FRAME_SIZES = (1_024, 64 * 2**20)


@dataclass(frozen=True, slots=True)
class Spec:
    """What a setting is beside its default: its TOML table, its reader, its place in `--help`."""

    section: str
    read: Callable[[object], Any]
    allowed: str
    help: str
    metavar: str = "N"
    many: bool = False  # a list in TOML, a repeatable flag
    bare: str = ""  # what the flag means without a value
    flag: bool = True  # secrets and long texts have none: a command line can be read by every user of the machine


def _setting(default: Any, spec: Spec, **more: Any) -> Any:
    made: dict[str, Any] = {"default_factory": default} if callable(default) else {"default": default}
    return field(metadata={"spec": spec}, **made, **more)


def _count(section: str, low: int, high: int, default: int, help: str) -> Any:
    return _setting(default, Spec(section, readers.whole(low, high), f"a whole number from {low} to {high}", help))


def _period(section: str, low: float, high: float, default: float, help: str) -> Any:
    spec = Spec(section, readers.number(low, high), f"seconds from {low:g} to {high:g}", help, metavar="SECONDS")
    return _setting(default, spec)


def _choice(section: str, choices: tuple[str, ...], default: str, help: str) -> Any:
    bar = "|".join(choices)
    return _setting(default, Spec(section, readers.one_of(*choices), "one of " + ", ".join(choices), help, metavar=bar))


def _switch(section: str, help: str) -> Any:
    spec = Spec(section, readers.one_of("off", "on"), "one of off, on", help, metavar="off|on", bare="on")
    return _setting("off", spec)


def _action(limit: str, help: str) -> Any:
    return _choice("policy", policy.actions_of(limit), policy.DEFAULTS[limit], help)


def _temperature(default: float, help: str) -> Any:
    spec = Spec("policy", readers.number(0, 100), "a number from 0 to 100", help, metavar="T")
    return _setting(default, spec)


def _file(section: str, help: str) -> Any:
    return _setting("", Spec(section, readers.path, "the path of a file that this user can read", help, metavar="FILE"))


_MODEL = Spec("model", readers.name, "a path, or a name that `zl pull` knows",
              "GGUF file, Hugging Face folder, or a name that `zl pull` knows", metavar="PATH|NAME")  # fmt: skip
_KV_MEMORY = Spec("model", readers.size, "a size such as 2GiB, or 0 to choose by the memory that is free",
                  "memory for the KV pool, for example 2GiB; 0 chooses", metavar="SIZE")  # fmt: skip
_PROMPTS = Spec("model", readers.texts, "a list of texts (as JSON in the environment)",
                "system prompts computed once at start", flag=False)  # fmt: skip
_LISTEN = Spec("server", readers.listen, "tcp:HOST:PORT or unix:PATH, one or more",
               "tcp:HOST:PORT or unix:PATH; may be repeated", metavar="ADDR", many=True)  # fmt: skip
_METRICS = Spec("server", readers.metrics, "HOST:PORT or off", "where metrics are scraped", metavar="HOST:PORT|off")
_TOKEN = Spec("server", readers.secret, "a text that is not empty", "secret that clients must say hello with",
              flag=False)  # fmt: skip
_LOG_FILE = Spec("server", readers.text, "a path in a folder that this user may write",
                 "file to log to, opened anew at each reload; stderr where none is named", metavar="FILE")  # fmt: skip
_ACCESS = Spec("logs", readers.name, "the path of a file, or off", "file for one JSON line a finished request",
               metavar="FILE|off")  # fmt: skip
_AUDIT = Spec("logs", readers.name, "the path of a file, or off", "file for the amounts, dates and the like in answers",
              metavar="FILE|off")  # fmt: skip
_PATTERNS = Spec("logs", readers.patterns, "a table of names and regular expressions (as JSON in the environment)",
                 "what is audited, beside or in place of the defaults", flag=False)  # fmt: skip
_LOG_SIZE = Spec("logs", readers.size, "a size from 4KiB to 1TiB", "size at which a file is put aside", metavar="SIZE")
_LOG_SIZES = (4 << 10, 1 << 40)
_MAX_FRAME = Spec("limits", readers.size, "a size from 1KiB to 64MiB", "largest payload of a frame", metavar="SIZE")


@dataclass(frozen=True)
class Settings:
    """Everything that `zl serve` can be told. Sizes in bytes, periods in seconds, lengths in tokens."""

    model: str = _setting("smollm2-135m-instruct", _MODEL)
    device: str = _choice("model", ("auto", "cpu", "cuda"), "auto", "where the model runs")
    dtype: str = _choice("model", ("auto", "float32", "bfloat16"), "auto", "arithmetic of the model")
    kv: str = _choice("model", ("auto", "int8"), "auto", "what keys and values are kept in; auto is the dtype")
    penalty_filter: str = _choice(
        "model", ("auto", "exact", "bloom"), "auto", "what remembers a row's tokens for the penalty; auto: exact"
    )
    cpu_level: str = _choice("model", CPU_LEVELS, "auto", "instruction sets of the CPU program; torch is the slow twin")
    threads: int = _count("model", 0, shapes.MAX_THREADS, 0, "compute threads on the CPU; 0 takes one for each core")
    heartbeat_s: float = _period("model", 0, 3_600, 60.0, "time between two checks of the program; 0 turns them off")
    kv_memory: int = _setting(0, _KV_MEMORY)
    system_prompts: tuple[str, ...] = _setting((), _PROMPTS)
    artifact: str = _choice("model", ("auto", "off"), "auto", "auto keeps each build in the cache for a quick start")
    debug_addresses: str = _switch("model", "on CUDA, check before each step that nothing moved")
    nvtx: str = _switch("model", "name what a step does for Nsight Systems; needs a torch built for CUDA")

    listen: tuple[str, ...] = _setting(default_listen, _LISTEN)
    metrics: str = _setting(f"127.0.0.1:{readers.METRICS_PORT}", _METRICS)
    auth_token: str = _setting("", _TOKEN, repr=False)
    auth_token_file: str = _file("server", "file with the secret that clients must say hello with")
    tls_cert: str = _file("server", "PEM certificate chain; TCP listeners then speak TLS")
    tls_key: str = _file("server", "PEM private key of the certificate")
    drain_s: float = _period("server", 0, 3_600, 30.0, "how long running answers may go on after SIGTERM")
    log_level: str = _choice("server", ("debug", "info", "warning", "error"), "info", "least severe line to log")
    log_format: str = _choice("server", LOG_FORMATS, "auto", "how lines look; auto is logfmt in the journal, else text")
    log_file: str = _setting("", _LOG_FILE)

    max_rows: int = _count("limits", 1, shapes.MAX_ROWS, shapes.MAX_ROWS, "answers generated at the same time")
    max_model_len: int = _count("limits", shapes.PAGE, 2**20, shapes.MODEL_LEN, "most tokens of prompt and answer")
    max_tokens: int = _count("limits", 1, 2**20, shapes.MAX_TOKENS, "most tokens of an answer")
    default_tokens: int = _count("limits", 1, 2**20, shapes.DEFAULT_TOKENS, "tokens of an answer when not said")
    system_tokens: int = _count("limits", 1, 2**20, shapes.SYSTEM_TOKENS, "token budget of the system prompt")
    context_tokens: int = _count("limits", 0, 2**20, shapes.CONTEXT_TOKENS, "token budget of the context field")
    step_tokens: int = _count("limits", 2, 2**16, 512, "most tokens computed in one step")
    max_queue: int = _count("limits", 0, 2**20, 1_024, "requests that may wait for a row")
    berths: int = _count("limits", 1, 2**16, 256, "frames in the arena at once, those of waiting token ids included")
    max_frame: int = _setting(shapes.MAX_FRAME, _MAX_FRAME)
    frame_timeout_s: float = _period("limits", 0.05, 3_600, 10.0, "time in which a begun frame must be complete")

    on_max_tokens: str = _action("max_tokens", "what becomes of a request for more than max_tokens")
    on_temperature: str = _action("temperature", "what becomes of a temperature below temperature_low or above _high")
    on_messages: str = _action("messages", "what becomes of more than 16 messages; allow takes up to 64")
    on_system_tokens: str = _action("system_tokens", "what becomes of a system prompt over system_tokens")
    on_context_tokens: str = _action("context_tokens", "what becomes of retrieved text over context_tokens")
    on_prompt_tokens: str = _action("prompt_tokens", "what becomes of messages that the model cannot hold")
    temperature_low: float = _temperature(policy.TEMPERATURES[0], "lowest temperature that is not exceptional")
    temperature_high: float = _temperature(policy.TEMPERATURES[1], "highest temperature that is not exceptional")

    access_log: str = _setting("off", _ACCESS)
    access_files: int = _count("logs", 0, 10_000, 8, "access logs put aside that are kept; 0 keeps all")
    audit_log: str = _setting("off", _AUDIT)
    audit_files: int = _count("logs", 0, 10_000, 0, "audit logs put aside that are kept; 0 keeps all")
    audit_patterns: tuple[tuple[str, str], ...] = _setting((), _PATTERNS)
    log_bytes: int = _setting(64 << 20, _LOG_SIZE)

    @property
    def actions(self) -> dict[str, str]:
        """By threshold of `zl.policy`, what becomes of a request that passes it."""
        return {limit: getattr(self, f"on_{limit}") for limit in policy.DEFAULTS}


SETTINGS: tuple[Field[Any], ...] = fields(Settings)
"""The settings in the order of `--help`; `spec_of` tells more about each."""

POLICY = tuple(each.name for each in SETTINGS if each.metadata["spec"].section == "policy")
"""The settings that decide what becomes of a request past a threshold."""

_NO_SETTING = dict.fromkeys(("port", "host", "bind", "address"), ("listen", "tcp:127.0.0.1:7433"))
"""What many name a setting by habit that has another name here."""

_SECTIONS = {each.name: each.metadata["spec"].section for each in SETTINGS}


def spec_of(name: str) -> Spec:
    """Return the Spec of one setting."""
    found: Spec = Settings.__dataclass_fields__[name].metadata["spec"]
    return found


def load(
    flags: Mapping[str, object] | None = None,
    *,
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Put the settings together: defaults, then `file` (or `ZL_CONFIG`), then `ZL_*`, then `flags` that are not None.

    Raises  ConfigError: key, source, value and what is allowed
    """
    environ = os.environ if environ is None else environ
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    said = "config file" if file else "config file (ZL_CONFIG)"
    file = file or environ.get("ZL_CONFIG") or None
    layers = [config_sources.from_file(Path(file), _SECTIONS, _NO_SETTING, said)] if file else []
    layers.append(config_sources.from_environ(environ, _SECTIONS, _NO_SETTING))
    layers.append(config_sources.from_flags(flags or {}, _SECTIONS))
    for layer in layers:
        for name, source, value in layer:
            given[name], sources[name] = _read(name, source, value), source
    if given.get("auth_token_file"):
        if given.get("auth_token"):
            raise ConfigError(f"auth_token ({sources['auth_token']}) and auth_token_file "
                              f"({sources['auth_token_file']}) are both set: keep one")  # fmt: skip
        given["auth_token"] = readers.read_token(
            given["auth_token_file"], f"auth_token_file ({sources['auth_token_file']})"
        )
    settings = Settings(**_fitting_defaults(given) | {"listen": default_listen(environ)} | given)
    _check(settings, sources)
    return settings


def _read(name: str, source: str, value: object) -> Any:
    spec = spec_of(name)
    try:
        return spec.read(value)
    except readers.ValueRefusedError as refused:
        shown = "(hidden)" if name == "auth_token" and value != "" else repr(value)
        allowed = refused.args[0] if refused.args else spec.allowed
        raise ConfigError(f"{name} = {shown} ({source}): must be {allowed}") from None


def _fitting_defaults(given: Mapping[str, Any]) -> dict[str, int]:
    """Shrink or widen the defaults that hang on a given size, so that setting one size does not ask for four more."""
    model_len = given.get("max_model_len", shapes.MODEL_LEN)
    max_tokens = given.get("max_tokens", min(shapes.MAX_TOKENS, model_len // 2))
    return {
        "max_tokens": max_tokens,
        "default_tokens": min(shapes.DEFAULT_TOKENS, max_tokens),
        "system_tokens": min(shapes.SYSTEM_TOKENS, model_len // 4),
        "context_tokens": min(shapes.CONTEXT_TOKENS, model_len // 4),
        "max_rows": min(shapes.MAX_ROWS, given.get("step_tokens", 2 * shapes.MAX_ROWS) // 2),
    }


def _check(settings: Settings, sources: Mapping[str, str]) -> None:
    """Hold the settings against each other and against the file system."""

    def refuse(name: str, must: str) -> NoReturn:
        raise ConfigError(f"{name} = {getattr(settings, name)!r} ({sources.get(name, 'the default')}): must be {must}")

    if not _FRAME_SIZES[0] <= settings.max_frame <= _FRAME_SIZES[1]:
        refuse("max_frame", spec_of("max_frame").allowed)
    if not _LOG_SIZES[0] <= settings.log_bytes <= _LOG_SIZES[1]:
        refuse("log_bytes", spec_of("log_bytes").allowed)
    if settings.audit_log == settings.access_log != "off":
        refuse("audit_log", "another file than access_log")
    if settings.kv == "int8" and settings.dtype == "float32":
        refuse("kv", "auto where dtype is float32: int8 keys and values are for bfloat16")
    if settings.kv == "int8" and settings.max_model_len > shapes.INT8_MODEL_LEN:
        refuse("kv", f"auto where max_model_len is above {shapes.INT8_MODEL_LEN}")
    if settings.max_tokens >= settings.max_model_len:
        refuse("max_tokens", f"less than max_model_len ({settings.max_model_len}), so that a prompt has room")
    if settings.default_tokens > settings.max_tokens:
        refuse("default_tokens", f"at most max_tokens ({settings.max_tokens})")
    for name in ("system_tokens", "context_tokens"):
        if getattr(settings, name) >= settings.max_model_len:
            refuse(name, f"less than max_model_len ({settings.max_model_len}), so that the messages have room")
    if settings.temperature_low > settings.temperature_high:
        refuse("temperature_low", f"at most temperature_high ({settings.temperature_high})")
    if settings.step_tokens <= settings.max_rows:
        culprit = "max_rows" if "max_rows" in sources and "step_tokens" not in sources else "step_tokens"
        other = "max_rows" if culprit == "step_tokens" else "step_tokens"
        relation = "more than" if culprit == "step_tokens" else "less than"
        refuse(culprit, f"{relation} {other} ({getattr(settings, other)}), so that prompts go on while all rows decode")
    for name, partner in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if getattr(settings, name) and not getattr(settings, partner):
            refuse(name, f"given together with {partner}")
        if getattr(settings, name) and not os.access(getattr(settings, name), os.R_OK):
            refuse(name, spec_of(name).allowed)
