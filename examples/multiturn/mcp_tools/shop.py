"""An MCP server for a shop with items and prices. Any other server works in the same way."""

from mcp.server.mcpserver import MCPServer

PRICES = {"lamp": 40, "chair": 65, "table": 180, "mug": 7, "clock": 25, "kettle": 32, "rug": 90, "vase": 15}

server = MCPServer("shop")


@server.tool(structured_output=False)
def price(item: str) -> str:
    """The price of one item."""
    if item not in PRICES:
        raise ValueError(f"we have no {item}, only {', '.join(PRICES)}")
    return str(PRICES[item])


@server.tool(structured_output=False)
def items() -> list[str]:
    """All that the shop has."""
    return list(PRICES)


if __name__ == "__main__":
    server.run("stdio")
