"""A server as a child of its supervisor: the command line, the start, the end.

The server runs under the wrapper of `isolation.child`, so that no process of the server outlives the
supervisor. Server and supervisor write to one log.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from asyncrl.config import EngineConfig, RunConfig
from asyncrl.errors import EngineError
from asyncrl.isolation.child import wrapped_command
from asyncrl.observe.files import replace_file
from asyncrl.wire.addresses import reserve_port

# Seconds from terminate to kill: a server has nothing to save, and the supervisor has little more than a
# second.
STOP_SECONDS = 0.8
MEMORY_FRACTION = 0.85  # of a GPU's memory, for weights and KV cache
CONVOLUTION_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"  # environment variable of a server
# Environment variables that keep cuBLAS and Triton's `tl.dot` from rounding float32 inputs to TF32. That
# alone makes log-probs differ from the trainer's by more than `MIN_GAP_LIMIT` (coordinator/mismatches.py).
WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
# Environment variable that keeps a server from storing outputs of the vision tower. They are stored by image
# alone, and neither an update of the weights nor /flush_cache drops those of earlier versions.
WITHOUT_TOWER_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
STREAM_INTERVAL = 4  # tokens per event of a stream: the most that a request loses when the server dies


Arguments = dict[str, str | int | float | bool | list[str]]


def server_command(
    config: RunConfig, index: int, host: str, port: int, gpus: int, scorer: str = "", tokens: int = 0
) -> list[str]:
    """Return the command line, without keys, of engine `index`, or of server `index` of all scorers, on a
    machine where `gpus` GPUs are visible. `tokens`: the size of the KV cache; 0: as the memory allows.
    `engine.server_args` come last and win."""
    first_gpu = base_gpu(config, index, gpus, scorer)
    can_sleep = config.shifts and not scorer
    config = config.serving(scorer)
    engine = config.engine
    own_flags: Arguments = {
        "model-path": str(Path(config.model.path).resolve()),
        "host": host,
        "port": port,
        "dtype": config.model.dtype,
        "tp-size": engine.tp,
        "mem-fraction-static": MEMORY_FRACTION,
        "incremental-streaming-output": True,
        "enable-return-routed-experts": config.trainer.router_replay,
        "stream-interval": STREAM_INTERVAL,
        "base-gpu-id": first_gpu,
        "enable-memory-saver": can_sleep,
        "max-total-tokens": tokens or False,
        "skip-server-warmup": True,  # the first load is checked anyway
        "log-level-http": "warning",  # a line per request is a line per turn
    }

    if config.adapters_apart:
        own_flags |= {
            "enable-lora": True,
            "max-lora-rank": max(rank for rank, _ in config.adapters.values()),
            "lora-target-modules": sorted(config.model.lora_modules),
            "max-loras-per-batch": config.adapters_held,
        }

    command = engine.server_command or [sys.executable, "-m", "sglang.launch_server"]
    return [*command, *_command_flags({**own_flags, **engine.server_args})]


def server_environment(config: RunConfig) -> dict[str, str]:
    """Return the environment of a started server; the user's own variables take precedence. States of
    convolutions (gated delta nets, Mamba) are in the model's type: SGLang would round them to bfloat16. In
    float32, TF32 is off. Outputs of a tower that trains are not cached."""
    precision = WITHOUT_TF32 if config.model.dtype == "float32" else {}
    tower = WITHOUT_TOWER_CACHE if config.model.train_vision else {}
    return {CONVOLUTION_DTYPE: config.model.dtype, **precision, **tower, **os.environ}


def base_gpu(config: RunConfig, index: int, gpus: int, scorer: str = "") -> int:
    """Return the first GPU of a server: after the GPUs of this machine's trainer ranks and of earlier engines
    and scorers, or, if too few GPUs are left, from 0 on again, shared with them. Engines that take turns with
    the trainer share the trainer's GPUs; Ray shows each server only its own GPUs."""
    engine = config.engine
    gpus_needed = engine.tp
    gpus_before = index * engine.tp

    if scorer:
        gpus_needed = config.scorers[scorer].tp
        gpus_before = 0 if engine.urls else engine.server_count * engine.tp
        earlier_scorers = (config.scorers[name] for name, _ in config.scorer_places[:index])
        gpus_before += sum(scorer_config.tp for scorer_config in earlier_scorers if not scorer_config.urls)

    shares_gpus = config.launch.kind != "local" or (config.shifts and not scorer)
    first_gpu = gpus_before + (0 if shares_gpus else config.ranks_on_gpus)
    return first_gpu if first_gpu + gpus_needed <= gpus else gpus_before % max(1, gpus - gpus_needed + 1)


def server_gpus(config: RunConfig, gpus: int) -> dict[str, list[int]]:
    """Return the GPUs of each server that is started on this machine with `gpus` GPUs, by the name of the
    server's process. Servers on the CPU have none."""
    engine = config.engine
    gpus_by_server = dict[str, list[int]]()
    if engine.server_args.get("device", "cuda") != "cuda":
        return gpus_by_server

    for index in range(0 if engine.urls else engine.server_count):
        first_gpu = base_gpu(config, index, gpus)
        gpus_by_server[f"engine-{index}"] = [*range(first_gpu, min(first_gpu + engine.tp, gpus))]

    for index, (name, _) in enumerate(config.scorer_places):
        if not config.scorers[name].urls:
            first_gpu = base_gpu(config, index, gpus, name)
            gpus_by_server[f"scorer-{index}"] = [
                *range(first_gpu, min(first_gpu + config.scorers[name].tp, gpus))
            ]

    return gpus_by_server


def server_memory_fraction(config: RunConfig, gpu: int, gpus: int) -> float:
    """Return the fraction of a GPU's memory that servers take while the trainer works. Ray gives each process
    its own GPUs, and servers that take turns with the trainer sleep."""
    if config.launch.kind != "local":
        return 0.0
    servers = [name for name, server_devices in server_gpus(config, gpus).items() if gpu in server_devices]
    awake_servers = [name for name in servers if not (config.shifts and name.startswith("engine"))]
    return len(awake_servers) * float(config.engine.server_args.get("mem-fraction-static", MEMORY_FRACTION))


def _command_flags(values: Arguments) -> list[str]:
    """Return flags: `{"tp-size": 2, "flag": True, "of": ["a", "b"]}` gives `--tp-size 2 --flag --of a b`.
    False gives no flag."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not False:
            flag_values = value if isinstance(value, list) else [str(value)]
            flags += [f"--{name}", *(flag_values if value is not True else ())]
    return flags


def stored_kv_tokens(directory: Path, index: int) -> int:
    """Return the size of the KV cache, in tokens, of the engine's first server in this run; 0 before the
    first server. Later servers get the same size, whatever else is on the devices when they start."""
    path = _kv_tokens_file(directory, index)
    return int(path.read_text()) if path.exists() else 0


def store_kv_tokens(directory: Path, index: int, tokens: int) -> None:
    if not stored_kv_tokens(directory, index):
        replace_file(_kv_tokens_file(directory, index), str(tokens).encode())


def _kv_tokens_file(directory: Path, index: int) -> Path:
    return directory / f"kv-tokens-{index}"


def server_keys(engine: EngineConfig) -> tuple[str, str]:
    """Return (API key, admin key) from the environment; '' for none."""
    return os.environ.get(engine.api_key_env, ""), os.environ.get(engine.admin_key_env, "")


@dataclass(frozen=True)
class ServerProcess:
    """A started server, which will listen at `url`, the port of `reserved_socket`. `key_file`: holds the
    server's keys, until the server has read the file."""

    url: str
    process: asyncio.subprocess.Process
    reserved_socket: socket.socket
    key_file: Path | None

    @classmethod
    async def start(
        cls, config: RunConfig, index: int, host: str, directory: Path, scorer: str = ""
    ) -> ServerProcess:
        """Start a server on `host`. Raises EngineError when the command does not exist."""
        reserved_socket = reserve_port(host)
        try:
            port = int(reserved_socket.getsockname()[1])
            kv_tokens = stored_kv_tokens(directory, index) if config.shifts and not scorer else 0

            command = server_command(config, index, host, port, torch.cuda.device_count(), scorer, kv_tokens)
            if shutil.which(command[0]) is None:
                raise EngineError(
                    f"engine.server_command: no such program: {command[0]!r}; correct the command"
                )

            server_name = f"scorer-{index}" if scorer else str(index)
            key_file = _write_keys(config.engine, server_name, directory)
            if key_file is not None:
                command += ["--config", str(key_file)]

            process = await asyncio.create_subprocess_exec(
                *wrapped_command(command, STOP_SECONDS),
                env=server_environment(config),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            reserved_socket.close()
            raise

        return cls(f"http://{host}:{port}", process, reserved_socket, key_file)

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; None while the server runs."""
        return self.process.returncode

    async def wait_ended(self) -> int:
        return await self.process.wait()

    def note_ready(self) -> None:
        """Note that the server answers: delete the file of keys, which the server has read, and release the
        reserved port, which the server holds itself."""
        self.reserved_socket.close()
        if self.key_file is not None:
            self.key_file.unlink(missing_ok=True)

    async def stop(self) -> None:
        """Terminate the server; processes that are left after STOP_SECONDS are killed."""
        self.note_ready()
        if self.exit_code is None:
            self.process.terminate()
            await self.wait_ended()


def _write_keys(engine: EngineConfig, server: str, directory: Path) -> Path | None:
    """Write the keys to a file, as every user of the machine can read a command line. Replaces a file that a
    killed supervisor has left."""
    path = directory / f"keys-{server}.yaml"
    path.unlink(missing_ok=True)
    api_key, admin_key = server_keys(engine)
    all_keys = {"api-key": api_key, "admin-api-key": admin_key}
    given_keys = {name: value for name, value in all_keys.items() if value}
    if not given_keys:
        return None

    directory.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.yaml.encode(given_keys))

    return path
