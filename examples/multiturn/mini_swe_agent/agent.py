"""mini-swe-agent in an episode: it asks the model for a command, runs it, and shows the output to the model.

The program reads the sample from stdin: a system prompt, worked examples as earlier turns, and the task. The
last line of stdout is the result. Each episode has its own directory.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel


class ShownAgent(DefaultAgent):
    """Shows its model worked examples, between the system prompt and the task."""

    def __init__(self, examples: list[dict[str, Any]], *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.examples = examples

    def add_messages(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        if not self.messages:
            messages = (messages[0], *self.examples, *messages[1:])
        return super().add_messages(*messages)


def main() -> None:
    system, *examples, task = json.load(sys.stdin)["prompt"]
    config = yaml.safe_load(Path(__file__).with_name("mini.yaml").read_text())
    model = LitellmTextbasedModel(model_name=f"openai/{os.environ['OPENAI_MODEL']}", **config["model"])
    shell = LocalEnvironment(**config["environment"])
    agent = ShownAgent(examples, model, shell, system_template=system["content"], **config["agent"])
    ended = agent.run(task["content"])
    commands = sum(len(message.get("extra", {}).get("actions", ())) for message in agent.messages)
    print(json.dumps({"submission": ended["submission"].strip(), "commands": commands}))


if __name__ == "__main__":
    main()
