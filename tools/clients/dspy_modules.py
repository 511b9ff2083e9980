"""DSPy: Predict and ReAct, by chat, responses and completions."""

import os
import sys

import dspy


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


name, _, kind = sys.argv[1].partition(".")
endpoint = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
prefix = "text-completion-openai" if kind == "text" else "openai"
dspy.configure(lm=dspy.LM(f"{prefix}/policy", model_type=kind or "chat", cache=False, **endpoint))
module = (
    dspy.ReAct("question -> answer", tools=[add]) if name == "ReAct" else dspy.Predict("question -> answer")
)
print(module(question="What is 1 + 2?").answer)
