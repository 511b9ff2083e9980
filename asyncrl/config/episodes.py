"""Keys of episodes, inference engines and validation."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.base import Count, Options, PathText, Plugin, Positive, Seconds, Section, Text

AgentName = Annotated[str, Meta(pattern=r"^[\w-]+$")]


class AgentConfig(Section, frozen=True):
    """An agent that has its own adapter."""

    lora_rank: Positive
    """Rank of the adapter. The adapter is scaled by model.lora_alpha divided by this rank."""


class RolloutConfig(Section, frozen=True):
    """Episodes: sampling, limits, tools, environment, agent and reward."""

    workers: Positive = 1
    """Number of rollout worker processes."""
    slots: Positive = 64
    """Number of episodes that one worker runs at once."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Sampling temperature of training episodes. Training uses neither top-p nor top-k, so that recorded
    log-probs match the sampling distribution."""
    max_new_tokens: Positive = 1024
    """Token limit for one turn."""
    max_tokens: Positive = 4096
    """Token limit for a row, including the prompt and tool replies. An episode has one row, unless its
    history is rewritten or branches."""
    max_turns: Positive = 16
    """Maximum number of model turns in an episode."""
    max_calls: Positive = 64
    """Maximum number of tool calls in an episode."""
    max_bad_calls: Positive = 3
    """Number of consecutive bad tool calls (malformed, unknown tool, wrong arguments) after which an episode
    ends."""
    max_reply_tokens: Positive = 2048
    """Token limit for a tool reply or an environment message; longer texts are shortened."""
    cut_replies: Literal["head", "middle", "tail"] = "middle"
    """Part of an overlong tool reply that is cut out."""
    history: Literal["append", "fork", "fold"] = "append"
    """If a chat template rewrites earlier turns, `append` refuses the template, but `fork` and `fold` start
    a new row. A full row ends the episode; with `fold`, the episode continues in a new row without the
    oldest tool replies."""
    max_rows: Positive = 8
    """Maximum number of rows in an episode, with `history=fork`, `history=fold` or an agent."""
    tools: list[PathText] = []
    """Tools: registered names, `module:function`, `file.py:function`, or a folder of such files."""
    tool_args: dict[str, Options] = {}
    """Constructor arguments for each tool, e.g. `{calculator: {latency_mean: 0.3}}`."""
    tool_timeout: Seconds = 30.0
    """Deadline for one tool call or environment step, unless the tool or environment sets its own deadline.
    After a tool call that misses the deadline, the episode continues with an error reply."""
    parser: str = "hermes"
    """Format of the model's tool calls."""
    environment: Plugin = ""
    """Environment that answers turns without tool calls (a game, a simulated user): a name, `module:class` or
    `file.py:class`, e.g. with options `{gymnasium: {id: FrozenLake-v1}}`; empty: a turn without tool calls is
    the answer."""
    agent: Plugin = ""
    """Program that drives the episode through an endpoint with OpenAI's and Anthropic's APIs: a coding agent
    (`{claude_code: {}}`), `{command: {line: python agent.py}}`, `module:function` or `file.py:function`;
    empty: the worker runs the episode turn by turn."""
    agent_address: Text = "127.0.0.1"
    """Address on which each worker listens for agents, or a name that each machine resolves to its own
    address. Use addresses other than 127.0.0.1 only in private networks, because nothing is encrypted."""
    untrained_agents: list[PathText] = []
    """Agent requests whose turns are not used for training (titles, commit messages): names or globs that
    match their `model`, or a function of the request, `module:function` or `file.py:function`. These
    requests have separate limits, equal to `max_turns` and `max_rows`."""
    reward: Plugin = "final_number"
    """Reward function (with verl's signature, or called with one trajectory): a name, `module:function` or
    `file.py:function`; or several of these, e.g. `{gsm8k: {}, format: {weight: 0.2}}`."""
    reward_timeout: Seconds = 60.0
    """Deadline for one reward call, after which the episode fails with `reward_error`."""
    part_seconds: Seconds = 60.0
    """A turn that takes longer is saved in parts of this many seconds, so that a lost worker loses less than
    one part. A value above `episode_timeout` turns parts off."""
    episode_timeout: Seconds = 600.0
    """Time limit for one episode, after which the episode ends and is scored, or fails if no turn has
    finished. An episode that continues after the loss of its worker has only the remaining time."""
    retries: Count = 2
    """Further attempts at an episode that failed through no fault of the policy. Attempts interrupted by a
    stop of the run, or by the loss of a worker or server, do not count."""

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
    """`torch`: embedded in the rollout worker. `sglang`: servers shared by all workers."""
    servers: Positive = 1
    """sglang: number of servers to start."""
    urls: list[str] = []
    """sglang: attach to these servers instead of starting any, e.g. `[http://10.0.0.5:30000]`."""
    tp: Positive = 1
    """sglang: tensor-parallel size of a server (GPUs per server)."""
    server_args: Options = {}
    """sglang: further arguments for servers that the run starts, without `--`, e.g. `{mem-fraction-static:
    0.4}` (default: 0.85) if the trainer shares the GPU."""
    server_command: list[str] = []
    """sglang: command that starts a server; default: the current Python with `-m sglang.launch_server`."""
    colocated: Count = 0
    """Number of engines that share the trainer's devices, one side at a time: engines release KV cache and
    weights while the trainer trains, and the trainer's state is in main memory while the engines sample. 0:
    none; otherwise, the number must include all engines: `servers` with sglang, `rollout.workers` with
    torch. `trainer.ranks` must be at least this number (times `tp`)."""
    api_key_env: str = ""
    """sglang: environment variable that holds the servers' API key; empty: no key."""
    admin_key_env: str = ""
    """sglang: environment variable that holds the servers' admin key; empty: the API key."""
    start_timeout: Seconds = 600.0
    """sglang: deadline for a server to become ready."""
    request_timeout: Seconds = 300.0
    """sglang: a request whose stream is silent for this long is abandoned and continued elsewhere."""

    @property
    def remote(self) -> bool:
        """Tell whether engines are servers with supervisors, not parts of the workers."""
        return self.name == "sglang"

    @property
    def server_count(self) -> int:
        return (len(self.urls) or self.servers) if self.remote else 0


class ValidationConfig(Section, frozen=True):
    """Held-out episodes, run before and after training by the same workers at one fixed version."""

    every: Count = 0
    """Number of steps between further validations during training; 0: none."""
    samples: Count = 256
    """Number of held-out samples per validation. Each sample is answered as in training and, with `greedy`,
    also by greedy decoding. 0: no validation."""
    episodes: Positive = 1
    """Number of episodes per held-out sample that are sampled as in training; 2 or more add `mean@k`,
    `pass@k` and `maj@k`."""
    greedy: bool = True
    """Also answer each held-out sample with greedy decoding."""
    success: float = 1.0
    """An episode succeeds if its score (or `acc`, if the reward reports one) is at least this value. Set
    this key if scores are not between 0 and 1. The mean score is also reported."""
