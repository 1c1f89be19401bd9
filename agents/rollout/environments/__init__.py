"""Where prompts and rewards come from."""

from agents.rollout.environments.base import Environment, Prompt, mix
from agents.rollout.environments.procedural import ProceduralEnvironment
from agents.rollout.environments.user import UserEnvironment
from whimbrel.spec import EnvironmentSpec

__all__ = ["Environment", "Prompt", "mix", "open_environment"]


def open_environment(spec: EnvironmentSpec, seed: int) -> Environment:
    """The environment that a run file names. Raises UsageError when it cannot be meant."""
    if spec.type == "python":
        return UserEnvironment(spec, seed)
    return ProceduralEnvironment(spec, seed)
