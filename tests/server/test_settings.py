"""Every option of the server is checked when it is made."""

import pytest

from vllm_metal_lite.cli.main import main
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.server.settings import ServerConfig

FRIEND = "https://friend.example"


@pytest.mark.parametrize(
    ("field", "flag", "value", "words"),
    [
        ("host", "--host", "0.0.0.0", "can be reached from other machines: set an api_key"),
        ("host", "--host", "::", "can be reached"),
        ("host", "--host", "", "can be reached"),
        ("host", "--host", "box.example", "can be reached"),
        ("api_key", "--api-key", "", "must be ASCII"),
        ("api_key", "--api-key", " x", "must be ASCII"),
        ("api_key", "--api-key", "two words", "must be ASCII"),
        ("api_key", "--api-key", "schlüssel", "must be ASCII"),
        ("allowed_origins", "--allowed-origin", "friend.example", "as browsers send them"),
        ("allowed_origins", "--allowed-origin", f"{FRIEND}/", f"got '{FRIEND}/'"),
        ("allowed_hosts", "--allowed-host", "https://box.example", "got 'https://box.example'"),
        ("allowed_hosts", "--allowed-host", "box.example:80", "must be names without a port"),
        ("allowed_media_domains", "--allowed-media-domains", "a.example/b", "got 'a.example/b'"),
        ("port", "--port", 65536, "must be an integer from 0 to 65535, got 65536"),
        ("port", "--port", "http", "must be an integer from 0 to 65535, got 'http'"),
        ("drain", "--drain", float("inf"), "must be"),
        ("drain", "--drain", -1, "must be"),
        ("keep_alive", "--keep-alive", 0, "must be"),
        ("max_body_mib", "--max-body-mib", 0, "must be"),
        ("max_waiting", "--max-waiting", -1, "must be"),
        ("memory_budget_gib", "--memory-budget-gib", 0, "must be"),
    ],
)
def test_an_option_is_refused_in_python_as_on_the_command_line(field, flag, value, words, capsys):
    with pytest.raises(ConfigError) as failure:
        ServerConfig(**{field: (value,) if field.startswith("allowed") else value})
    message = str(failure.value)
    assert message.startswith(f"{field} ")
    assert words in message
    assert main(["serve", f"{flag}={value}"]) == 2
    named = message.replace(field, flag).replace("api_key", "--api-key")
    assert capsys.readouterr().err == f"error: {named}\n"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_loopback_needs_no_key(host):
    assert ServerConfig(host=host).api_key is None
