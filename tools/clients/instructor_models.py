"""instructor: typed answers by a call, by JSON, and in part as they grow."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    text: str


request = {"model": "policy", "messages": [{"role": "user", "content": "What is 1 + 2?"}]}
mode, _, partial = sys.argv[1].partition(".")
client = instructor.from_openai(OpenAI(), mode=instructor.Mode[mode])
if partial:
    *_, answer = client.chat.completions.create_partial(response_model=Sum, **request)
else:
    answer = client.chat.completions.create(response_model=Sum, **request)
print(answer.text)
