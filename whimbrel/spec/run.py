"""The declarative specification of a run: names that users of TRL, verl, prime-rl and slime expect.

Every model forbids unknown keys, so a misspelt one is an error (with a suggestion, see `load.py`), never ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AlgorithmSpec(_Strict):
    """GRPO: group-relative advantages with a clipped, truncated importance ratio."""

    type: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(ge=2, le=256)] = 8
    """Samples per prompt; advantages are relative to their mean."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0, le=10)] = 0.28
    ratio_max: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the importance ratio of a token (policy now / policy that sampled it), for stale data."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to version 0; 0 needs no reference model."""
    normalize_advantage: bool = True
    """Divide a group's advantages by their standard deviation."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] = 16_384
    """Padded tokens per forward pass of the trainer; bounds its memory."""


class SamplingSpec(_Strict):
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 256
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0


class OptimizerSpec(_Strict):
    """AdamW on fp32 masters."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0


class StalenessSpec(_Strict):
    max_versions: Annotated[int, Field(ge=0, le=64)] = 4
    """No token is trained on that was generated more than this many versions before the trainer's."""


class SyncSpec(_Strict):
    every_steps: Annotated[int, Field(ge=1, le=1)] = 1
    """Steps per policy version. Each step is a version: it is also the checkpoint."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What happens to the KV cache of running samples when weights change. `recompute` keeps log-probs exact."""


class CheckpointSpec(_Strict):
    snapshot_every: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Versions between snapshots of the full training state; `auto` follows measured snapshot and replay cost."""
    durability: Literal["local"] = "local"
    """A version is committed once manifest and chunks are synced to the run's store."""


class EnvironmentSpec(_Strict):
    """Where prompts and rewards come from."""

    type: Literal["reasoning_gym", "python"] = "reasoning_gym"
    task: str = "chain_sum"
    """reasoning_gym: the dataset's name."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """reasoning_gym: the dataset's configuration. python: keyword arguments of the factory."""
    entry: str | None = None
    """python: `module:function`; see docs/environments.md for what it returns."""
    system_prompt: str | None = None
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """python: limit for one call into the user's process."""

    @model_validator(mode="after")
    def _entry_goes_with_python(self) -> EnvironmentSpec:
        if self.type == "python" and (self.entry is None or ":" not in self.entry):
            raise ValueError('environment.type = "python" needs environment.entry = "module:function"')
        if self.type == "reasoning_gym" and self.entry is not None:
            raise ValueError('environment.entry belongs to environment.type = "python"')
        return self


class TrainerRole(_Strict):
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """torch.distributed processes; more than one shard the model with FSDP2."""


class RolloutRole(_Strict):
    count: Annotated[int, Field(ge=1, le=1024)] = 2
    max_groups: Annotated[int, Field(ge=1, le=256)] = 4
    """Prompt groups that one rollout samples at the same time."""


class RolesSpec(_Strict):
    trainer: TrainerRole = Field(default_factory=TrainerRole)
    rollout: RolloutRole = Field(default_factory=RolloutRole)


class RunSpec(_Strict):
    """One RL post-training job."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$")]
    model: Annotated[str, Field(min_length=1)]
    """A Hugging Face model folder, or `builtin:NAME` for a small model that Whimbrel makes itself."""
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec)
    sampling: SamplingSpec = Field(default_factory=SamplingSpec)
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    staleness: StalenessSpec = Field(default_factory=StalenessSpec)
    sync: SyncSpec = Field(default_factory=SyncSpec)
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    environment: EnvironmentSpec = Field(default_factory=EnvironmentSpec)
    roles: RolesSpec = Field(default_factory=RolesSpec)
    batch_size: Annotated[int, Field(ge=2)] = 64
    """Trajectories per optimizer step; a multiple of `algorithm.group_size`."""
    max_steps: Annotated[int, Field(ge=1)] = 100
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @property
    def groups_per_step(self) -> int:
        """Prompt groups that one optimizer step consumes."""
        return self.batch_size // self.algorithm.group_size

    @model_validator(mode="after")
    def _batch_holds_whole_groups(self) -> RunSpec:
        if self.batch_size % self.algorithm.group_size:
            raise ValueError(
                f"batch_size ({self.batch_size}) must be a multiple of algorithm.group_size ({self.algorithm.group_size})"
            )
        return self
