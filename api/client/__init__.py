"""The controller's REST API from Python: synchronous, typed by plain JSON, raising the one exception tree."""

from api.client.client import Client, Json
from api.client.stream import follow_events

__all__ = ["Client", "Json", "follow_events"]
