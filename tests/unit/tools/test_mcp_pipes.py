"""Lines of an MCP server that are no messages: which call each of them answers."""

from __future__ import annotations

import pytest

from asyncrl.tools.mcp_pipes import answered_call_id

HALF = '"text": "\\ud800"'


@pytest.mark.parametrize(
    ("line", "call_id"),
    [
        ('{"jsonrpc": "2.0", "id": 7, "result": {' + HALF + "}}", 7),
        ('  {"id":7,"jsonrpc":"2.0","error":{' + HALF, 7),
        ('{"jsonrpc":"2.0","id":7,"result":{"content":[{"method":"GET","id":12', 7),
        ('{"jsonrpc":"2.0","result":{"method":"GET","items":[{"id":12,' + HALF + '}]},"id":7}\r\n', 7),
        ('{"result":{"items":[{"id":12,' + HALF + '}]},"jsonrpc":"2.0","id":7}', 7),
        ('{"result":{"items":[{"id":12,' + HALF + '}]},"id":7, "jsonrpc":"2.0"}', 7),
        ('{"result":{"text":"if (x) { \\" ","a":' + HALF[8:] + '},"jsonrpc":"2.0","id":7}', 7),
        ('{"jsonrpc":"2.0","result":{"items":[{"x":1,"id":12}', None),
        ('{"jsonrpc":"2.0","result":{"items":[{"id":12,' + HALF, None),
        ('DEBUG sending {"jsonrpc":"2.0","id":7,"result":{}}', None),
        ('{"level":"debug","sent":"{\\"jsonrpc\\":1}","jsonrpc":"2.0","id":7}', None),
        ('{"jsonrpc":"2.0","id":7,"method":"roots/list","params":{' + HALF + "}}", None),
        ('{"method":"roots/list","params":{' + HALF + '},"jsonrpc":"2.0","id":7}', None),
        ('{"jsonrpc":"2.0","method":"notifications/message","params":{"x":1,"id":7}', None),
        ('{"id":7,"result":{' + HALF + "}}", None),  # of no protocol that is known
        ("", None),
    ],
)
def test_the_call_that_a_line_answers(line: str, call_id: int | None) -> None:
    assert answered_call_id(line.encode()) == call_id
