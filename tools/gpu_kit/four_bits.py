"""Pack a model's bfloat16 weights at 4 bits in groups of 32, and unpack them on another machine.

    python tools/gpu_kit/four_bits.py pack --model .models/smollm2-135m-instruct --out build/smollm2
    python four_bits.py unpack DIR        # in the packed folder; needs torch and safetensors

The model of `make smollm2` was a GGUF file: 4-bit digits in groups, each with a scale and a minimum in
float16; of the embeddings 8 bits, without a minimum. Conversion to bfloat16 rounds these numbers away. The
packer looks for digits, scales and minima that round to the same bfloat16 weights, and finds them: unpacking
gives that model bit for bit. For weights that were never on such a grid it keeps the closest values.

The folder has the model's other files, index.json, and one stream of bytes cut into part-0, part-1, … Some
digits are more frequent than others: Huffman's code makes the stream a tenth shorter.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
PART_BYTES = 5 << 20
CHUNK = 1 << 12  # groups that are looked at together
WEIGHTS = "model.safetensors"
INDEX = "index.json"
# Where scale and minimum may be, in units of their last place from the first guess; the nearest first.
NEAR = sorted(((i, j) for i in range(-6, 7) for j in range(-6, 7)), key=lambda at: abs(at[0]) + abs(at[1]))


def pack(model: Path, out: Path) -> dict[str, Any]:
    """Write the folder and return its index. `wrong`: how many weights differ after unpacking."""
    out.mkdir(parents=True, exist_ok=True)
    stream = bytearray()
    tensors = list[dict[str, Any]]()
    mismatches = 0
    for name, tensor in sorted(load_file(model / WEIGHTS).items()):
        bits = 16 if tensor.dim() < 2 else 8 if "embed" in name else 4
        fields, restored = encode(tensor, bits)
        mismatches += int((restored != tensor).sum())
        sizes = [len(field) for field in fields]
        tensors.append({"name": name, "shape": [*tensor.shape], "bits": bits, "sizes": sizes})
        stream += b"".join(fields)
    starts = range(0, len(stream), PART_BYTES)
    for number, start in enumerate(starts):
        (out / f"part-{number}").write_bytes(stream[start : start + PART_BYTES])
    for file in model.iterdir():
        if file.name != WEIGHTS:
            shutil.copy(file, out)
    shutil.copy(__file__, out / "four_bits.py")
    index = {"tensors": tensors, "parts": len(starts), "sha256": digest(stream), "wrong": mismatches}
    (out / INDEX).write_text(json.dumps(index))
    return index


def unpack(folder: Path, out: Path) -> dict[str, Any]:
    """Write a Hugging Face directory, and return the folder's index. ValueError where a part is missing or
    damaged."""
    index = json.loads((folder / INDEX).read_text())
    parts = [folder / f"part-{number}" for number in range(index["parts"])]
    if missing := [part.name for part in parts if not part.exists()]:
        raise ValueError(f"{folder}: {', '.join(missing)} of {len(parts)} parts are missing; copy them again")
    stream = b"".join(part.read_bytes() for part in parts)
    if digest(stream) != index["sha256"]:
        raise ValueError(f"{folder}: its parts are not those that were packed; copy them again")
    tensors = dict[str, torch.Tensor]()
    at = 0
    for entry in index["tensors"]:
        fields = [stream[(begin := at) : (at := begin + size)] for size in entry["sizes"]]
        tensors[entry["name"]] = decode(fields, entry["bits"], entry["shape"])
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS, {"format": "pt"})
    for file in folder.iterdir():
        if file not in parts and file.name not in (INDEX, "four_bits.py"):
            shutil.copy(file, out)
    return index


def encode(tensor: torch.Tensor, bits: int) -> tuple[list[bytes], torch.Tensor]:
    """The fields that `decode` reads, and what it makes of them."""
    if bits == 16:
        return [squeeze(tensor)], tensor
    groups = tensor.float().reshape(-1, GROUP)
    encoded_chunks = [closest(chunk, bits) for chunk in groups.split(CHUNK)]
    digits, scale, minimum = (torch.cat(field) for field in zip(*encoded_chunks, strict=True))
    packed_digits = digits.to(torch.uint8) if bits == 4 else digits.to(torch.int8)
    packed = packed_digits[:, 0::2] | (packed_digits[:, 1::2] << 4) if bits == 4 else packed_digits
    halves = [numbers.view(torch.uint8).reshape(-1, 2)[:, k] for numbers in (scale, minimum) for k in (0, 1)]
    return [squeeze(field) for field in (packed, *halves)], restore(digits, scale, minimum).view_as(tensor)


def decode(fields: list[bytes], bits: int, shape: list[int]) -> torch.Tensor:
    plain = [torch.frombuffer(bytearray(zlib.decompress(field, -15)), dtype=torch.uint8) for field in fields]
    if bits == 16:
        return plain[0].view(torch.bfloat16).view(shape)
    packed, *halves = plain
    scale, minimum = (torch.stack(pair, 1).view(torch.float16)[:, 0] for pair in (halves[:2], halves[2:]))
    digits = torch.stack((packed & 15, packed >> 4), -1) if bits == 4 else packed.view(torch.int8)
    return restore(digits.reshape(-1, GROUP), scale, minimum).view(shape)


def restore(digits: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    return (digits.float() * scale[:, None].float() + minimum[:, None].float()).bfloat16()


def closest(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Digits, scale and minimum whose bfloat16 values are closest to the groups'. Digits of 4 bits are 0 to
    15, those of 8 bits -127 to 127, without a minimum."""
    low = 0 if bits == 4 else -127
    high = 15 if bits == 4 else 127
    least = groups.amin(1) if low == 0 else torch.zeros(len(groups))
    largest_values = groups.amax(1) if low == 0 else groups.abs().amax(1)
    guess = torch.stack(((largest_values - least) / high, least)).half()  # scale and minimum
    best = guess.clone()
    error = torch.full((len(groups),), torch.inf)
    digits = torch.zeros_like(groups)
    for steps in NEAR if low == 0 else [at for at in NEAR if not at[1]]:
        if not len(open_ := error.nonzero()[:, 0]):
            break
        tried = guess[:, open_].view(torch.int16) + torch.tensor(steps, dtype=torch.int16)[:, None]
        scale, minimum = tried.view(torch.float16)
        divided = (groups[open_] - minimum[:, None]) / scale[:, None].float()
        read = divided.nan_to_num().round().clamp(low, high)
        off = (restore(read, scale, minimum).float() - groups[open_]).abs().sum(1)
        better = off < error[open_]  # not where it is NaN
        chosen = open_[better]
        error[chosen], digits[chosen], best[:, chosen] = (
            off[better],
            read[better],
            tried.view(torch.float16)[:, better],
        )
    return digits, *best


def squeeze(tensor: torch.Tensor) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(tensor.contiguous().view(torch.uint8).numpy().tobytes()) + coder.flush()


def digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packs = commands.add_parser("pack", help="write the folder")
    packs.add_argument(
        "--model", type=Path, required=True, help="directory with model.safetensors in bfloat16"
    )
    packs.add_argument("--out", type=Path, required=True)
    packs.add_argument("--data", type=Path, help="directory of Parquet files to come along, as JSON lines")
    unpacks = commands.add_parser("unpack", help="write the model's directory")
    unpacks.add_argument("out", type=Path)
    unpacks.add_argument("--folder", type=Path, default=Path(__file__).parent, help="default: this one")
    args = parser.parse_args()
    if args.command == "pack":
        index = pack(args.model, args.out)
        import pyarrow.parquet  # not where it is unpacked

        for table in args.data.glob("*.parquet") if args.data else ():
            rows = pyarrow.parquet.read_table(table).to_pylist()
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (args.out / f"{table.stem}.jsonl").write_text(lines)
        size = sum(file.stat().st_size for file in args.out.iterdir())
        print(f"{args.out}: {size / 2**20:.1f} MiB, {index['parts']} parts, {index['wrong']} weights differ")
    else:
        unpack(args.folder, args.out)
        print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
