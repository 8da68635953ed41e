"""Helpers for all packages: settings files, formatted text, progress callbacks, redaction, optional packages.

Within Tapereel, this folder imports only `tapes.errors`. Any other folder may import this one.
"""

from .extras import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "access_token": "token_for",
        "config": "Config ConfigError dump_config load_config",
        "config_yaml": "write_yaml",
        "http_service": "HttpService",
        "hub": "model_folder",
        "redact": "HIDDEN",
        "stats": "REWARD_LIMIT",
    },
)
