"""Models on disk: the folder that a run starts from, and the auxiliary files that every anchor carries along."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from whimbrel.errors import UsageError
from whimbrel.limits import MODEL_FILE_MAX_BYTES

_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")


def load_model(folder: Path) -> nn.Module:
    """A causal LM with float32 parameters on CPU.

    Raises:
        UsageError: no such model, or one whose checkpoint names its tensors otherwise than the model does.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is no Hugging Face model folder: it has no config.json.", hint="Correct `model`.")
    disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"The model in {folder} cannot be loaded: {_first_line(error)}") from error
    _require_same_names(folder, model)
    return model


def empty_model(files: Mapping[str, bytes]) -> nn.Module:
    """A model of the configuration among an anchor's auxiliary files, with float32 parameters of no meaning yet."""
    with tempfile.TemporaryDirectory(prefix="whimbrel-model-") as folder:
        (Path(folder) / "config.json").write_bytes(files["config.json"])
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def auxiliary_files(folder: Path) -> dict[str, bytes]:
    """Configuration, tokenizer and templates of a model folder, the configuration saying that weights are bf16."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.iterdir()):
        wanted = path.is_file() and path.suffix in _SUFFIXES and not path.name.endswith(".index.json")
        if wanted and not path.name.startswith(".") and path.stat().st_size <= MODEL_FILE_MAX_BYTES:
            files[path.name] = path.read_bytes()
    config: dict[str, Any] = json.loads(files["config.json"])
    # Both spellings: engines read one or the other.
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    config.pop("quantization_config", None)
    files["config.json"] = json.dumps(config, indent=2, sort_keys=True).encode()
    return files


def _require_same_names(folder: Path, model: nn.Module) -> None:
    """Weights are logged under the model's names; engines look for those of the checkpoint. They must be the same."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(_names(model))
    strange = [name for name in _names(model) if names and name not in names and not (aliases & names)]
    if strange:
        raise UsageError(
            f"The checkpoint in {folder} has no tensor named {strange[0]}: this architecture is converted on loading.",
            hint="Save the model with `save_pretrained` of the installed transformers, or use another one.",
        )


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
