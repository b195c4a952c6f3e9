"""How the tests call the official clients."""

# Every reply is checked against the client's own schema; an error is shown, not repeated.
OPTIONS = {"api_key": "x", "_strict_response_validation": True, "max_retries": 0, "timeout": 600}
