"""Checks SGLang servers before anything starts: attached servers, and the command that starts servers."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
from urllib.parse import urlsplit

from asyncrl.config import RunConfig
from asyncrl.engines.sglang.arguments import check_arguments
from asyncrl.errors import ConfigError, EngineError
from asyncrl.launch.nodes import is_loopback
from asyncrl.weights.model_files import weight_files

ANSWER_TIMEOUT = 30.0  # Seconds in which an attached server must answer.


def check_servers(config: RunConfig) -> None:
    """Check that API keys are set, that servers on other machines can reach the trainer, and that attached
    servers answer and serve this model. Where servers are to be started, check that the start command exists,
    that their arguments allow updates, and the files of a scorer's model. Raises ConfigError."""
    engine = config.engine
    for key, variable_name in (("api_key_env", engine.api_key_env), ("admin_key_env", engine.admin_key_env)):
        if variable_name and not os.environ.get(variable_name):
            raise ConfigError(
                f"engine.{key}: {variable_name} is not set; export this variable, or clear the key"
            )

    # With a loopback address other machines would look for the trainer on their own machine, and hang.
    remote_urls = [url for url in engine.urls if not is_loopback(urlsplit(url).hostname or "")]
    uses_group = engine.remote and config.weights.transport != "disk"
    if uses_group and is_loopback(config.launch.host) and remote_urls:
        raise ConfigError(
            f"launch.host: {remote_urls[0]} cannot reach {config.launch.host}, but "
            f"weights.transport={config.weights.transport} needs this connection; set launch.host to this "
            "machine's address on the servers' network"
        )

    if engine.remote and not engine.urls:
        check_arguments(config, "engine.server_args", engine.server_args)

    served_scorers = [*dict(config.scorer_places)]
    if engine.remote:
        served_scorers.append("")  # the policy's own servers
    for scorer in served_scorers:
        if config.serving(scorer).engine.urls:
            check_urls(config, scorer)
            continue

        if engine.server_command and shutil.which(engine.server_command[0]) is None:
            raise ConfigError(
                f"engine.server_command: no such program: {engine.server_command[0]!r}; correct the "
                "command (for CPU tests, run make sglang-cpu)"
            )
        if not engine.server_command and importlib.util.find_spec("sglang") is None:
            raise ConfigError(
                "the engine or the scorers need sglang, which is not installed; on GPUs, run pip install "
                "'.[sglang]' -c constraints-sglang.txt in a checkout, set engine.server_command to a program "
                "from another environment, or attach to running servers with engine.urls=[…] and "
                "scorers.NAME.urls=[…]; on a CPU, run make sglang-cpu in a checkout, then set "
                "engine=sglang_cpu"
            )

        if scorer:
            path = config.scorers[scorer].path
            if not weight_files(path):
                raise ConfigError(
                    f"scorers.{scorer}.path: {path} has no model.safetensors; use a model directory"
                )
            if scorer != "reward":  # All other scorers read the policy's tokens
                from asyncrl.engines.sglang.server import check_vocabulary

                check_vocabulary(config, f"scorers.{scorer}", path)


def check_urls(config: RunConfig, scorer: str = "") -> None:
    """Check attached servers of the engine or of a scorer as server supervisors do: keys, version and model.
    The servers may be in use. Raises ConfigError."""
    from asyncrl.engines.sglang.process import server_keys
    from asyncrl.engines.sglang.server import look_at_server

    urls_key = f"scorers.{scorer}.urls" if scorer else "engine.urls"
    for url in config.serving(scorer).engine.urls:
        try:
            look = look_at_server(config, url, *server_keys(config.engine), scorer)
            asyncio.run(asyncio.wait_for(look, ANSWER_TIMEOUT))
        except TimeoutError:
            raise ConfigError(f"{urls_key}: {url} did not answer within {ANSWER_TIMEOUT:g} s") from None
        except EngineError as error:
            raise ConfigError(f"{urls_key}: {error}") from None
