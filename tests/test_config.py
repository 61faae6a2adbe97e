"""zl/config: which source wins, what is refused and in which words, and that the guide lists every setting."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from zl.address import TcpAddress, TlsAddress, UnixAddress, parse_address, parse_host_port, parse_target
from zl.cli import build_parser
from zl.config import SETTINGS, Settings, load, spec_of
from zl.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def make(text: str) -> Path:
        path = tmp_path / "zl.toml"
        path.write_text(text)
        return path

    return make


def test_defaults_are_valid_and_frozen():
    settings = load(environ={"XDG_RUNTIME_DIR": "/"})
    assert (settings.max_rows, settings.max_tokens, settings.default_tokens) == (256, 2048, 256)
    assert settings.listen == ("tcp:127.0.0.1:7433", "unix:/zl.sock")
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.max_rows = 1


def test_later_sources_win(write):
    path = write('[limits]\nmax_rows = 11\nmax_queue = 11\nberths = 11\n[server]\nlog_level = "error"\n')
    environ = {"ZL_MAX_QUEUE": "22", "ZL_BERTHS": "22", "HOME": "/root"}
    settings = load({"berths": "33", "max_rows": None}, file=path, environ=environ)
    assert (settings.max_rows, settings.max_queue, settings.berths, settings.log_level) == (11, 22, 33, "error")


def test_file_can_be_named_by_the_environment(write):
    path = write('[model]\nmodel = "a"\nsystem_prompts = ["one", "two"]\nkv_memory = "1.5GiB"\n')
    settings = load(environ={"ZL_CONFIG": str(path)})
    assert (settings.model, settings.system_prompts, settings.kv_memory) == ("a", ("one", "two"), 3 * 2**29)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("0", 0), ("4096", 4096), ("2GiB", 2**31), ("2 gib", 2**31), ("512MiB", 2**29), ("1.5G", 3 * 2**29),
     ("3MB", 3_000_000), ("7k", 7168), ("10B", 10)],
)  # fmt: skip
def test_sizes(text, n_bytes):
    assert load({"kv_memory": text}, environ={}).kv_memory == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 parsecs", "1e9", "1.2.3G", "٣G"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"--kv-memory.*size such as 2GiB"):
        load({"kv_memory": text}, environ={})


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[limits]\nmax_row = 3\n", 2, ["unknown key 'max_row' in [limits]", "did you mean 'max_rows'?"]),
        ("[server]\nmax_row = 3\n", 2, ["unknown key 'max_row' in [server]", "did you mean 'max_rows' in [limits]?"]),
        ("[limit]\nmax_rows = 3\n", 1, ["unknown table 'limit'", "did you mean 'limits'?"]),
        ("max_rows = 3\n", 1, ["max_rows belongs in the table [limits]"]),
        ("[server]\n\nmax_rows = 3\n", 3, ["max_rows belongs in the table [limits], not in [server]"]),
        ("[limits]\nberths = 3\nmax_rows = 0\n", 3, ["max_rows = 0", "a whole number from 1 to 256"]),
        ("[limits]\nmax_rows = true\n", 2, ["max_rows = True", "a whole number"]),
        ('[server]\nmax_frame = 1\n[limits]\nmax_frame = "lots"\n', 2, ["max_frame belongs in the table [limits]"]),
        ('[model]\ndevice = "gpu"\n', 2, ["device = 'gpu'", "one of auto, cpu, cuda"]),
        ('[server]\nlisten = ["127.0.0.1:7433"]\n', 2, ["listen", "tcp:HOST:PORT or unix:PATH"]),
        ('[server]\nlisten = ["unix:/a", "unix:/a"]\n', 2, ["all different"]),
        ("[server]\ndrain_s = nan\n", 2, ["drain_s = nan", "seconds from 0 to 3600"]),
    ],
)
def test_wrong_files_are_named_with_line_value_and_remedy(write, text, line, words):
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load(file=path, environ={})
    assert f"{path}:{line}" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_unreadable_and_malformed_files(write, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load(file=tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2"):
        load(file=write("[limits]\nmax_rows =\n"), environ={})


def test_wrong_environment_variables():
    with pytest.raises(ConfigError, match=r"unknown environment variable ZL_MAX_ROW: did you mean 'ZL_MAX_ROWS'"):
        load(environ={"ZL_MAX_ROW": "3"})
    with pytest.raises(ConfigError, match=r"max_rows = '12x' \(environment variable ZL_MAX_ROWS\): must be"):
        load(environ={"ZL_MAX_ROWS": "12x"})
    assert load(environ={"ZL_LISTEN": "tcp:[::1]:7000, unix:/a"}).listen == ("tcp:[::1]:7000", "unix:/a")
    assert load(environ={"ZL_CONNECT": "whatever"}).max_rows == 256


def test_unknown_settings_of_callers_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'max_rows'"):
        load({"maxrows": 3}, environ={})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_tokens": 4096}, r"max_tokens = 4096 \(--max-tokens\): must be less than max_model_len \(4096\)"),
        ({"default_tokens": 300, "max_tokens": 200}, r"default_tokens = 300 .*at most max_tokens \(200\)"),
        ({"system_tokens": 5000}, "system_tokens = 5000 .*less than max_model_len"),
        ({"step_tokens": 64, "max_rows": 64}, "step_tokens = 64 .*more than max_rows"),
        ({"max_frame": 100}, "max_frame = 100 .*1KiB to 64MiB"),
        ({"tls_cert": "/dev/null"}, "tls_cert .*together with tls_key"),
        ({"kv": "int8", "dtype": "float32"}, r"kv = 'int8' \(--kv\): must be auto where dtype is float32"),
        ({"kv": "int8", "max_model_len": 65_537}, "kv = 'int8' .*auto where max_model_len is above 65536"),
        ({"tls_cert": "/none", "tls_key": "/dev/null"}, "tls_cert = '/none' .*can read"),
    ],
)
def test_settings_that_contradict_each_other(flags, words):
    with pytest.raises(ConfigError, match=words):
        load(flags, environ={})


@pytest.mark.parametrize("flags", [{"max_model_len": 64}, {"max_tokens": 8}, {"step_tokens": 32}, {"max_rows": 1}])
def test_one_size_alone_is_enough(flags):
    settings = load(flags, environ={})
    assert settings.default_tokens <= settings.max_tokens < settings.max_model_len
    assert settings.max_rows < settings.step_tokens


def test_auth_token_comes_from_file_or_environment_and_is_never_shown(tmp_path):
    secret = tmp_path / "token"
    secret.write_text("  hush\n")
    settings = load({"auth_token_file": str(secret)}, environ={})
    assert settings.auth_token == "hush"
    assert "hush" not in repr(settings)
    assert load(environ={"ZL_AUTH_TOKEN": "hush"}).auth_token == "hush"
    with pytest.raises(ConfigError, match="both set") as caught:
        load({"auth_token_file": str(secret)}, environ={"ZL_AUTH_TOKEN": "hush"})
    assert "hush" not in str(caught.value)
    secret.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        load({"auth_token_file": str(secret)}, environ={})
    with pytest.raises(ConfigError, match="No such file"):
        load({"auth_token_file": str(tmp_path / "none")}, environ={})
    bad = tmp_path / "bad.toml"
    bad.write_text("[server]\nauth_token = 12345\n")
    with pytest.raises(ConfigError, match=r"auth_token = \(hidden\)"):
        load(file=bad, environ={})


@pytest.mark.parametrize("name", ["auth_token", "auth_token_file", "tls_cert", "tls_key"])
def test_an_empty_secret_or_file_opens_no_door(write, name):
    for said, where in (
        ({"environ": {f"ZL_{name.upper()}": ""}}, rf"environment variable ZL_{name.upper()}"),
        ({"environ": {}, "file": write(f'[server]\n{name} = ""\n')}, r"zl\.toml:2"),
        ({"environ": {}, "flags": {name: ""}}, "--" + name.replace("_", "-")),
    ):
        with pytest.raises(ConfigError, match=rf"{name} = '' \(.*{where}\): must be .*leave it out, or unset it"):
            load(**said)
    assert load(environ={}).auth_token == ""


@pytest.mark.parametrize("token", ["  ", "\n", "\udcff"])
def test_a_secret_that_nobody_can_say_is_refused_and_not_shown(token):
    with pytest.raises(ConfigError, match=r"auth_token = \(hidden\) \(environment variable ZL_AUTH_TOKEN\)"):
        load(environ={"ZL_AUTH_TOKEN": token})


def test_a_file_that_cannot_be_read_is_named_with_its_setting(write):
    for said, where in (
        ({"flags": {"auth_token_file": "/nope"}, "environ": {}}, "--auth-token-file"),
        ({"environ": {"ZL_AUTH_TOKEN_FILE": "/nope"}}, "environment variable ZL_AUTH_TOKEN_FILE"),
        ({"environ": {}, "file": write('[server]\nauth_token_file = "/nope"\n')}, r"zl\.toml:2"),
    ):
        with pytest.raises(ConfigError, match=rf"auth_token_file \(.*{where}\) /nope: No such file"):
            load(**said)
    with pytest.raises(ConfigError, match=r"config file \(ZL_CONFIG\) /nope: No such file"):
        load(environ={"ZL_CONFIG": "/nope"})


def test_what_others_call_the_address_says_what_it_is_here(write):
    for name in ("port", "host"):
        with pytest.raises(ConfigError, match=rf":2: unknown key '{name}' in \[server\]: that is listen = 'tcp:127\."):
            load(file=write(f"[server]\n{name} = 7533\n"), environ={})
        with pytest.raises(ConfigError, match=rf":1: unknown key '{name}': that is listen = 'tcp:.*' in \[server\]"):
            load(file=write(f"{name} = 7533\n"), environ={})
        with pytest.raises(ConfigError, match=rf"ZL_{name.upper()}: that is ZL_LISTEN=tcp:127\.0\.0\.1:7433"):
            load(environ={f"ZL_{name.upper()}": "7533"})
    assert load(file=write("[server]\nlisten = 'tcp:127.0.0.1:7433'\n"), environ={}).listen == ("tcp:127.0.0.1:7433",)


@pytest.mark.parametrize("kind", ["tcp:", "http://", "tls:"])
def test_an_address_where_host_and_port_are_wanted_says_what_to_leave_out(kind):
    with pytest.raises(ConfigError, match=rf"write it without {kind}, as in 127\.0\.0\.1:9533$"):
        load({"metrics": f"{kind}127.0.0.1:9533"}, environ={})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp:127.0.0.1:1", TcpAddress("127.0.0.1", 1)),
        ("tcp:[::1]:65535", TcpAddress("::1", 65535)),
        ("tcp:example:7433", TcpAddress("example", 7433)),
        ("unix:/a b:c", UnixAddress("/a b:c")),
    ],
)
def test_addresses_read_and_print_back(text, address):
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "tcp", "tcp:", "tcp:host", "tcp:host:", "tcp:host:0", "tcp:host:65536", "tcp:::1:80", "tcp:h:-1", "tcp:h:٣",
     "unix:", "unix:" + "x" * 108, "unix:a\0b", "http://x", "7433"],
)  # fmt: skip
def test_what_is_no_address(text):
    with pytest.raises(ConfigError):
        parse_address(text)


@pytest.mark.parametrize("host", [".x", "a..b", "x" * 64, "a\0b", ".".join(["x" * 63] * 4), "\udcff"])
def test_what_can_be_no_host(host):
    for text in (f"tcp:{host}:1", f"tls:{host}:1"):
        with pytest.raises(ConfigError, match="has a host that cannot be"):
            parse_target(text)
    with pytest.raises(ConfigError, match="has a host that cannot be"):
        parse_address(f"tcp:{host}:1")
    with pytest.raises(ConfigError, match="must be a number"):
        parse_host_port("h:" + "1" * 5_000)  # more digits than int() reads
    for good in ("x" * 63 + ".org.", "é.example", "fe80::1%lo"):
        assert parse_target(f"tls:[{good}]:1") == TlsAddress(good, 1)


def test_tls_is_an_address_for_clients_and_a_listener_says_what_to_set():
    for text, address in (("tls:[::1]:7433", TlsAddress("::1", 7433)), ("tcp:h:1", TcpAddress("h", 1)),
                          ("unix:/s", UnixAddress("/s"))):  # fmt: skip
        found = parse_target(text)
        assert (found, type(found), str(found)) == (address, type(address), text)
    for text in ("tls:", "tls:host", "tls:host:0", "tls::1", "http:h:1"):
        with pytest.raises(ConfigError):
            parse_target(text)
    with pytest.raises(ConfigError, match=r"listen.*tls:h:1.*write tcp:h:1 here.*tls_cert and tls_key"):
        load({"listen": ["tls:h:1"]}, environ={})


def test_port_zero_only_where_a_listener_may_pick():
    assert parse_host_port("h:0", port_zero=True) == TcpAddress("h", 0)
    assert load({"listen": ["tcp:h:0", "tcp:h:0"], "metrics": "h:0"}, environ={}).metrics == "h:0"
    with pytest.raises(ConfigError, match=r"write for example 127\.0\.0\.1:9433$"):
        load({"metrics": "9433"}, environ={})


def test_the_guide_lists_every_setting_with_its_table():
    guide = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    section = ""
    listed = {}
    for line in guide.splitlines():
        if match := re.match(r"## \[(\w+)\]", line):
            section = match[1]
        elif match := re.match(r"\| `(\w+)` \|", line):
            listed[match[1]] = section
    assert listed == {each.name: spec_of(each.name).section for each in SETTINGS}
    example = guide.split("```toml\n")[1].split("```")[0]
    assert example.strip()


def test_the_guides_example_loads(write):
    guide = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    settings = load(file=write(guide.split("```toml\n")[1].split("```")[0]), environ={})
    assert isinstance(settings, Settings)
    assert settings.max_rows == 64


@pytest.mark.parametrize(
    ("arguments", "nvtx"),
    [([], "off"), (["--nvtx"], "on"), (["--nvtx", "off"], "off"), (["--nvtx", "--berths", "3"], "on")],
)
def test_a_switch_alone_means_on(arguments, nvtx):
    args = build_parser()[0].parse_args(["serve", *arguments])
    flags = {setting.name: getattr(args, f"set_{setting.name}", None) for setting in SETTINGS}
    assert load(flags, environ={}).nvtx == nvtx
