"""What a user writes in a run file, validated; see `run.py` for the model and `load.py` for files."""

from whimbrel.spec.load import load_run_file, parse_run_spec
from whimbrel.spec.run import (
    AlgorithmSpec,
    CheckpointSpec,
    EnvironmentSpec,
    OptimizerSpec,
    RolesSpec,
    RunSpec,
    SamplingSpec,
    StalenessSpec,
    SyncSpec,
)

__all__ = [
    "AlgorithmSpec",
    "CheckpointSpec",
    "EnvironmentSpec",
    "OptimizerSpec",
    "RolesSpec",
    "RunSpec",
    "SamplingSpec",
    "StalenessSpec",
    "SyncSpec",
    "load_run_file",
    "parse_run_spec",
]
