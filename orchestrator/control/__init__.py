"""The controller's loop: observe, decide, apply, wait."""

from orchestrator.control.controller import Controller
from orchestrator.control.signals import Signals

__all__ = ["Controller", "Signals"]
