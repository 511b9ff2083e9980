"""Keys of episodes, inference engines and validation."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.base import Count, Options, PathText, Plugin, Positive, Seconds, Section, Text

AgentName = Annotated[str, Meta(pattern=r"^[\w-]+$")]


class AgentConfig(Section, frozen=True):
    """Names an agent with an adapter of its own."""

    lora_rank: Positive
    """Rank of the adapter; it is scaled by model.lora_alpha / this."""


class RolloutConfig(Section, frozen=True):
    """Episodes: sampling, limits, tools, environment, agent and reward."""

    workers: Positive = 1
    """Number of rollout worker processes."""
    slots: Positive = 64
    """Episodes that one worker runs at once."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Sampling temperature of training episodes. Top-p and top-k are off in training, so that the
    recorded log-probs are those of the distribution sampled from."""
    max_new_tokens: Positive = 1024
    """Token limit of one turn."""
    max_tokens: Positive = 4096
    """Token limit of a row, prompt and tool replies included. An episode has one row, unless its history is
    rewritten or branches."""
    max_turns: Positive = 16
    """Model turns per episode."""
    max_calls: Positive = 64
    """Tool calls per episode."""
    max_bad_calls: Positive = 3
    """An episode ends after this many bad tool calls in a row: malformed, unknown tool, wrong arguments."""
    max_reply_tokens: Positive = 2048
    """Token limit of a tool reply or an environment message; a longer one is cut."""
    cut_replies: Literal["head", "middle", "tail"] = "middle"
    """Place at which a tool reply that is too long is cut."""
    history: Literal["append", "fork", "fold"] = "append"
    """Effect of a chat template that rewrites earlier turns: it is refused (`append`), or begins a new row
    (`fork`, `fold`). A full row ends the episode, or (`fold`) goes on as a new one without the oldest tool
    replies."""
    max_rows: Positive = 8
    """Maximum number of rows of one episode, with `history` `fork` or `fold`, or with an agent."""
    tools: list[PathText] = []
    """Tools: registered names, `module:function`, `file.py:function`, or a folder of such files."""
    tool_args: dict[str, Options] = {}
    """Constructor arguments per tool, e.g. `{calculator: {latency_mean: 0.3}}`."""
    tool_timeout: Seconds = 30.0
    """Deadline of one tool call, after which the episode goes on with an error reply, and of one step of an
    environment, where these set none of their own."""
    parser: str = "hermes"
    """Format in which the model writes tool calls."""
    environment: Plugin = ""
    """Environment that answers turns without tool calls (a game, a simulated user): a registered name,
    `module:class` or `file.py:class`, or one with options, e.g. `{gymnasium: {id: FrozenLake-v1}}`; empty:
    such a turn is the answer."""
    agent: Plugin = ""
    """A program that leads the episode through an endpoint with OpenAI's and Anthropic's APIs:
    a coding agent (`{claude_code: {}}`), `{command: {line: python agent.py}}`, `module:function` or
    `file.py:function`; empty: the model is asked turn by turn."""
    agent_address: Text = "127.0.0.1"
    """Address on which each worker listens for agents, or a name that each machine has for one of its own.
    Other addresses than 127.0.0.1 are for private networks: nothing is encrypted."""
    untrained_agents: list[PathText] = []
    """Requests of an agent whose turns are not trained (titles, commit messages): names of their `model`,
    globs among them, or `module:function`, `file.py:function` of a request. They have limits of their own, as
    large as `max_turns` and `max_rows`."""
    reward: Plugin = "final_number"
    """Reward function (verl's signature, or of one trajectory): a registered name, `module:function` or
    `file.py:function`; or several with options and weights, e.g. `{gsm8k: {}, format: {weight: 0.2}}`."""
    reward_timeout: Seconds = 60.0
    """Deadline of one reward call; afterwards the episode fails with `reward_error`."""
    part_seconds: Seconds = 60.0
    """A turn that lasts longer is made durable in parts of this many seconds, so that a lost worker loses
    less than one part. A value above `episode_timeout` turns this off."""
    episode_timeout: Seconds = 600.0
    """Wall-clock limit of one episode, which then ends and is scored, or fails if no turn is finished. An
    episode that is continued after a loss has the remaining time."""
    retries: Count = 2
    """Further attempts at an episode that failed through no fault of the policy. Lost workers and servers,
    and stops of the run, do not count."""

    @property
    def longest_prompt(self) -> int:
        """Return the number of tokens that a prompt may have, which leaves room for one turn."""
        return self.max_tokens - min(self.max_new_tokens, self.max_tokens // 2)

    @property
    def rows(self) -> int:
        """Return the number of rows that an episode may have."""
        return self.max_rows if self.agent or self.history != "append" else 1

    @property
    def full_rows(self) -> int:
        """Return the number of full rows of one episode that memory is reserved for. An agent's limits are
        wide, but most of an agent's rows are short or share a beginning."""
        return 1 if self.agent else self.rows


class EngineConfig(Section, frozen=True):
    """The inference engines."""

    name: Text = "torch"
    """`torch`: embedded in the rollout worker. `sglang`: servers of their own, shared by all workers."""
    servers: Positive = 1
    """sglang: servers to start."""
    urls: list[str] = []
    """sglang: attach to these servers instead of starting any, e.g. `[http://10.0.0.5:30000]`."""
    tp: Positive = 1
    """sglang: tensor-parallel size of a server (GPUs per server)."""
    server_args: Options = {}
    """sglang: further arguments of started servers, by their names without `--`, e.g.
    `{mem-fraction-static: 0.4}` (default 0.85) where the trainer shares the GPU."""
    server_command: list[str] = []
    """sglang: command that starts a server; default: this Python with `-m sglang.launch_server`."""
    colocated: Count = 0
    """Engines on the trainer's devices, one side at a time: engines give up KV cache and weights while the
    trainer trains, and its state lies in main memory while they sample. 0: none. Else the number of all
    engines, `servers` with sglang and `rollout.workers` with torch; `trainer.ranks` must be at least as many
    (times `tp`)."""
    api_key_env: str = ""
    """sglang: environment variable with the servers' API key; empty: none."""
    admin_key_env: str = ""
    """sglang: environment variable with the servers' admin key; empty: the API key."""
    start_timeout: Seconds = 600.0
    """sglang: deadline for a server to become ready."""
    request_timeout: Seconds = 300.0
    """sglang: a request whose stream is silent for this long is given up and continued elsewhere."""

    @property
    def remote(self) -> bool:
        """Tell whether engines are servers with supervisors, not parts of the workers."""
        return self.name == "sglang"

    @property
    def server_count(self) -> int:
        return (len(self.urls) or self.servers) if self.remote else 0


class ValidationConfig(Section, frozen=True):
    """Held-out episodes at one fixed version, through the same workers, before and after training."""

    every: Count = 0
    """Steps between further validations in mid-run; 0: none."""
    samples: Count = 256
    """Held-out samples per validation, each sampled as in training and greedily; 0: no validation."""
    episodes: Positive = 1
    """Episodes per held-out sample that are sampled as in training; from 2 on with `mean@k`, `pass@k` and
    `maj@k`."""
    greedy: bool = True
    """Play each held-out sample greedily, too."""
    success: float = 1.0
    """An episode succeeds whose score is at least this (of a reward that reports `acc`: whose `acc` is). For
    scores beyond 0 to 1, what a solved task earns. The mean score is reported beside it."""
