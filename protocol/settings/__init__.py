"""All settings of both processes."""

from protocol.settings.effect import settings_without_effect
from protocol.settings.load import check_keys, dump_settings, iter_fields, load_settings
from protocol.settings.run import LOOPBACK_HOSTS, RunSettings, smallest_max_lag, started_samples

__all__ = [
    "LOOPBACK_HOSTS",
    "RunSettings",
    "check_keys",
    "dump_settings",
    "iter_fields",
    "load_settings",
    "settings_without_effect",
    "smallest_max_lag",
    "started_samples",
]
