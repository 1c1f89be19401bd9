"""The pure core: what is known (`World`), what shall be done (`Plan`), and nothing that does I/O."""

from orchestrator.core.decisions import Decision, Plan
from orchestrator.core.reconcile import decide
from orchestrator.core.world import World

__all__ = ["Decision", "Plan", "World", "decide"]
