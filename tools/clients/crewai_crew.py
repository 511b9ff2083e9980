"""CrewAI: a crew of one agent with a tool."""

import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


llm = LLM(model="openai/policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(role="helper", goal="Answer", backstory="You help.", llm=llm, tools=[add])
task = Task(description="What is 1 + 2?", expected_output="A number", agent=agent)
print(Crew(agents=[agent], tasks=[task], tracing=False).kickoff().raw)
