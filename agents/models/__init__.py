"""Models: folders that a user has, and small ones that Whimbrel makes itself."""

from agents.models.resolve import build_model, resolve_model

__all__ = ["build_model", "resolve_model"]
